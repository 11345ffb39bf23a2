"""Gates: how strongly a token is restricted by its weight during training.

The square roots and the log of a weight are functions of the thresholded logit z, not of the weight: there every slope
is finite, and nothing has to be clamped. Both responses are symmetric, f(-z) = 1 - f(z), so the same function of -z
gives the other root.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from diffprune.ops.arguments import checked
from diffprune.ops.noise import Generators, draw_normal
from diffprune.ops.soft_topk import Response


@checked
def sqrt_weight(z: Float[Tensor, "..."], *, response: Response = "laplace") -> Float[Tensor, "..."]:
    """sqrt(f(z)) with a finite slope everywhere; exactly 0 and 1 at -inf and inf. `sqrt_weight(-z)` is sqrt(1 - f)."""
    if response == "sigmoid":
        return (0.5 * functional.logsigmoid(z)).exp()
    # Each branch sees only its own half line. Clamping passes the slope on at 0, where |z| would lose it.
    low = (0.5 * z.clamp(max=0)).exp() * math.sqrt(0.5)
    high = (1 - 0.5 * (-z.clamp(min=0)).exp()).sqrt()
    return torch.where(z > 0, high, low)


@checked
def log_weight(z: Float[Tensor, "..."], *, response: Response = "laplace") -> Float[Tensor, "..."]:
    """log(f(z)) with a slope between 0 and 1, for example as an attention bias. `log_weight(-z)` is log(1 - f)."""
    if response == "sigmoid":
        return functional.logsigmoid(z)
    high = (-0.5 * (-z.clamp(min=0)).exp()).log1p()
    return torch.where(z > 0, high, z.clamp(max=0) - math.log(2))


@checked
def vp_noise(
    x: Float[Tensor, "B N D"],
    z: Float[Tensor, "B N"],
    *,
    response: Response = "laplace",
    generator: Generators = None,
    noise: Float[Tensor, "B N D"] | None = None,
    mu: Float[Tensor, " D"] | None = None,
    sigma: Float[Tensor, " D"] | None = None,
) -> Float[Tensor, "B N D"]:
    """sqrt(alpha) x + sqrt(1 - alpha) noise: the less weight, the more noise; the variance stays (Eq. 6).

    Where alpha is exactly 1 the token comes out as it is, where it is exactly 0 only noise does.

    Args:
        x: Tokens.
        z: Thresholded logits of `soft_topk(..., return_z=True)`.
        response: The one `soft_topk` was called with.
        generator: Draws the noise; a sequence gives each row its own, so that a row draws the same in any batch.
        noise: Standard normal noise drawn before, instead of a generator.
        mu: With `sigma`, the mean and deviation of each channel that the noise takes on ("matched" noise):
            mu + sqrt(alpha) (x - mu) + sqrt(1 - alpha) sigma noise. Without them the noise is N(0, I) ("unit" noise).
    """
    signal = sqrt_weight(z, response=response).to(x.dtype).unsqueeze(-1)  # [B, N, 1]
    spread = sqrt_weight(-z, response=response).to(x.dtype).unsqueeze(-1)
    mixed = signal * x + spread * _deviation(x, generator, noise, mu, sigma)
    return mixed if mu is None else mixed + (1 - signal) * mu.to(x.dtype)


@checked
def linear_gate(
    x: Float[Tensor, "B N D"],
    weights: Float[Tensor, "B N"],
    *,
    generator: Generators = None,
    noise: Float[Tensor, "B N D"] | None = None,
    mu: Float[Tensor, " D"] | None = None,
    sigma: Float[Tensor, " D"] | None = None,
) -> Float[Tensor, "B N D"]:
    """m x + (1 - m) noise: for weights of 0 and 1 the very values of `vp_noise`, and a finite slope in m.

    Args:
        weights: m, for example of `gumbel_topk`. The other arguments are those of `vp_noise`.
    """
    m = weights.to(x.dtype).unsqueeze(-1)  # [B, N, 1]
    replacement = _deviation(x, generator, noise, mu, sigma)
    return m * x + (1 - m) * (replacement if mu is None else replacement + mu.to(x.dtype))


@checked
def scale_gate(x: Float[Tensor, "B N D"], weights: Float[Tensor, "B N"]) -> Float[Tensor, "B N D"]:
    """alpha x: shrinks a token instead of adding noise (the paper's ablation)."""
    return weights.to(x.dtype).unsqueeze(-1) * x


def _deviation(
    x: Float[Tensor, "B N D"],
    generator: Generators,
    noise: Float[Tensor, "B N D"] | None,
    mu: Float[Tensor, " D"] | None,
    sigma: Float[Tensor, " D"] | None,
) -> Float[Tensor, "B N D"]:
    """The random part of what takes a token's place."""
    if (mu is None) != (sigma is None):
        raise ValueError(f"matched noise needs mu and sigma, but {'mu' if mu is None else 'sigma'} is None; give both")
    if noise is None:
        noise = draw_normal(x, None, generator)
    elif generator is not None:
        raise ValueError("noise and generator are both given; leave one of them None")
    noise = noise.to(x.dtype)
    return noise if sigma is None else sigma.to(x.dtype) * noise
