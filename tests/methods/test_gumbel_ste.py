"""Gumbel-STE: hard forward, soft backward, deployed without noise."""

import pytest
import torch

from diffprune.methods.gumbel_ste import GumbelSTE
from diffprune.methods.options import build_method
from tests.methods.examples import SPEC, make_method, make_tokens

K = torch.tensor([4, 3, 2])


def gumbel_ste(**options: object) -> GumbelSTE:
    method = make_method("gumbel_ste", **options)
    assert isinstance(method, GumbelSTE)
    return method


def test_the_forward_pass_keeps_or_replaces_and_nothing_between() -> None:
    tokens = make_tokens()
    alpha = gumbel_ste().restrict(tokens, K, tau=2.0).alpha
    assert set(alpha.unique().tolist()) == {0.0, 1.0}
    assert alpha.sum(-1).tolist() == [4, 3, 2]


def test_a_chosen_token_enters_the_block_as_it_is() -> None:
    method = build_method("gumbel_ste", block=SPEC)  # the block still is the identity
    assert isinstance(method, GumbelSTE)
    tokens = make_tokens()
    restricted = method.restrict(tokens, K, tau=2.0)
    chosen = restricted.alpha == 1
    assert torch.equal(restricted.x[chosen], tokens.x[chosen])
    dropped = (restricted.alpha == 0) & tokens.mask
    assert (restricted.x[dropped] != tokens.x[dropped]).any(-1).all()


def test_matched_noise_has_the_mean_and_deviation_of_the_features() -> None:
    tokens = make_tokens()
    unit, matched = (build_method("gumbel_ste", block=SPEC, noise=noise) for noise in ("unit", "matched"))
    assert isinstance(unit, GumbelSTE) and isinstance(matched, GumbelSTE)
    matched.calibrate([tokens])
    first, second = (
        m.restrict(tokens, K, tau=2.0, generator=torch.Generator().manual_seed(0)) for m in (unit, matched)
    )
    dropped = (first.alpha == 0) & tokens.mask  # the heads start at zero, so both choose by the same draws
    assert torch.equal(first.alpha, second.alpha) and dropped.any()
    real = tokens.x[tokens.mask]
    mu, sigma = real.mean(0), real.std(0, correction=0)
    assert mu.abs().max() > 0.05 and (sigma - 1).abs().max() > 0.05, "a fault would not be seen"
    torch.testing.assert_close(second.x[dropped], mu + sigma * first.x[dropped], rtol=1e-3, atol=1e-4)


def test_training_explores_and_deployment_does_not() -> None:
    method, tokens = gumbel_ste(), make_tokens()
    choices = [method.restrict(tokens, K, tau=1.0, generator=torch.Generator().manual_seed(s)).alpha for s in range(5)]
    assert any(not torch.equal(choices[0], other) for other in choices[1:])
    assert torch.equal(method.select(tokens, K), method.select(tokens, K))


def test_the_floor_of_tau_holds_in_the_backward_pass() -> None:
    tokens = make_tokens()

    def gradient(tau: float, min_tau: float) -> torch.Tensor:
        method = gumbel_ste(min_tau=min_tau)
        x = method.restrict(tokens, K, tau=tau, generator=torch.Generator().manual_seed(0)).x
        x[tokens.mask].sin().sum().backward()
        grad = method.scorer.head.weight.grad  # type: ignore[union-attr]
        assert grad is not None
        return grad

    torch.testing.assert_close(gradient(0.1, 0.5), gradient(0.5, 0.0))
    assert not torch.allclose(gradient(0.1, 0.0), gradient(0.1, 0.5))


def test_the_choice_per_token_comes_with_a_penalty_on_its_share() -> None:
    method, tokens = gumbel_ste(choice="token", ratio_weight=3.0), make_tokens()
    restricted = method.restrict(tokens, K, tau=1.0)
    assert set(restricted.alpha.unique().tolist()) <= {0.0, 1.0}
    assert (restricted.alpha[~tokens.mask] == 0).all()
    assert restricted.penalty is not None
    share = restricted.alpha.sum(-1) / tokens.counts
    torch.testing.assert_close(restricted.penalty, 3.0 * (share - K / tokens.counts).square())
    restricted.penalty.sum().backward()
    assert method.scorer.head.bias.grad is not None  # type: ignore[union-attr]
    assert method.scorer.head.bias.grad.abs().sum() > 0  # type: ignore[union-attr]
    assert gumbel_ste().restrict(tokens, K, tau=1.0).penalty is None


def test_matched_noise_takes_the_place_of_what_is_dropped() -> None:
    method, tokens = gumbel_ste(noise="matched"), make_tokens()
    with pytest.raises(ValueError, match="not calibrated"):
        method.restrict(tokens, K, tau=1.0)
    method.calibrate([tokens])
    assert method.restrict(tokens, K, tau=1.0).x[tokens.mask].isfinite().all()


@pytest.mark.parametrize("option, value", [("choice", "all"), ("noise", "pink"), ("min_tau", -1.0)])
def test_an_option_with_a_wrong_value_is_refused_by_name(option: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{option}={value!r}"):
        build_method("gumbel_ste", block=SPEC, **{option: value})


def test_masked_tokens_stay_as_they_are_and_exactly_k_are_attended_to() -> None:
    method, tokens = make_method("gumbel_ste-masked"), make_tokens()
    assert isinstance(method, GumbelSTE) and method.throttle_block is None
    restricted = method.restrict(tokens, K, tau=2.0, generator=torch.Generator().manual_seed(0))
    assert restricted.soft_mask is not None and torch.equal(restricted.soft_mask, restricted.alpha)
    assert restricted.soft_mask.sum(-1).tolist() == [4, 3, 2] and set(restricted.soft_mask.unique().tolist()) == {
        0.0,
        1.0,
    }
    assert torch.equal(restricted.x[tokens.mask], tokens.x[tokens.mask])
    by_noise = gumbel_ste().restrict(tokens, K, tau=2.0, generator=torch.Generator().manual_seed(0))
    assert by_noise.soft_mask is None and by_noise.x.shape == restricted.x.shape


def test_what_was_masked_in_training_is_dropped_in_deployment() -> None:
    method = build_method("gumbel_ste-masked", block=SPEC, choice="token")
    assert isinstance(method, GumbelSTE) and not method.exact_in_training
    assert method.select(make_tokens(), K).shape == (3, 4)
    with pytest.raises(ValueError, match="dropped='gone' is not known"):
        build_method("gumbel_ste", block=SPEC, dropped="gone")


@pytest.mark.parametrize("sure", [30.0, -30.0])
def test_a_token_by_itself_is_kept_where_its_logit_is_high(sure: float) -> None:
    method, tokens = gumbel_ste(choice="token"), make_tokens()
    with torch.no_grad():
        method.scorer.head.weight.zero_()  # type: ignore[union-attr]
        method.scorer.head.bias.fill_(sure)  # type: ignore[union-attr]
    alpha = method.restrict(tokens, K, tau=1.0).alpha
    assert (alpha[tokens.mask] == float(sure > 0)).all()
