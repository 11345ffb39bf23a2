import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diffprune.ops import hard_mask, hard_topk, take_tokens
from tests.searching import examples

values = st.sampled_from([-math.inf, -2.0, -1.0, 0.0, 0.5, 3.0])


@given(rows=st.lists(st.lists(values, min_size=6, max_size=6), min_size=1, max_size=3), data=st.data())
@examples(100)
def test_it_keeps_the_largest_real_tokens_and_of_equals_the_first(rows, data):
    masks = [data.draw(st.lists(st.booleans(), min_size=6, max_size=6)) for _ in rows]
    k = [data.draw(st.integers(0, sum(mask))) for mask in masks]
    keep = hard_topk(torch.tensor(rows), torch.tensor(k), torch.tensor(masks))
    marked = hard_mask(torch.tensor(rows), torch.tensor(k), torch.tensor(masks))

    assert keep.dtype == torch.int64 and keep.shape == (len(rows), max(k))
    for row, mask, count, kept, mark in zip(rows, masks, k, keep.tolist(), marked, strict=True):
        real = [index for index in range(6) if mask[index]]
        expected = sorted(sorted(real, key=lambda index: (-row[index], index))[:count])
        assert kept == expected + [-1] * (max(k) - count)
        assert mark.nonzero().flatten().tolist() == expected


def test_an_int_serves_all_rows():
    logits = torch.tensor([[0.1, 0.9, 0.5], [0.7, 0.2, 0.7]])
    assert hard_topk(logits, 2).tolist() == [[1, 2], [0, 2]]
    assert hard_topk(logits, 0).shape == (2, 0)
    assert hard_topk(logits, 3).tolist() == [[0, 1, 2], [0, 1, 2]]
    assert hard_topk(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)).shape == (0, 0)


def test_low_precision_logits_rank_too():
    assert hard_topk(torch.tensor([[1.0, 3.0, 2.0]], dtype=torch.bfloat16), 2).tolist() == [[1, 2]]


def test_padding_may_hold_anything():
    logits = torch.tensor([[0.0, math.nan, 5.0]])
    assert hard_topk(logits, 1, torch.tensor([[True, False, False]])).tolist() == [[0]]


@pytest.mark.parametrize("choose", [hard_topk, hard_mask])
@pytest.mark.parametrize(
    ("logits", "k", "mask", "message"),
    [
        (torch.zeros(1, 3), 4, None, "k=4 is not between 0 and the 3 tokens"),
        (torch.zeros(1, 3), -1, None, "k=-1 is not between"),
        (torch.zeros(2, 3), torch.tensor([1, 4]), None, "k=4 in row 1"),
        (torch.zeros(1, 3), 2, torch.tensor([[True, False, False]]), "k=2 in row 0 is not between 0 and its 1 real"),
        (torch.tensor([[0.0, math.nan]]), 1, None, r"logits\[0, 1\] is nan; leave such tokens out with mask"),
    ],
)
def test_bad_input_is_refused_with_its_value(choose, logits, k, mask, message):
    with pytest.raises(ValueError, match=message):
        choose(logits, k, mask)


def test_take_tokens_gathers_in_order_and_fills_with_zeros():
    x = torch.arange(12.0).view(1, 4, 3).requires_grad_()
    taken = take_tokens(x, torch.tensor([[1, 3, -1]]))
    assert taken.tolist() == [[[3, 4, 5], [9, 10, 11], [0, 0, 0]]]
    (grad,) = torch.autograd.grad(taken.sum(), x)
    assert grad[0, :, 0].tolist() == [0, 1, 0, 1]


def test_take_tokens_takes_whole_numbers_too():
    coords = torch.tensor([[[0, 0], [0, 1], [1, 0]]])
    assert take_tokens(coords, torch.tensor([[0, 2]])).tolist() == [[[0, 0], [1, 0]]]
