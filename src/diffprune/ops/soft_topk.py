"""Soft top-k (Phi_K of the paper): weights in (0, 1) that sum to k, with the exact gradient of what was run.

Every weight of a row is the same increasing response f of its own thresholded logit,

    alpha_i = f(z_i),    z_i = (logits_i - max) / tau - lam,    with lam such that sum_i alpha_i = k.

For the Laplace response (LapSum) lam has a closed form after one sort, solved here in logs. For the sigmoid response
lam lies within log 2 of it, and Newton's method finishes from there.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, cast, overload

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from diffprune.ops.arguments import checked
from diffprune.ops.hard_topk import check_inputs, per_row

Temperature = float | int | Float[Tensor, ""] | Float[Tensor, " B"]  # one for all rows, or one for each
Response = Literal["laplace", "sigmoid"]
RESPONSES: tuple[Response, ...] = ("laplace", "sigmoid")


@overload
def soft_topk(
    logits: Float[Tensor, "B N"],
    k: int | Float[Tensor, " B"] | Int[Tensor, " B"],
    *,
    tau: Temperature,
    mask: Bool[Tensor, "B N"] | None = None,
    response: Response = "laplace",
    return_z: Literal[False] = False,
) -> Float[Tensor, "B N"]: ...


@overload
def soft_topk(
    logits: Float[Tensor, "B N"],
    k: int | Float[Tensor, " B"] | Int[Tensor, " B"],
    *,
    tau: Temperature,
    mask: Bool[Tensor, "B N"] | None = None,
    response: Response = "laplace",
    return_z: Literal[True],
) -> tuple[Float[Tensor, "B N"], Float[Tensor, "B N"]]: ...


@checked
def soft_topk(
    logits: Float[Tensor, "B N"],
    k: int | Float[Tensor, " B"] | Int[Tensor, " B"],
    *,
    tau: Temperature,
    mask: Bool[Tensor, "B N"] | None = None,
    response: Response = "laplace",
    return_z: bool = False,
) -> Float[Tensor, "B N"] | tuple[Float[Tensor, "B N"], Float[Tensor, "B N"]]:
    """Weights in (0, 1) with `weights.sum(-1) == k`, increasing in the logits and blind to a common shift of them.

    The backward pass differentiates the map that was run forward (paper, Proposition 1): in the logits and in tau
    through the weights and z, in k through the weights alone (z moves ever faster with k as the weights harden). It
    recomputes z, so beyond its inputs it keeps two numbers per row. There is no second derivative.

    A row with k = 0 gets exact zeros and z = -inf, one with k = N exact ones and z = inf, both without a gradient.
    Solved in float64 whatever the type of the logits; what comes out is float32, or float64 if the logits are.
    Equal logits get weights that are equal up to the last bit: a vectorised exponential and the scalar one that
    finishes a row may round differently. So rank by the logits, not by the weights.

    Args:
        logits: Raw token importance.
        k: Tokens to keep in each row; may be a fraction.
        tau: Temperature, one for all rows or one for each. Smaller is closer to hard top-k.
        mask: True where a token is real; padded tokens get weight 0 and z = -inf.
        response: "laplace", or "sigmoid" for a slope without a kink.
        return_z: Also give the thresholded logit, of which the gates take their square roots.
    """
    if response not in RESPONSES:
        raise ValueError(f"response={response!r:.80} is unknown; choose one of {', '.join(RESPONSES)}")
    check_inputs(logits, k, mask, finite=True)
    check_tau(tau)
    if logits.shape[-1] == 0:  # a batch without any visual token
        weights = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return (weights, weights) if return_z else weights
    budget, temperature = per_row(k, logits, torch.float64), per_row(tau, logits, torch.float64)
    return _apply(logits, budget, temperature, mask, response, return_z)


def check_tau(tau: Temperature) -> None:
    """Raise unless every temperature is a finite number above 0; like the logits, tensors are read on the CPU alone."""
    if torch.compiler.is_compiling() or (isinstance(tau, Tensor) and tau.device.type != "cpu"):
        return
    for value in [float(each) for each in tau.detach().reshape(-1)] if isinstance(tau, Tensor) else [tau]:
        if not 0 < value < math.inf:
            raise ValueError(f"tau={value:g} is no temperature; give a finite number above 0, smaller is harder")


class _SoftTopK(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Float[Tensor, "B N"],
        k: Float64[Tensor, "B 1"],
        tau: Float64[Tensor, "B 1"],
        mask: Bool[Tensor, "B N"] | None,
        response: Response,
        return_z: bool,
    ) -> Float[Tensor, "B N"] | tuple[Float[Tensor, "B N"], Float[Tensor, "B N"]]:
        top, lam = _solve(logits, k, tau, mask, response)
        ctx.save_for_backward(logits, tau, mask, top, lam)
        ctx.response = response
        z = _threshold(logits, tau, mask, top, lam)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        weights = _respond(z, response).to(dtype)
        return (weights, z.to(dtype)) if return_z else weights

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator hides the name of ctx
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None, None, None, None]:
        """What Proposition 1 says, with g the gradient in the weights and h that in z:

        dL/ds = (pull - share sum_i pull_i) / tau    pull = g f'(z) + h    share = f'(z) / sum_i f'(z_i)
        """
        logits, tau, mask, top, lam = ctx.saved_tensors
        z = _threshold(logits, tau, mask, top, lam)
        log_slope = _log_slope(z, ctx.response)
        is_fixed = log_slope == -math.inf  # padding, and rows that keep nothing or everything, move with nothing
        share = log_slope.softmax(-1).masked_fill_(is_fixed, 0)  # d lam / d u, u = (logits - max) / tau; sums to 1
        grad_weights = grad_outputs[0]
        pull = grad_weights * log_slope.exp_()  # d loss / d z, with lam held
        for grad_z in grad_outputs[1:]:
            pull += grad_z.masked_fill(is_fixed, 0)
        grad_logits = pull.addcmul_(share, pull.sum(-1, keepdim=True), value=-1).div_(tau)
        grad_k = grad_tau = None
        if ctx.needs_input_grad[1]:
            grad_k = (share * grad_weights).sum(-1, keepdim=True)
        if ctx.needs_input_grad[2]:  # grad_logits sums to 0, so z stands for u
            grad_tau = -(grad_logits * z.masked_fill_(is_fixed, 0)).sum(-1, keepdim=True)
        return grad_logits.to(logits.dtype), grad_k, grad_tau, None, None, None


_apply = cast(Callable[..., Any], _SoftTopK.apply)  # pyright: ignore[reportUnknownMemberType]


def _solve(
    logits: Float[Tensor, "B N"],
    k: Float64[Tensor, "B 1"],
    tau: Float64[Tensor, "B 1"],
    mask: Bool[Tensor, "B N"] | None,
    response: Response,
) -> tuple[Float64[Tensor, "B 1"], Float64[Tensor, "B 1"]]:
    """Each row's largest logit, and its threshold lam counted from there in units of tau; -inf keeps all, inf none."""
    keys = logits if mask is None else logits.masked_fill(~mask, -torch.inf)
    ordered = keys.sort(dim=-1).values.double()  # sorted in their own type, which is exact and faster
    top = ordered[:, -1:].clone()  # a view would keep the whole row alive until the backward pass
    u = ordered.sub_(top).div_(tau)  # the shift comes first: dividing large logits would lose their differences
    lam = _laplace_threshold(u, k)
    if response == "sigmoid":
        lam = _sigmoid_threshold(u, k, lam)
    num_real = logits.shape[-1] if mask is None else mask.sum(-1, keepdim=True)
    return top, lam.masked_fill_(k >= num_real, -torch.inf).masked_fill_(k <= 0, torch.inf)


def _laplace_threshold(u: Float64[Tensor, "B N"], k: Float64[Tensor, "B 1"]) -> Float64[Tensor, "B 1"]:
    """The root lam of sum_i f(u_i - lam) = k for the Laplace response, in closed form (LapSum).

    With x = e^lam, p logits at or below lam, A = sum of e^-u above it and B = sum of e^u below it, the sum is k where
    A x^2 - 2 c x - B = 0, c = N - p - k. A, B and x stay in logs: at a low temperature they leave the range of floats.

    Args:
        u: Ascending; -inf for padding.
    """
    num_tokens = u.shape[-1]
    log_below = u.logcumsumexp(-1)  # log sum_{i <= j} e^u_i
    log_above = u.flip(-1).neg_().logcumsumexp(-1).flip(-1)  # log sum_{i >= j} e^-u_i
    # The sum if lam were u_j is N - j + 1/2 + (e^(log_below - u) - e^(log_above + u)) / 2, j from 1; NaN for padding.
    twice = (log_below - u).exp_() - (log_above + u).exp_() + torch.arange(2 * num_tokens, 0, -2, device=u.device)
    above = (twice < 2 * k + 1).sum(-1, keepdim=True)  # the sum falls with lam; NaN is never above
    p = num_tokens - above
    log_b = functional.pad(log_below, (1, 0), value=-math.inf).gather(-1, p)
    log_a = functional.pad(log_above, (0, 1), value=-math.inf).gather(-1, p)
    c = above - k
    log_c = c.abs().log()
    log_root = torch.logaddexp(log_c, 0.5 * torch.logaddexp(2 * log_c, log_a + log_b))
    return torch.where(c >= 0, log_root - log_a, log_b - log_root)  # the form that cancels nothing


def _sigmoid_threshold(
    u: Float64[Tensor, "B N"], k: Float64[Tensor, "B 1"], lam: Float64[Tensor, "B 1"]
) -> Float64[Tensor, "B 1"]:
    """The root for the sigmoid response, from the Laplace response's by six Newton steps.

    f_laplace(x - log 2) <= sigmoid(x) <= f_laplace(x + log 2), so the start is off by log 2 at most; the slope of the
    sum changes by a factor e^d at most over a distance d, so an error d becomes e^d - 1 - d at most. After six steps
    that is below 1e-24, whatever the logits.
    """
    for _ in range(6):
        z = u - lam
        distance = z.abs()
        nearest = distance.amin(-1, keepdim=True)  # factored out: at a low temperature all slopes underflow
        tail = (nearest - distance).exp() / (1 + (-distance).exp())  # e^nearest sigmoid(-|z|)
        slope = tail / (1 + (-distance).exp())
        is_above = z > 0
        # Counting what lies above leaves 0, not a rounding error, where only the tails differ from k.
        excess = (is_above.sum(-1, keepdim=True) - k) * nearest.clamp(max=700).exp()
        lam = lam + (excess + tail.where(~is_above, -tail).sum(-1, keepdim=True)) / slope.sum(-1, keepdim=True)
    return lam


def _threshold(
    logits: Float[Tensor, "B N"],
    tau: Float64[Tensor, "B 1"],
    mask: Bool[Tensor, "B N"] | None,
    top: Float64[Tensor, "B 1"],
    lam: Float64[Tensor, "B 1"],
) -> Float64[Tensor, "B N"]:
    """The thresholded logit z."""
    z = (logits - top).div_(tau).sub_(lam)
    return z if mask is None else z.masked_fill_(~mask, -torch.inf)


def _respond(z: Float64[Tensor, "B N"], response: Response) -> Float64[Tensor, "B N"]:
    """f(z)."""
    if response == "sigmoid":
        return z.sigmoid()
    tail = _minus_size(z).exp_().mul_(0.5)
    return torch.where(z > 0, 1 - tail, tail)


def _log_slope(z: Float64[Tensor, "B N"], response: Response) -> Float64[Tensor, "B N"]:
    """log f'(z), which stays finite where f' underflows."""
    minus_size = _minus_size(z)
    if response == "sigmoid":
        return minus_size - 2 * minus_size.exp().log1p_()
    return minus_size.sub_(math.log(2))


def _minus_size(z: Float64[Tensor, "B N"]) -> Float64[Tensor, "B N"]:
    """-|z|, in one pass."""
    return z.copysign(-1.0)
