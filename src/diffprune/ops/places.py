"""Where the visual tokens of a prompt look, for methods inside the language model that need to know."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffprune.types import Origin


def grid_places(origin: Origin) -> Int[Tensor, "B M 2"]:
    """(row, column) of each token on its image's grid, in raster order; 0 at padding.

    Families that put a view of the whole picture before its tiles count on through all of them.
    """
    tokens, index = origin.tokens, origin.index.clamp_min(0)
    num_tokens = tokens.x.shape[1]
    grids = tokens.grid or ((1, num_tokens),) * len(tokens)
    columns = torch.tensor([grid[1] for grid in grids], device=index.device)[index // num_tokens]
    token = index % num_tokens
    places = torch.stack([token // columns, token % columns], dim=-1)
    return places.masked_fill((origin.index < 0)[..., None], 0)


def encoder_features(origin: Origin, width: int) -> Float[Tensor, "B M W"]:
    """The encoder's features of each token in float32, the mean of its patches of that width; 0 at padding."""
    tokens = origin.tokens
    taken = tokens.x.flatten(0, 1)[origin.index.clamp_min(0)].float()  # [B, M, D]
    units = taken.reshape(*taken.shape[:-1], -1, width).mean(-2)
    return units.masked_fill((origin.index < 0)[..., None], 0.0)
