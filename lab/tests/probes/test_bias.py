"""What can be counted is counted: probabilities sum to 1, and only one of three gradients is off."""

import torch

from diffprune.ops import gumbel_topk
from diffprune_lab.probes import bias

PROBLEM = bias.make_problem(42)


def test_the_subsets_are_all_there_and_their_probabilities_sum_to_one() -> None:
    masks, chances = bias.subset_masks(6, 2), bias.plackett_luce(PROBLEM.logits, 2)
    assert len(masks) == len(chances) == 15
    assert torch.equal(masks.sum(-1), torch.full((15,), 2.0, dtype=torch.float64))
    assert len(masks.unique(dim=0)) == 15
    torch.testing.assert_close(chances.sum(), torch.ones((), dtype=torch.float64))


def test_equal_logits_make_all_subsets_equally_likely() -> None:
    chances = bias.plackett_luce(torch.zeros(1, 5, dtype=torch.float64), 3)
    torch.testing.assert_close(chances, torch.full((10,), 0.1, dtype=torch.float64))


def test_gumbel_top_k_draws_subsets_as_often_as_plackett_luce_says() -> None:
    count = 40_000
    chosen = gumbel_topk(PROBLEM.logits.expand(count, -1), 2, tau=1.0, noise=bias.draw_gumbel(count, 0))
    masks = bias.subset_masks(6, 2)
    shares = (chosen @ masks.T == 2).double().mean(0)
    chances = bias.plackett_luce(PROBLEM.logits, 2)
    assert (shares - chances).abs().max() < 5 * 0.5 / count**0.5


def test_the_exact_gradient_is_that_of_the_enumerated_loss() -> None:
    losses = PROBLEM.masked(bias.subset_masks(6, 2))

    def expected(logits: torch.Tensor) -> torch.Tensor:
        return (bias.plackett_luce(logits, 2) * losses).sum()

    assert bias.finite_difference_error(expected, PROBLEM.logits) < 1e-7


def test_diffprunes_gradient_is_exact_and_gumbel_stes_is_not() -> None:
    gumbel = bias.draw_gumbel(1, 0)
    for tau in bias.TAUS:
        own = bias.finite_difference_error(lambda s, tau=tau: bias.throttled_loss(PROBLEM, s, tau), PROBLEM.logits)
        other = bias.finite_difference_error(lambda s, tau=tau: bias.hard_loss(PROBLEM, s, gumbel, tau), PROBLEM.logits)
        assert own < 1e-6
        assert other == 1.0  # the executed loss is flat, the claimed slope is not


def test_straight_through_is_biased_and_the_control_is_not(measured) -> None:
    found = {(cell.key["estimator"], cell.key.get("tau")): cell.values for cell in measured(bias)}
    for tau in bias.TAUS:
        assert found["straight_through", tau]["errors_away"] > 20
        assert found["straight_through", tau]["relative_bias"] > 0.1
        assert found["straight_through", tau]["loss_errors_away"] < 4  # the draws are those that were enumerated
    assert found["score_function", None]["errors_away"] < 4.5
