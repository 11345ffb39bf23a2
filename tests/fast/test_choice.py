"""The largest scores without a sort."""

import pytest
import torch

from diffprune.fast.choice import RANKED_AT_ONCE, keep_largest
from diffprune.ops import hard_topk


@pytest.mark.parametrize("k", [1, 5, 40])
def test_the_choice_without_a_sort_is_that_of_hard_topk(k: int) -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(k))
    assert torch.equal(keep_largest(logits, k), hard_topk(logits, k))


def test_of_equal_logits_the_lower_index_goes_first() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    assert keep_largest(logits, 4).tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]] == hard_topk(logits, 4).tolist()


def test_a_row_too_long_for_all_pairs_is_sorted_instead() -> None:
    logits = torch.randn(1, RANKED_AT_ONCE + 8, generator=torch.Generator().manual_seed(0))
    logits[0, 5] = logits[0, 9]
    assert torch.equal(keep_largest(logits, 64), hard_topk(logits, 64))
