"""Keep the square in the middle of the image: where photographers put what they mean."""

import math
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from diffprune.methods.base import Card, ScoringPruner
from diffprune.registry import METHODS
from diffprune.types import Grid, VisualTokens


@METHODS.register("centre")
class Centre(ScoringPruner):
    """The tokens nearest to the centre by the larger of their distances in rows and columns: squares within squares.

    Where an image's tokens are no full grid (several tiles, unpadded borders) the middle of the raster order stands in.
    """

    card = Card(idea="keeps the square in the middle of the image")

    def score(self, tokens: VisualTokens) -> Float[Tensor, "B N"]:
        if not tokens.grid:
            raise ValueError("centre needs VisualTokens.grid, which is empty; give (rows, columns)")
        counts = [tokens.x.shape[1]] * len(tokens) if tokens.is_full else tokens.counts.tolist()
        grids = [
            grid if math.prod(grid) == count else (1, count) for grid, count in zip(tokens.grid, counts, strict=True)
        ]
        closeness = [-distance_to_centre(grid, tokens.x.device) for grid in grids]
        if tokens.is_full:
            return torch.stack(closeness)
        logits = torch.zeros(tokens.mask.shape, device=tokens.x.device)
        logits[tokens.mask] = torch.cat(closeness)
        return logits


@lru_cache(maxsize=64)  # pictures of one size are many
def distance_to_centre(grid: Grid, device: torch.device) -> Float[Tensor, " N"]:
    """Of each cell in raster order: the larger of both distances, in half grids; the smaller one settles equal ones."""
    rows, columns = (((torch.arange(size) + 0.5) * 2 / size - 1).abs() for size in grid)
    both = torch.stack(torch.broadcast_tensors(rows[:, None], columns[None, :]))
    return (both.amax(0) + 1e-3 * both.amin(0)).flatten().to(device)
