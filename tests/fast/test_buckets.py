"""Sizes of a bucket, and its columns after a cut."""

import torch

from diffprune.fast.buckets import num_columns
from diffprune.fast.cuts import columns_after_cut


def test_a_cut_leaves_the_text_and_the_chosen_columns_in_order() -> None:
    first, keep = torch.tensor([2, 0]), torch.tensor([[0, 3], [1, 2]])
    left = columns_after_cut(first, keep, visual=4, width=8)
    assert left.tolist() == [[0, 1, 2, 5, 6, 7], [1, 2, 4, 5, 6, 7]]


def test_a_cache_has_room_for_the_prompt_and_its_answer_in_eights() -> None:
    assert num_columns(104, 24) == 128
    assert num_columns(104, 25) == 136
