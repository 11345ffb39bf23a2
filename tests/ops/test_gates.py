import math

import pytest
import torch

from diffprune.ops import RESPONSES, linear_gate, log_weight, scale_gate, soft_topk, sqrt_weight, vp_noise

both_responses = pytest.mark.parametrize("response", RESPONSES)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@both_responses
def test_roots_and_logs_are_those_of_the_weights(response):
    logits = 3 * torch.randn(2, 50, generator=generator(), dtype=torch.float64)
    weights, z = soft_topk(logits, 11, tau=0.7, response=response, return_z=True)
    torch.testing.assert_close(sqrt_weight(z, response=response), weights.sqrt())
    torch.testing.assert_close(sqrt_weight(-z, response=response), (1 - weights).sqrt())
    torch.testing.assert_close(log_weight(z, response=response), weights.log())
    torch.testing.assert_close(log_weight(-z, response=response), (-weights).log1p())


@both_responses
@pytest.mark.parametrize("function", [sqrt_weight, log_weight])
def test_slopes_are_right_and_finite_everywhere(response, function):
    z = torch.tensor([-1.3, -0.2, 0.4, 2.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: function(z, response=response), (z,))

    extremes = torch.tensor([-math.inf, -1e5, -200.0, 0.0, 200.0, 1e5, math.inf], requires_grad=True)
    (slope,) = torch.autograd.grad(function(extremes, response=response).sum(), extremes)
    assert slope.isfinite().all() and (slope >= 0).all() and (slope <= 1).all()
    at_zero = {sqrt_weight: 0.25 * math.sqrt(2), log_weight: 1.0} if response == "laplace" else {}
    smooth = {sqrt_weight: 0.125 * math.sqrt(2), log_weight: 0.5}
    assert slope[3].item() == pytest.approx((at_zero or smooth)[function])


@both_responses
def test_infinite_z_opens_and_closes_the_gate_exactly(response):
    x, noise = torch.randn(2, 1, 2, 3, generator=generator())
    z = torch.tensor([[math.inf, -math.inf]])
    out = vp_noise(x, z, response=response, noise=noise)
    assert torch.equal(out[:, 0], x[:, 0]) and torch.equal(out[:, 1], noise[:, 1])
    mu, sigma = torch.tensor([0.3, -1.7, 5.1]), torch.tensor([2.0, 0.1, 1.0])
    matched = vp_noise(x, z, response=response, noise=noise, mu=mu, sigma=sigma)
    assert torch.equal(matched[:, 0], x[:, 0])
    torch.testing.assert_close(matched[:, 1], mu + sigma * noise[:, 1])


@both_responses
def test_vp_noise_keeps_the_variance(response):
    x = torch.randn(4, 100, 200, generator=generator(1))
    weights, z = soft_topk(torch.randn(4, 100, generator=generator(2)), 30, tau=1.0, response=response, return_z=True)
    assert weights.min() < 0.2 and weights.max() > 0.8
    out = vp_noise(x, z, response=response, generator=generator(3))
    assert out.var().item() == pytest.approx(1.0, abs=0.02)
    assert out.var(-1).mean(0).sub(1).abs().max() < 0.3  # at every weight, not only on average
    assert scale_gate(x, weights).var().item() < 0.5  # which is what it is for


def test_matched_noise_keeps_mean_and_deviation_of_every_channel():
    mu, sigma = torch.tensor([0.0, 5.0, -3.0]), torch.tensor([1.0, 4.0, 0.2])
    x = mu + sigma * torch.randn(20, 1000, 3, generator=generator(1))
    _, z = soft_topk(torch.randn(20, 1000, generator=generator(2)), 300, tau=1.0, return_z=True)
    out = vp_noise(x, z, generator=generator(3), mu=mu, sigma=sigma).flatten(0, 1)
    torch.testing.assert_close(out.mean(0), mu, rtol=0.02, atol=0.02)
    torch.testing.assert_close(out.std(0), sigma, rtol=0.03, atol=0)


def test_matched_noise_is_the_formula():
    x, noise = torch.randn(2, 2, 5, 3, generator=generator())
    weights, z = soft_topk(torch.randn(2, 5, generator=generator(1)), 2, tau=1.0, return_z=True)
    mu, sigma = torch.randn(3), torch.rand(3)
    alpha = weights.unsqueeze(-1)
    expected = mu + alpha.sqrt() * (x - mu) + (1 - alpha).sqrt() * sigma * noise
    torch.testing.assert_close(vp_noise(x, z, noise=noise, mu=mu, sigma=sigma), expected, rtol=1e-4, atol=1e-5)


@both_responses
def test_the_gradient_reaches_tokens_and_logits(response):
    x = torch.randn(1, 4, 2, generator=generator(), dtype=torch.float64, requires_grad=True)
    logits = torch.randn(1, 4, generator=generator(1), dtype=torch.float64, requires_grad=True)
    noise = torch.randn(1, 4, 2, generator=generator(2), dtype=torch.float64)

    def gate(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        _, z = soft_topk(logits, 2, tau=0.5, response=response, return_z=True)
        return vp_noise(x, z, response=response, noise=noise)

    assert torch.autograd.gradcheck(gate, (x, logits))


def test_the_linear_gate_has_the_values_of_vp_noise_for_hard_weights():
    x, noise = torch.randn(2, 1, 3, 4, generator=generator())
    m = torch.tensor([[1.0, 0.0, 1.0]])
    z = torch.where(m > 0, math.inf, -math.inf)
    assert torch.equal(linear_gate(x, m, noise=noise), vp_noise(x, z, noise=noise))
    mu, sigma = torch.randn(4), torch.rand(4)
    matched = vp_noise(x, z, noise=noise, mu=mu, sigma=sigma)
    torch.testing.assert_close(linear_gate(x, m, noise=noise, mu=mu, sigma=sigma), matched)


def test_the_scale_gate_is_a_product():
    assert scale_gate(torch.ones(1, 2, 2), torch.tensor([[0.25, 1.0]])).tolist() == [[[0.25, 0.25], [1.0, 1.0]]]


@pytest.mark.parametrize("gate", [vp_noise, linear_gate])
def test_the_same_generator_gives_the_same_result(gate):
    x, weights = torch.ones(2, 3, 4), torch.full((2, 3), 0.5)
    first, again, other = (gate(x, weights, generator=generator(seed)) for seed in (7, 7, 8))
    assert torch.equal(first, again) and not torch.equal(first, other)
    torch.manual_seed(5)
    unseeded = gate(x, weights)
    torch.manual_seed(5)
    assert torch.equal(unseeded, gate(x, weights))


def test_one_generator_per_row_draws_the_same_in_any_batch():
    x, z = torch.ones(3, 5, 4), torch.zeros(3, 5)
    batch = vp_noise(x, z, generator=[generator(1), generator(2), generator(3)])
    alone = vp_noise(x[1:2], z[1:2], generator=[generator(2)])
    assert torch.equal(batch[1:2], alone)
    assert not torch.equal(batch[0], batch[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_tokens_keep_their_type(dtype):
    x, z = torch.ones(1, 2, 3, dtype=dtype), torch.zeros(1, 2)
    mu = sigma = torch.ones(3)
    assert vp_noise(x, z).dtype == vp_noise(x, z, mu=mu, sigma=sigma).dtype == dtype
    assert linear_gate(x, z).dtype == scale_gate(x, z).dtype == dtype


@pytest.mark.parametrize("gate", [vp_noise, linear_gate])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mu": torch.zeros(4)}, "sigma is None; give both"),
        ({"sigma": torch.zeros(4)}, "mu is None; give both"),
        ({"generator": generator(), "noise": torch.zeros(2, 3, 4)}, "noise and generator are both given"),
        ({"generator": [generator()]}, "1 generators for 2 rows"),
    ],
)
def test_contradicting_arguments_are_refused(gate, arguments, message):
    with pytest.raises(ValueError, match=message):
        gate(torch.zeros(2, 3, 4), torch.zeros(2, 3), **arguments)
