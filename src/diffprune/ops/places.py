"""Where visual tokens look, for methods that need to know."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffprune.types import Origin, VisualTokens


def places(tokens: VisualTokens) -> Float[Tensor, "B N 2"] | None:
    """Where each token looks, in tokens: on its image's grid, and where tiles overlap in the picture itself.

    None where that is not known. Padding holds anything finite, and nothing waits for the device.
    """
    if tokens.segment is None and tokens.grid:
        index = torch.arange(tokens.x.shape[1], device=tokens.x.device)
        rows = {grid: torch.stack([index // grid[1], index % grid[1]], dim=-1).float() for grid in set(tokens.grid)}
        return torch.stack([rows[grid] for grid in tokens.grid])
    if tokens.boxes is None:
        return None
    boxes = tokens.boxes.float()
    first, last = boxes[..., :2], boxes[..., 2:]  # [B, N, 2]
    real = tokens.mask.unsqueeze(-1)
    side = ((last - first) * real).mean(-1).sum(-1) / tokens.mask.sum(-1).clamp(min=1)  # of the row's mean token
    return ((first + last) / 2 / side.clamp(min=1e-6).view(-1, 1, 1)).where(real, 0.0)


def grid_places(origin: Origin) -> Int[Tensor, "B M 2"]:
    """(row, column) of each token on its image's grid, in raster order; 0 at padding.

    Families that put a view of the whole picture before its tiles count on through all of them.
    """
    tokens, index = origin.tokens, origin.index.clamp_min(0)
    num_tokens = tokens.x.shape[1]
    grids = tokens.grid or ((1, num_tokens),) * len(tokens)
    columns = torch.tensor([max(1, grid[1]) for grid in grids], device=index.device)[index // num_tokens]
    token = index % num_tokens
    places = torch.stack([token // columns, token % columns], dim=-1)
    return places.masked_fill((origin.index < 0)[..., None], 0)


def encoder_features(origin: Origin, width: int) -> Float[Tensor, "B M W"]:
    """The encoder's features of each token in float32, the mean of its patches of that width; 0 at padding."""
    tokens = origin.tokens
    taken = tokens.x.flatten(0, 1)[origin.index.clamp_min(0)].float()  # [B, M, D]
    units = taken.reshape(*taken.shape[:-1], -1, width).mean(-2)
    return units.masked_fill((origin.index < 0)[..., None], 0.0)
