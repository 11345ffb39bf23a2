"""Rows of different length as one tensor."""

from collections.abc import Sequence
from typing import cast

from torch import Tensor

from diffprune.ops.arguments import shown


def pad_rows(rows: Sequence[Tensor], value: float | int | bool = 0, *, left: bool = False) -> Tensor:
    """Tensors of different length in their first axis, stacked and padded at the end.

    Args:
        value: Of the padding.
        left: Pad in front instead, as prompts are padded.
    """
    given = cast(Sequence[object], rows)
    if not given or not all(isinstance(row, Tensor) and row.ndim for row in given):
        raise ValueError(f"rows is {shown(rows)}; give a list of tensors, at least one, each with a first axis")
    width = max(len(row) for row in rows)
    out = rows[0].new_full((len(rows), width, *rows[0].shape[1:]), value)
    for i, row in enumerate(rows):
        start = width - len(row) if left else 0
        out[i, start : start + len(row)] = row
    return out
