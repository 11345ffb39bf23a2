"""Greedy choices: against hand-worked examples, against brute force, and on ragged batches."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from diffprune.ops import (
    cosine_matrix,
    greedy_coverage,
    greedy_determinant,
    greedy_max_min,
    greedy_orthogonal,
    unit_range,
)


def similarity_to_real(x: Tensor, mask: Tensor | None) -> Tensor:
    """Every real token is a target."""
    similarity = (x @ x.transpose(1, 2)).clamp(min=0)
    return similarity if mask is None else similarity.masked_fill(~mask[..., None], 0)


RULES: dict[str, Callable[..., Tensor]] = {
    "determinant": lambda x, k, mask=None: greedy_determinant(x @ x.transpose(1, 2), k, mask),
    "orthogonal": greedy_orthogonal,
    "max_min": lambda x, k, mask=None: greedy_max_min(torch.cdist(x, x), k, mask),
    "coverage": lambda x, k, mask=None: greedy_coverage(similarity_to_real(x, mask), k, mask),
}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- what all of them promise -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_exactly_k_real_tokens_are_kept_in_ascending_order(rule: str) -> None:
    x, counts, budgets = drawn(3, 9, 12), [9, 6, 1], [4, 6, 1]
    mask = torch.arange(9) < torch.tensor(counts)[:, None]
    keep = RULES[rule](x, torch.tensor(budgets), mask)
    assert keep.shape == (3, 6) and keep.dtype == torch.int64
    for row, (count, budget) in enumerate(zip(counts, budgets, strict=True)):
        chosen = keep[row, :budget].tolist()
        assert chosen == sorted(set(chosen)) and chosen[0] >= 0 and chosen[-1] < count
        assert (keep[row, budget:] == -1).all()


@pytest.mark.parametrize("rule", RULES)
def test_what_padding_holds_does_not_matter(rule: str) -> None:
    x, mask = drawn(1, 9, 12), torch.arange(9)[None] < 6
    alone = RULES[rule](x[:, :6], torch.tensor([3]))
    for filler in (0.0, 1e4, torch.nan):
        padded = torch.where(mask[..., None], x, filler)
        assert torch.equal(RULES[rule](padded, torch.tensor([3]), mask), alone)


@pytest.mark.parametrize("rule", RULES)
def test_a_larger_budget_only_adds_tokens(rule: str) -> None:
    x = drawn(1, 12, 16)
    sets = [set(RULES[rule](x, k)[0].tolist()) for k in range(13)]
    assert all(smaller < larger for smaller, larger in itertools.pairwise(sets))
    assert sets[12] == set(range(12))


@pytest.mark.parametrize("rule", RULES)
def test_of_equal_tokens_the_lower_index_goes_first(rule: str) -> None:
    x = torch.ones(1, 5, 3)
    assert RULES[rule](x, 2).tolist() == [[0, 1]]


@pytest.mark.parametrize("rule", RULES)
def test_a_budget_of_nothing_keeps_nothing(rule: str) -> None:
    assert RULES[rule](drawn(2, 4, 3), 0).shape == (2, 0)
    assert RULES[rule](drawn(2, 4, 3), torch.tensor([0, 0])).shape == (2, 0)


@pytest.mark.parametrize("rule", RULES)
def test_a_budget_past_the_real_tokens_is_refused_with_both_numbers(rule: str) -> None:
    with pytest.raises(ValueError, match="k=5 in row 1 is not between 0 and its 4 real tokens"):
        RULES[rule](drawn(2, 6, 8), torch.tensor([5, 5]), torch.tensor([[True] * 6, [True] * 4 + [False] * 2]))


@pytest.mark.parametrize("rule", RULES)
def test_gradients_stop_here(rule: str) -> None:
    assert not RULES[rule](drawn(1, 5, 8).requires_grad_(), 2).requires_grad


# --- determinant ------------------------------------------------------------------------------------------------------


def test_the_determinant_takes_the_longest_then_what_is_new() -> None:
    x = torch.tensor([[[3.0, 0.0, 0.0], [2.9, 0.1, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 1.0]]])
    kernel = x @ x.transpose(1, 2)
    assert [greedy_determinant(kernel, k).tolist() for k in (1, 2, 3)] == [[[0]], [[0, 2]], [[0, 2, 3]]]


def test_every_step_has_the_best_determinant_there_is_for_one_more_token() -> None:
    x = drawn(1, 7, 5).double()
    kernel = x @ x.transpose(1, 2)
    taken: list[int] = []
    for k in range(1, 6):
        gains = {
            token: torch.det(kernel[0][[*taken, token]][:, [*taken, token]]).item()
            for token in range(7)
            if token not in taken
        }
        taken.append(max(gains, key=lambda token: gains[token]))
        assert greedy_determinant(kernel, k).tolist() == [sorted(taken)]


def test_two_steps_find_the_best_pair_of_a_small_kernel() -> None:
    kernel = torch.tensor([[[4.0, 1.9, 0.0], [1.9, 1.0, 0.0], [0.0, 0.0, 0.9]]])
    pairs = {
        pair: torch.det(kernel[0][list(pair)][:, list(pair)]).item() for pair in itertools.combinations(range(3), 2)
    }
    assert greedy_determinant(kernel, 2).tolist() == [list(max(pairs, key=lambda pair: pairs[pair]))]


@pytest.mark.parametrize("k", [1, 8, 24])
def test_tokens_and_their_gram_matrix_give_the_same_choice(k: int) -> None:
    x = drawn(2, 40, 32)
    assert torch.equal(greedy_orthogonal(x, k), greedy_determinant(x @ x.transpose(1, 2), k))


def test_past_the_rank_the_longest_goes_first_and_nothing_is_nan() -> None:
    x = drawn(1, 4, 3)
    x = torch.cat([x, x[:, :1] * torch.tensor([0.9, 0.2, 0.7])[:, None]], dim=1)  # 4, 5, 6 lie in the span
    first = set(greedy_orthogonal(x, 3)[0].tolist())
    norms = x[0].norm(dim=-1)
    rest = sorted((token for token in range(7) if token not in first), key=lambda token: -norms[token].item())
    for k in (4, 5, 6):
        assert set(greedy_orthogonal(x, k)[0].tolist()) == first | set(rest[: k - 3])


def test_a_row_of_zeros_is_chosen_from_the_left() -> None:
    assert greedy_orthogonal(torch.zeros(1, 5, 3), 3).tolist() == [[0, 1, 2]]


# --- max-min ----------------------------------------------------------------------------------------------------------


def test_max_min_begins_with_the_loneliest_token_and_goes_on_far_from_it() -> None:
    place = torch.tensor([0.0, 1.0, 2.0, 6.0, 20.0])
    distance = (place[:, None] - place).abs()[None]
    assert greedy_max_min(distance, 1).tolist() == [[4]]  # its nearest neighbour is 14 away
    assert greedy_max_min(distance, 2).tolist() == [[0, 4]]  # 20 away from what is taken
    assert greedy_max_min(distance, 3).tolist() == [[0, 3, 4]]  # 6 away, against 1 and 2


def test_a_taken_token_is_not_taken_again_where_all_are_duplicates() -> None:
    assert greedy_max_min(torch.zeros(1, 4, 4), 3).tolist() == [[0, 1, 2]]


# --- coverage ---------------------------------------------------------------------------------------------------------


def test_coverage_counts_only_what_is_not_covered_yet() -> None:
    coverage = torch.tensor([[[0.6, 0.5, 0.0], [0.6, 0.6, 0.1], [0.0, 0.0, 0.4]]])  # token 1 repeats token 0
    assert greedy_coverage(coverage, 1).tolist() == [[0]]  # gains 1.2, 1.1, 0.5
    assert greedy_coverage(coverage, 2).tolist() == [[0, 2]]  # gains 0.0 and 0.4


def test_coverage_reaches_its_bound_against_the_best_set() -> None:
    for seed in range(5):
        coverage = torch.rand(1, 8, 9, generator=torch.Generator().manual_seed(seed))
        best = max(coverage[0][:, list(pick)].amax(-1).sum().item() for pick in itertools.combinations(range(9), 3))
        reached = coverage[0][:, greedy_coverage(coverage, 3)[0]].amax(-1).sum().item()
        assert (1 - 1 / 2.718281828) * best <= reached <= best + 1e-6


# --- what they are run on ---------------------------------------------------------------------------------------------


def test_cosines_are_of_angles_alone() -> None:
    x = torch.tensor([[[2.0, 0.0], [0.0, 5.0], [3.0, 3.0], [0.0, 0.0]]])
    half = 2**-0.5
    wanted = [[1, 0, half, 0], [0, 1, half, 0], [half, half, 1, 0], [0, 0, 0, 0]]
    torch.testing.assert_close(cosine_matrix(x), torch.tensor([wanted]))
    torch.testing.assert_close(cosine_matrix(x[:, :1], x[:, 1:3]), torch.tensor([[[0, half]]]))


def test_cosines_of_half_precision_may_be_multiplied_in_full() -> None:
    x = drawn(1, 4, 8).half()
    assert cosine_matrix(x).dtype == torch.float16
    assert cosine_matrix(x, dtype=torch.float32).dtype == torch.float32


def test_the_unit_range_is_of_real_tokens_alone() -> None:
    values, mask = torch.tensor([[1.0, 3.0, 2.0, 99.0], [5.0, 5.0, 0.0, 0.0]]), torch.tensor([[True] * 3 + [False]] * 2)
    mask[1, 2] = False
    assert unit_range(values, mask).tolist() == [[0.0, 1.0, 0.5, 0.0], [1.0, 1.0, 0.0, 0.0]]


def test_values_are_brought_to_one_range_above_a_floor() -> None:
    values, mask = (
        torch.tensor([[2.0, 6.0, 4.0, 9.0], [5.0, 5.0, 0.0, 0.0]]),
        torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]),
    )
    found = unit_range(values, mask.bool(), floor=0.4)
    torch.testing.assert_close(found, torch.tensor([[0.1, 1.1, 0.6, 0.0], [1.0, 1.0, 0.0, 0.0]]))
