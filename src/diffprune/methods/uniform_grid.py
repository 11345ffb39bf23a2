"""Keep tokens spread evenly over the image: subsampling without looking."""

import math
from functools import lru_cache

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from diffprune.methods.average_pool import grids_and_counts, real_index
from diffprune.methods.base import Card, Counts, Pruner
from diffprune.registry import METHODS
from diffprune.types import Grid, VisualTokens


@METHODS.register("uniform_grid")
class UniformGrid(Pruner):
    """A centred h x w lattice as large as K allows; what is left of K is spread over the remaining tokens.

    Where an image's tokens are no full grid (several tiles, unpadded borders) they are taken evenly in raster order.
    """

    card = Card(idea="keeps an evenly spaced lattice of tokens")

    def select(self, tokens: VisualTokens, k: Counts) -> Int[Tensor, "B K"]:
        plans = [
            lattice_table(grid, budget, tokens.x.device) for grid, budget in grids_and_counts(tokens, k, "uniform_grid")
        ]
        return real_index(pad_sequence(plans, batch_first=True, padding_value=-1), tokens)


@lru_cache(maxsize=64)  # pictures of one size are many
def lattice_table(grid: Grid, k: int, device: torch.device) -> Int[Tensor, " k"]:
    """`spread_evenly` as a tensor."""
    return torch.tensor(spread_evenly(grid, k), dtype=torch.int64, device=device)


def spread_evenly(grid: Grid, k: int) -> list[int]:
    """Raster indices, ascending, of k cells spread over the grid."""
    if k == 0:
        return []
    (rows, columns), (height, width) = grid, _lattice(grid, k)
    lattice = {
        math.floor((i + 0.5) * rows / height) * columns + math.floor((j + 0.5) * columns / width)
        for i in range(height)
        for j in range(width)
    }
    rest = [cell for cell in range(rows * columns) if cell not in lattice]
    order = sorted(range(len(rest)), key=_reversed_bits)
    return sorted(lattice.union(rest[place] for place in order[: k - len(lattice)]))


def _lattice(grid: Grid, k: int) -> Grid:
    """Height and width of the largest lattice of at most k cells whose spacing is at most twice as wide as it is high.

    Of equally large ones the squarest spacing, then the wider: 64 of 24 x 24 is 8 x 8, 128 is 8 x 16, 32 is 4 x 8.
    """
    rows, columns = grid
    sizes = [
        (height, width) for height in range(1, min(rows, k) + 1) for width in range(1, min(columns, k // height) + 1)
    ]

    def stretch(size: Grid) -> float:
        return round(abs(math.log((rows / size[0]) / (columns / size[1]))), 9)

    even = [size for size in sizes if stretch(size) <= round(math.log(2), 9)] or [min(sizes, key=stretch)]
    return max(even, key=lambda size: (size[0] * size[1], -stretch(size), size[1]))


def _reversed_bits(number: int) -> int:
    """0, 1/2, 1/4, 3/4, ... as integers: places sorted by it are visited far from one another."""
    return int(f"{number:032b}"[::-1], 2)
