import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diffprune.ops import RESPONSES, gumbel_keep, gumbel_topk, soft_topk
from tests.searching import examples


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(
    seed=st.integers(0, 1000),
    tau=st.sampled_from([0.01, 0.5, 2.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    response=st.sampled_from(RESPONSES),
)
@examples(50)
def test_forward_is_exactly_hard_and_backward_exactly_the_relaxation(seed, tau, dtype, response):
    logits = torch.randn(3, 12, generator=generator(seed)).to(dtype).requires_grad_()
    mask = torch.arange(12) < torch.tensor([[12], [7], [5]])
    k = torch.tensor([4, 7, 0])
    noise = -torch.empty(3, 12).exponential_(generator=generator(seed + 1)).log()
    upstream = torch.randn(3, 12, generator=generator(seed + 2))

    m = gumbel_topk(logits, k, tau=tau, mask=mask, response=response, noise=noise)
    assert ((m == 0) | (m == 1)).all() and m.sum(-1).tolist() == [4, 7, 0]
    assert (m[~mask] == 0).all()
    perturbed = (logits + noise).masked_fill(~mask, -math.inf)
    lowest_kept = perturbed.masked_fill(m == 0, math.inf).amin(-1)
    highest_dropped = perturbed.masked_fill(m == 1, -math.inf).amax(-1)
    assert (lowest_kept >= highest_dropped).all()

    soft = soft_topk(logits + noise, k, tau=tau, mask=mask, response=response)
    (grad,) = torch.autograd.grad((m * upstream).sum(), logits)
    (expected,) = torch.autograd.grad((soft * upstream).sum(), logits)
    assert torch.equal(grad, expected)


def test_a_floor_of_tau_acts_on_the_gradient_alone():
    logits = torch.randn(1, 9, generator=generator(), requires_grad=True)
    noise = torch.randn(1, 9, generator=generator(1))
    upstream = torch.arange(9.0)

    def step(tau: float | torch.Tensor, min_tau: float) -> tuple[torch.Tensor, torch.Tensor]:
        m = gumbel_topk(logits, 3, tau=tau, min_tau=min_tau, noise=noise)
        return m.detach(), torch.autograd.grad((m * upstream).sum(), logits)[0]

    (low, low_grad), (floored, floored_grad), (high, high_grad) = step(0.01, 0.0), step(0.01, 0.5), step(0.5, 0.0)
    assert torch.equal(low, floored) and torch.equal(low, high)
    assert torch.equal(floored_grad, high_grad) and not torch.equal(floored_grad, low_grad)
    assert torch.equal(step(torch.tensor(0.01), 0.5)[1], high_grad)


def test_tokens_are_drawn_in_proportion_to_the_exponential_of_their_logits():
    logits = torch.tensor([0.0, math.log(2.0), math.log(5.0)]).expand(20_000, 3)
    drawn = gumbel_topk(logits, 1, tau=1.0, generator=generator()).mean(0)
    torch.testing.assert_close(drawn, torch.tensor([1.0, 2.0, 5.0]) / 8, rtol=0, atol=0.015)


def test_the_same_generator_gives_the_same_choice():
    logits = torch.zeros(4, 30)
    first, again, other = (gumbel_topk(logits, 5, tau=1.0, generator=generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    per_row = gumbel_topk(logits, 5, tau=1.0, generator=[generator(seed) for seed in range(4)])
    alone = gumbel_topk(logits[:1], 5, tau=1.0, generator=[generator(2)])
    assert torch.equal(per_row[2:3], alone)


def test_bad_input_is_refused_with_its_value():
    with pytest.raises(ValueError, match="k=4 is not between 0 and the 3 tokens"):
        gumbel_topk(torch.zeros(1, 3), 4, tau=1.0)
    with pytest.raises(ValueError, match="tau=0 is no temperature"):
        gumbel_topk(torch.zeros(1, 3), 1, tau=0.0)
    with pytest.raises(ValueError, match="tau=-1 is no temperature"):
        gumbel_keep(torch.zeros(1, 3, 2), tau=-1)
    with pytest.raises(ValueError, match="noise and generator are both given"):
        gumbel_topk(torch.zeros(1, 3), 1, tau=1.0, generator=generator(), noise=torch.zeros(1, 3))


def test_dynamic_vit_keeps_each_token_by_its_own_probability():
    probabilities = torch.tensor([0.1, 0.5, 0.9])
    log_probs = torch.stack([probabilities, 1 - probabilities], dim=-1).log().expand(20_000, 3, 2)
    keep = gumbel_keep(log_probs, generator=generator())
    assert ((keep == 0) | (keep == 1)).all()
    torch.testing.assert_close(keep.mean(0), probabilities, rtol=0, atol=0.015)
    assert keep.sum(-1).unique().numel() > 1  # the number kept is free


def test_dynamic_vit_backward_is_that_of_the_gumbel_softmax():
    log_probs = torch.randn(2, 5, 2, generator=generator()).log_softmax(-1).requires_grad_()
    noise, upstream = torch.randn(2, 5, 2, generator=generator(1)), torch.randn(2, 5, generator=generator(2))
    keep = gumbel_keep(log_probs, tau=0.7, noise=noise)
    soft = ((log_probs + noise) / 0.7).softmax(-1)[..., 0]
    assert torch.equal(keep, (soft >= 0.5).float())
    (grad,) = torch.autograd.grad((keep * upstream).sum(), log_probs)
    (expected,) = torch.autograd.grad((soft * upstream).sum(), log_probs)
    assert torch.equal(grad, expected)


def test_dynamic_vit_never_takes_a_token_back():
    previous = torch.tensor([[1.0, 0.0, 1.0]])
    surely = torch.tensor([[[0.0, -50.0]] * 3])
    assert gumbel_keep(surely, previous, generator=generator()).tolist() == [[1, 0, 1]]
