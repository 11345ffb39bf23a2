"""Positions of the columns that stay: their own, or counted without gaps from 0."""

import torch

from diffprune.backbones.splice import positions_of

COLUMNS = torch.tensor([[0, 1, 4, 6], [2, 3, 5, 6]])
MASK = torch.tensor([[False, True, True, True], [True, True, True, True]])  # the first row is padded in front
UNPRUNED = torch.stack([torch.arange(7), torch.arange(10, 17)])


def test_positions_are_those_before_anything_was_dropped() -> None:
    assert positions_of(COLUMNS, MASK, UNPRUNED, packed=False).tolist() == [[0, 1, 4, 6], [12, 13, 15, 16]]


def test_packed_positions_count_from_zero_behind_the_padding() -> None:
    assert positions_of(COLUMNS, MASK, UNPRUNED, packed=True).tolist() == [[0, 0, 1, 2], [0, 1, 2, 3]]
    three = UNPRUNED.expand(3, 2, 7)  # as Qwen has them
    assert positions_of(COLUMNS, MASK, three, packed=True).tolist() == [[[0, 0, 1, 2], [0, 1, 2, 3]]] * 3
