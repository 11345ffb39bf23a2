"""VisionSelector: weights at temperature 1, the scale gate, and a hardness loss that rises."""

import pytest
import torch

from diffprune.methods.options import build_method
from diffprune.methods.visionselector import VisionSelector, hardness_loss
from diffprune.ops import hard_mask, soft_topk
from tests.methods.examples import SPEC, make_method, make_tokens

K = torch.tensor([4, 3, 2])


def visionselector(**options: object) -> VisionSelector:
    method = make_method("visionselector", **options)
    assert isinstance(method, VisionSelector)
    return method


def test_tokens_are_scaled_by_sigmoid_weights_whatever_the_run_s_temperature() -> None:
    method, tokens = visionselector(), make_tokens()
    cold, hot = (method.restrict(tokens, K, tau=tau) for tau in (0.01, 5.0))
    assert torch.equal(cold.x, hot.x)
    alpha = soft_topk(cold.logits, K, tau=1.0, mask=tokens.mask, response="sigmoid")
    torch.testing.assert_close(cold.alpha, alpha)
    torch.testing.assert_close(cold.x[tokens.mask], (alpha[..., None] * tokens.x)[tokens.mask])


def test_the_hardness_loss_is_the_binary_cross_entropy_with_the_hard_choice() -> None:
    method, tokens = visionselector(weight_start=1.0, weight_end=1.0), make_tokens()
    restricted = method.restrict(tokens, K, tau=1.0)
    chosen = hard_mask(restricted.logits, K, tokens.mask)
    wanted = [
        torch.nn.functional.binary_cross_entropy(alpha[real], hard[real].float())
        for alpha, hard, real in zip(restricted.alpha, chosen, tokens.mask, strict=True)
    ]
    torch.testing.assert_close(restricted.penalty, torch.stack(wanted))


def test_its_gradient_is_the_weight_less_the_choice_over_n() -> None:
    logits = torch.randn(1, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    mask = torch.ones(1, 9, dtype=torch.bool)
    alpha, z = soft_topk(logits, 3, tau=1.0, response="sigmoid", return_z=True)
    chosen = hard_mask(logits.detach(), 3)
    hardness_loss(z, chosen, mask, "sigmoid").sum().backward()
    torch.testing.assert_close(logits.grad, (alpha.detach() - chosen.double()) / 9, rtol=0, atol=1e-12)


def test_keeping_everything_or_nothing_costs_nothing() -> None:
    method, tokens = visionselector(), make_tokens()
    restricted = method.restrict(tokens, torch.tensor([12, 0, 6]), tau=1.0)
    assert restricted.penalty is not None and restricted.penalty.tolist() == [0.0, 0.0, 0.0]
    restricted.penalty.sum().backward()
    grads = [weight.grad for weight in method.parameters() if weight.grad is not None]
    assert all(grad.isfinite().all() for grad in grads)


def test_its_weight_rises_with_the_optimiser_steps_and_stays_at_the_end() -> None:
    method, tokens = visionselector(weight_start=0.1, weight_end=2.1, ramp_steps=4), make_tokens()
    assert method.hardness_weight().item() == pytest.approx(2.1)  # validations compare, at whatever step
    method.train()
    weights, penalties = [], []
    for step in range(6):
        for _ in range(2):  # passes of one step
            method.at_step(step)
            penalties.append(method.restrict(tokens, K, tau=1.0).penalty)
            weights.append(method.hardness_weight().item())
    assert weights[::2] == weights[1::2] == pytest.approx([0.1, 0.6, 1.1, 1.6, 2.1, 2.1])
    ratios = [penalty.sum().item() / weight for penalty, weight in zip(penalties, weights, strict=True)]  # type: ignore[union-attr]
    assert ratios == pytest.approx([ratios[0]] * 12)


def test_each_switch_turns_alone() -> None:
    tokens, generator = make_tokens(), torch.Generator().manual_seed(0)
    usual = visionselector().restrict(tokens, K, tau=0.5)
    laplace = visionselector(response="laplace").restrict(tokens, K, tau=0.5)
    assert not torch.allclose(laplace.alpha, usual.alpha) and laplace.penalty is not None
    noisy = visionselector(gate="vp").restrict(tokens, K, tau=0.5, generator=generator)
    torch.testing.assert_close(noisy.alpha, usual.alpha)
    assert not torch.allclose(noisy.x[tokens.mask], usual.x[tokens.mask])
    annealed = visionselector(sharpening="tau").restrict(tokens, K, tau=0.5)
    assert annealed.penalty is None
    torch.testing.assert_close(
        annealed.alpha, soft_topk(usual.logits, K, tau=0.5, mask=tokens.mask, response="sigmoid")
    )
    assert type(visionselector(scorer="blocks").scorer).__name__ == "Scorer"


@pytest.mark.parametrize(
    "option, value", [("gate", "fence"), ("sharpening", "sand"), ("response", "erf"), ("ramp_steps", 0)]
)
def test_an_option_with_a_wrong_value_is_refused_by_name(option: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{option}={value!r}"):
        build_method("visionselector", block=SPEC, **{option: value})


def test_it_starts_near_equal_weights() -> None:
    torch.manual_seed(0)
    method = build_method("visionselector", block=SPEC)
    assert isinstance(method, VisionSelector)
    tokens = make_tokens()
    alpha = method.restrict(tokens, K, tau=1.0).alpha
    torch.testing.assert_close(alpha[0], torch.full((12,), 4 / 12), rtol=0, atol=1e-3)
