"""What families share that put whole tiles into the prompt one after the other, the overview last."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from diffprune.backbones._clip import grid_boxes
from diffprune.backbones.prompts import Batch
from diffprune.ops import pad_rows
from diffprune.types import Grid, VisualTokens


def stacked_tiles(
    x: Float[Tensor, "tiles N D"], grids: Sequence[Grid], batch: Batch, *, group: int, extra: dict[str, Tensor]
) -> VisualTokens:
    """One row per picture, its tiles one below the other.

    Args:
        x: Features of every tile of every picture, in the order of the prompts.
        grids: (rows, columns) of each picture's tiles; more than one tile come with an overview behind them.
        batch: Whose pictures they are.
        group: Patches in one token.
        extra: Further values per tile and token, padded like `x`.
    """
    counts = [num_tiles(grid) for grid in grids]
    if sum(counts) != len(x):
        raise ValueError(
            f"the processor cut {len(x)} tiles where its rule gives {sum(counts)}; use the model's own image processor"
        )
    tokens_of_tile = x.shape[1]
    side = int(tokens_of_tile**0.5)

    def rows(value: Tensor) -> Tensor:
        return pad_rows([image.flatten(0, 1) for image in value.split(counts)])

    known = zip(batch.sizes, grids, strict=True) if batch.sizes else ()  # sizes, and with them boxes
    boxes = [tile_boxes(size, grid, side) for size, grid in known]
    lengths = [count * tokens_of_tile for count in counts]
    return VisualTokens(
        x=rows(x),
        mask=pad_rows([torch.ones(length, dtype=torch.bool, device=x.device) for length in lengths]),
        grid=tuple((count * side, side) for count in counts),
        group=group,
        segment=pad_rows([torch.arange(length, device=x.device) // tokens_of_tile for length in lengths], -1),
        seeds=batch.seeds,
        boxes=pad_rows(boxes).to(x.device) if boxes else None,
        **cast(Any, {name: rows(value) for name, value in extra.items()}),
    )


def tile_grids(batch: Batch, rule: Callable[[tuple[int, int]], Grid]) -> list[Grid]:
    """(rows, columns) of each picture's tiles: as they are known, or by the rule for a picture of (width, height)."""
    return [rule(size) for size in batch.sizes] if batch.tile_grids is None else list(batch.tile_grids)


def num_tiles(grid: Grid) -> int:
    """Tiles of a picture, with the overview that several come with."""
    return grid[0] * grid[1] + 1 if grid[0] * grid[1] > 1 else 1


def tile_boxes(size: tuple[int, int], grid: Grid, side: int) -> Float[Tensor, "N 4"]:
    """Where each token looks in the picture: its tiles row by row, stretched to fill it, then the overview."""
    width, height = size
    rows, columns = grid
    parts = []
    for row in range(rows):
        y = torch.linspace(row * height / rows, (row + 1) * height / rows, side + 1)
        for column in range(columns):
            x = torch.linspace(column * width / columns, (column + 1) * width / columns, side + 1)
            parts.append(grid_boxes(x, y))
    if num_tiles(grid) > 1:
        parts.append(grid_boxes(torch.linspace(0, width, side + 1), torch.linspace(0, height, side + 1)))
    return torch.cat(parts)
