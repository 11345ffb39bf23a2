"""Average tokens over K cells of the image: the control that selects nothing."""

import math
from functools import lru_cache

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from diffprune.methods.base import Card, Counts, Kept, MergingPruner
from diffprune.ops.hard_topk import check_inputs
from diffprune.registry import METHODS
from diffprune.types import Grid, VisualTokens


@METHODS.register("average_pool")
class AveragePool(MergingPruner):
    """Mean of each of K cells that tile the grid; a cell's token stands at the middle of the cell.

    Where an image's tokens are no full grid (several tiles, unpadded borders) the cells are runs in raster order.
    """

    card = Card(idea="averages the tokens of K cells that tile the image")

    def reduce(self, tokens: VisualTokens, k: Counts) -> Kept:
        cell, places = cells_of(tokens, k, "average_pool")
        real = tokens.mask[..., None]
        x = torch.where(real, tokens.x, 0).float()
        member = (cell[..., None] == torch.arange(places.shape[-1], device=cell.device)) & real  # [B, N, K]
        counts = member.sum(1).clamp(min=1)[..., None]
        return Kept((member.float().transpose(1, 2) @ x / counts).to(tokens.x.dtype), places)


def cells_of(tokens: VisualTokens, k: Counts, method: str) -> tuple[Int[Tensor, "B N"], Int[Tensor, "B K"]]:
    """The cell of each token (-1 for padding), and the token in the middle of each of a row's k cells (then -1)."""
    check_inputs(tokens.mask.float(), k, tokens.mask)
    device = tokens.x.device
    plans = [cell_table(grid, count, device) for grid, count in grids_and_counts(tokens, k, method)]
    cell, middle = (pad_sequence(list(part), batch_first=True, padding_value=-1) for part in zip(*plans, strict=True))
    return at_real(cell, tokens), real_index(middle, tokens)


def grids_and_counts(tokens: VisualTokens, k: Counts, method: str) -> list[tuple[Grid, int]]:
    """Of each image the grid of its real tokens, one row of them where they are no full grid, and its budget."""
    if not tokens.grid:
        raise ValueError(f"{method} needs VisualTokens.grid, which is empty; give (rows, columns)")
    counts = [tokens.x.shape[1]] * len(tokens) if tokens.is_full else tokens.counts.tolist()
    budgets = [k] * len(tokens) if isinstance(k, int) else k.tolist()
    grids = [
        (rows, columns) if rows * columns == real else (1, real)
        for (rows, columns), real in zip(tokens.grid, counts, strict=True)
    ]
    return list(zip(grids, budgets, strict=True))


def at_real(values: Int[Tensor, "B M"], tokens: VisualTokens) -> Int[Tensor, "B N"]:
    """Each row's values at its real tokens, in order; -1 at padding."""
    if tokens.is_full:
        return values
    place = (tokens.mask.cumsum(-1) - 1).clamp(min=0)
    return values.gather(-1, place).masked_fill(~tokens.mask, -1)


def real_index(places: Int[Tensor, "B K"], tokens: VisualTokens) -> Int[Tensor, "B K"]:
    """The index of each row's n-th real token for every n in `places`; -1 stays."""
    if tokens.is_full:
        return places
    order = (~tokens.mask).byte().sort(dim=-1, stable=True).indices
    return torch.where(places >= 0, order.gather(-1, places.clamp(min=0)), -1)


@lru_cache(maxsize=64)  # pictures of one size are many
def cell_table(grid: Grid, count: int, device: torch.device) -> tuple[Int[Tensor, " n"], Int[Tensor, " k"]]:
    """`split_grid` as tensors."""
    own, middle = split_grid(grid, count)
    return torch.tensor(own, dtype=torch.int64, device=device), torch.tensor(middle, dtype=torch.int64, device=device)


def split_grid(grid: Grid, count: int) -> tuple[list[int], list[int]]:
    """The cell of each token of the grid, and the token in the middle of each of `count` cells, ascending.

    The grid is cut into bands of rows and each band into columns. The number of bands is one that divides `count` into
    cells at most twice as long as wide, where there is one (the squarest, then the wider: 64 of 24 x 24 is 8 x 8,
    128 is 8 x 16, 32 is 4 x 8), else the one with the squarest cells; the first bands then have a column more.
    """
    if count == 0:
        return [-1] * (grid[0] * grid[1]), []
    rows, columns = grid

    def stretch(bands: int) -> float:
        return round(abs(math.log(rows / bands) - math.log(columns * bands / count)), 9)

    fitting = range(-(-count // columns), min(rows, count) + 1)
    bands = min(fitting, key=lambda n: (count % n != 0 or stretch(n) > round(math.log(2), 9), stretch(n)))
    widths = [count // bands + (band < count % bands) for band in range(bands)]
    first = [sum(widths[:band]) for band in range(bands)]
    own = []
    for row in range(rows):
        band = (2 * row + 1) * bands // (2 * rows)
        own += [first[band] + (2 * column + 1) * widths[band] // (2 * columns) for column in range(columns)]
    middle = [
        (2 * band + 1) * rows // (2 * bands) * columns + (2 * place + 1) * columns // (2 * widths[band])
        for band in range(bands)
        for place in range(widths[band])
    ]
    return own, middle
