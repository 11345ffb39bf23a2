"""Rows of different length as one tensor."""

import torch

from diffprune.ops import pad_rows

ROWS = [torch.tensor([1, 2, 3]), torch.tensor([4])]


def test_rows_are_padded_at_the_end_or_in_front() -> None:
    assert pad_rows(ROWS, -1).tolist() == [[1, 2, 3], [4, -1, -1]]
    assert pad_rows(ROWS, -1, left=True).tolist() == [[1, 2, 3], [-1, -1, 4]]


def test_an_empty_row_is_all_padding_and_further_axes_stay() -> None:
    rows = [torch.ones(2, 3), torch.ones(0, 3)]
    assert pad_rows(rows).tolist() == [[[1.0] * 3] * 2, [[0.0] * 3] * 2]
