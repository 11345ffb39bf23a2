"""Surrogate-gradient selection, to compare with: a hard choice forward, the slope of a soft one backward (Eq. 1)."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffprune.ops.arguments import checked
from diffprune.ops.hard_topk import hard_mask, per_row
from diffprune.ops.noise import Generators, draw_gumbel
from diffprune.ops.soft_topk import Response, Temperature, check_tau, soft_topk


@checked
def gumbel_topk(
    logits: Float[Tensor, "B N"],
    k: int | Int[Tensor, " B"],
    *,
    tau: Temperature,
    min_tau: float | int = 0.0,
    mask: Bool[Tensor, "B N"] | None = None,
    response: Response = "laplace",
    generator: Generators = None,
    noise: Float[Tensor, "B N"] | None = None,
) -> Float[Tensor, "B N"]:
    """Exactly 1 at the k largest of logits + Gumbel noise and 0 elsewhere; the gradient is `soft_topk`'s.

    Forward m = H_K(s + g), backward through soft_topk((s + g) / tau): a straight-through estimator, so the gradient is
    not that of the function that was run.

    Args:
        logits: Raw token importance.
        k: Tokens to keep in each row.
        tau: Temperature of the soft relaxation; the forward value does not depend on it.
        min_tau: Floor of tau: below it the gradient of the relaxation vanishes almost everywhere.
        mask: True where a token is real.
        response: Response of the relaxation.
        generator: Draws the Gumbel noise; a sequence gives each row its own.
        noise: Gumbel noise drawn before, instead of a generator.
    """
    perturbed = _perturb(logits, generator, noise)
    tau = tau.clamp(min=min_tau) if isinstance(tau, Tensor) else max(tau, min_tau)
    soft = soft_topk(perturbed, k, tau=tau, mask=mask, response=response)
    return _straight_through(hard_mask(perturbed, k, mask), soft)


@checked
def gumbel_keep(
    log_probs: Float[Tensor, "B N 2"],
    previous: Float[Tensor, "B N"] | None = None,
    *,
    tau: Temperature = 1.0,
    generator: Generators = None,
    noise: Float[Tensor, "B N 2"] | None = None,
) -> Float[Tensor, "B N"]:
    """DynamicViT's decision per token: 1 to keep, 0 to drop, and what was dropped before stays dropped.

    Each token is sampled by itself with a hard Gumbel softmax, so the number kept is free: a loss has to hold it near
    its share.

    Args:
        log_probs: Log-probabilities of keeping (first) and dropping (second).
        previous: Decisions of the stage before.
        tau: Temperature of the relaxation, one for all rows or one for each; DynamicViT never anneals it.
        generator: Draws the Gumbel noise; a sequence gives each row its own.
        noise: Gumbel noise drawn before, instead of a generator.
    """
    check_tau(tau)
    perturbed = _perturb(log_probs, generator, noise)
    soft = (perturbed / per_row(tau, perturbed[..., 0], perturbed.dtype).unsqueeze(-1)).softmax(-1)[..., 0]
    keep = _straight_through(perturbed[..., 0] >= perturbed[..., 1], soft)
    return keep if previous is None else keep * previous


def _perturb(
    logits: Float[Tensor, "*shape"], generator: Generators, noise: Float[Tensor, "*shape"] | None
) -> Float[Tensor, "*shape"]:
    """s + g, in float32 at least: half-precision sums would tie."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if noise is None:
        noise = draw_gumbel(logits, None, generator)
    elif generator is not None:
        raise ValueError("noise and generator are both given; leave one of them None")
    return logits + noise


def _straight_through(hard: Bool[Tensor, "B N"], soft: Float[Tensor, "B N"]) -> Float[Tensor, "B N"]:
    """The values of `hard`, exactly, with the gradient of `soft`."""
    return hard.to(soft.dtype) + (soft - soft.detach())
