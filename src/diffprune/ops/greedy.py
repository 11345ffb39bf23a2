"""Greedy choices of a set: each step takes the token that adds most to what is taken already.

Every function runs as many steps as the largest k, each a few operations over all rows in buffers made before, and
gives indices as `hard_topk` does: ascending, never padding, -1 at the end of rows that keep fewer. A greedy choice of k
begins with its choice of k - 1, so a row with a smaller budget simply stops earlier. Of equal gains the lower index
goes first. There is no gradient, and with an int k nothing waits for the device.

On a GPU with Triton the steps run in the kernels of `diffprune.ops.greedy_kernels`, in float32; what is written here is
what they have to equal, what runs everywhere else, and inside `on_gpu.reference()`.
"""

import functools
import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor
from torch.nn import functional

from diffprune.ops.arguments import checked
from diffprune.ops.hard_topk import check_inputs, per_row, widest
from diffprune.ops.on_gpu import HALVES, kernels_for, multiplies_halves, products

# Of its own squared length, what a token must still have outside the span of the others to count as new: float32 leaves
# rounding of some 1e-5 there once the span is full, and two tokens this close are half a degree apart.
RANK_TOLERANCE = 1e-4

# The least a residual is taken for where it is divided by whatever it has come to.
LEAST_RESIDUAL = 1e-12

# Bytes that the products of tokens may take at a time where a choice is made of tokens and not of a matrix.
ROOM = 2**32


@torch.no_grad()
@checked
def wide_cosines(x: Float[Tensor, "B N D"]) -> Float[Tensor, "B N N"]:
    """The cosine of the angle between every two tokens, in float32 whatever type they have.

    Products of half precision are exact in float32, so on a GPU tensor cores multiply the tokens as they are, and
    lengths are divided out afterwards.
    """
    if not multiplies_halves(x):
        return cosine_matrix(x.float())
    cosines = products(x)
    inverse = cosines.diagonal(dim1=1, dim2=2).sqrt().clamp(min=1e-12).reciprocal()
    return cosines.mul_(inverse.unsqueeze(2)).mul_(inverse.unsqueeze(1))


@torch.no_grad()
@checked
def greedy_diverse(
    x: Float[Tensor, "B N D"],
    worth: Float[Tensor, "B N"],
    k: int | Int[Tensor, " B"],
    mask: Bool[Tensor, "B N"] | None = None,
    *,
    closeness: Float[Tensor, "B N N"] | None = None,
) -> Int64[Tensor, "B K"]:
    """Tokens that are worth much and unlike one another: a large determinant of `q_i q_j cos(x_i, x_j)`.

    Past the rank of the features the worth decides.

    Args:
        x: Features, of any type; only their angles count. A token of zeros is unlike all, and adds nothing.
        worth: log q.
        k: Tokens to keep, from 0 to the real tokens of the row.
        mask: True where a token is real.
        closeness: What each cosine is multiplied by; positive semidefinite, 1 on the diagonal.
    """
    kernel = products(x)
    return greedy_determinant(kernel if closeness is None else kernel * closeness, k, mask, worth=worth)


@torch.no_grad()
@checked
def cosine_matrix(
    first: Float[Tensor, "B M D"],
    second: Float[Tensor, "B N D"] | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "B M N"]:
    """Cosine of the angle between every token of `first` and every one of `second` (default: of `first`).

    A token of zeros has cosine 0 with all.

    Args:
        first, second: Tokens; they are brought to length one in the type they have.
        dtype: Type of the products; default: that of the tokens.
    """
    first = functional.normalize(first, dim=-1).to(dtype)
    second = first if second is None else functional.normalize(second, dim=-1).to(dtype)
    return first @ second.transpose(1, 2)


@checked
def unit_range(values: Float[Tensor, "B N"], mask: Bool[Tensor, "B N"], *, floor: float = 0.0) -> Float[Tensor, "B N"]:
    """(value - min + floor) / (max - min) over each row's real tokens; 1 where all are equal, 0 at padding."""
    lowest = values.masked_fill(~mask, torch.inf).amin(-1, keepdim=True)
    spread = values.masked_fill(~mask, -torch.inf).amax(-1, keepdim=True) - lowest
    return torch.where(spread > 0, (values - lowest + floor) / spread, 1.0).masked_fill(~mask, 0.0)


@torch.no_grad()
@checked
def greedy_determinant(
    kernel: Float[Tensor, "B N N"],
    k: int | Int[Tensor, " B"],
    mask: Bool[Tensor, "B N"] | None = None,
    *,
    worth: Float[Tensor, "B N"] | None = None,
    tolerance: float = RANK_TOLERANCE,
) -> Int64[Tensor, "B K"]:
    """The tokens whose submatrix of a positive semidefinite kernel has a large determinant (greedy MAP of a DPP).

    Pivoted Cholesky: each step takes the token with the largest residual, which is the factor it adds to the
    determinant, and takes its direction out of the others. Past the kernel's rank nothing is left but rounding; from
    there on the largest diagonal goes first.

    Args:
        kernel: Symmetric; of two alike tokens the second adds nothing.
        k: Tokens to keep, from 0 to the real tokens of the row.
        mask: True where a token is real.
        worth: Logarithm w of what a token is worth. The kernel is then brought to 1 on its diagonal, and multiplied:
            `exp(w_i) exp(w_j) kernel_ij / sqrt(kernel_ii kernel_jj)`. Past its rank the worth decides.
        tolerance: The share of its diagonal below which a token's residual counts as rounding.
    """
    diagonal = kernel.diagonal(dim1=1, dim2=2)
    # Where rounding decides, it is the rounding of the steps below.
    if tolerance and (kernels := kernels_for(kernel, kernel.shape[1], torch.float32)) is not None:
        whole = diagonal if mask is None else diagonal.masked_fill(~mask, 0)

        def steps(count: Tensor, width: int) -> Tensor:
            spent = functools.partial(_spent, whole, worth, mask, tolerance)
            return kernels.determinant(kernel, whole, spent, worth, count, mask, width, tolerance=tolerance)

        return _by_kernel(steps, diagonal, k, mask)
    return _pivoted_cholesky(diagonal, lambda pick: _row_of(kernel, pick), k, mask, tolerance, worth)


@torch.no_grad()
@checked
def greedy_orthogonal(
    x: Float[Tensor, "B N D"],
    k: int | Int[Tensor, " B"],
    mask: Bool[Tensor, "B N"] | None = None,
    *,
    tolerance: float | None = RANK_TOLERANCE,
) -> Int64[Tensor, "B K"]:
    """The tokens that are longest outside the span of those taken before them: column-pivoted QR.

    The same choice as `greedy_determinant(x @ x^T, ...)` without that matrix; its rows are made as they are needed.

    Args:
        x: Of any type; products are in float32 at least.
        tolerance: As there. None: residuals decide to the last, rounding or not, of equal ones the lower index.
    """
    if tolerance and (kernels := kernels_for(x, x.shape[1], torch.float32, *HALVES)) is not None:

        def steps(count: Tensor, width: int) -> Tensor:
            at_once = max(1, ROOM // (4 * x.shape[1] ** 2))
            found: list[Tensor] = []
            for first in range(0, len(x), at_once):
                rows = slice(first, first + at_once)
                kernel, real = products(x[rows]), None if mask is None else mask[rows]
                whole = x[rows].float().square().sum(-1)  # alike for tokens that are alike, wherever they stand
                whole = whole if real is None else whole.masked_fill(~real, 0)
                spent, own = functools.partial(_spent, whole, None, real, tolerance), count[rows]
                found.append(kernels.determinant(kernel, whole, spent, None, own, real, width, tolerance=tolerance))
            return torch.cat(found) if len(found) > 1 else found[0]

        return _by_kernel(steps, x[..., 0], k, mask)
    x = x.to(torch.promote_types(x.dtype, torch.float32))

    def row(pick: Int64[Tensor, "B 1"]) -> Float[Tensor, "B 1 N"]:
        return _row_of(x, pick) @ x.transpose(1, 2)

    return _pivoted_cholesky(x.square().sum(-1), row, k, mask, tolerance)


@torch.no_grad()
@checked
def greedy_max_min(
    distance: Float[Tensor, "B N N"], k: int | Int[Tensor, " B"], mask: Bool[Tensor, "B N"] | None = None
) -> Int64[Tensor, "B K"]:
    """Tokens far from one another: each step takes the one whose nearest taken token is farthest away.

    The first is the token whose nearest neighbour is farthest away.

    Args:
        distance: Between every two tokens of a row; 0 on the diagonal, up to rounding.
        k: Tokens to keep, from 0 to the real tokens of the row.
        mask: True where a token is real.
    """
    if (kernels := kernels_for(distance, distance.shape[1], torch.float32, *HALVES)) is not None:
        return _by_kernel(lambda count, width: kernels.max_min(distance, count, mask, width), distance[:, 0], k, mask)
    if mask is not None:
        distance = distance.masked_fill(~(mask.unsqueeze(1) & mask.unsqueeze(2)), torch.inf)  # none is near to padding
    # A column's smallest entry is the token itself; a token that is alone in its row has no other.
    nearest = distance.topk(min(2, distance.shape[1]), dim=1, largest=False).values[:, -1]  # [B, N]
    check_inputs(nearest, k, mask)
    nearest = _without_padding(nearest, mask)  # what may not be taken is at -inf, and no minimum brings it back
    picks = _no_picks(nearest, k)
    for step, pick in enumerate(picks):
        torch.argmax(nearest, -1, keepdim=True, out=pick)
        own = _row_of(distance, pick).squeeze(1)
        # From the second on what is taken counts, and no longer who is lonely.
        nearest = _without_padding(own, mask) if step == 0 else torch.minimum(nearest, own, out=nearest)
        nearest.scatter_(1, pick, -torch.inf)
    return _ascending(picks, k, mask)


@torch.no_grad()
@checked
def greedy_coverage(
    coverage: Float[Tensor, "B R N"], k: int | Int[Tensor, " B"], mask: Bool[Tensor, "B N"] | None = None
) -> Int64[Tensor, "B K"]:
    """Tokens that together cover most: each step takes the one that raises the sum of the covered shares most.

    What is covered of target r is the largest `coverage[r, j]` of the tokens j taken; greedy reaches at least 1 - 1/e
    of the best set.

    Args:
        coverage: What each token covers of each of R targets, 0 or more; a target of zeros asks for nothing.
        k: Tokens to keep, from 0 to the real tokens of the row.
        mask: True where a token is real.
    """
    if (kernels := kernels_for(coverage, coverage.shape[2], torch.float32)) is not None:
        return _by_kernel(lambda count, width: kernels.coverage(coverage, count, mask, width), coverage[:, 0], k, mask)
    gain = coverage.sum(1)  # [B, N], what each token would add
    check_inputs(gain, k, mask)
    taken = torch.zeros_like(gain, dtype=torch.bool) if mask is None else ~mask
    covered = coverage.new_zeros(*coverage.shape[:2], 1)
    picks, missing = _no_picks(gain, k), torch.empty_like(coverage)
    for pick in picks:
        torch.sub(coverage, covered, out=missing)
        torch.sum(missing.clamp_(min=0), 1, out=gain)
        torch.argmax(gain.masked_fill_(taken, -torch.inf), -1, keepdim=True, out=pick)
        own = coverage.gather(2, pick.unsqueeze(1).expand(-1, coverage.shape[1], -1))
        torch.maximum(covered, own, out=covered)
        taken.scatter_(1, pick, True)
    return _ascending(picks, k, mask)


def _pivoted_cholesky(
    diagonal: Float[Tensor, "B N"],
    row: Callable[[Int64[Tensor, "B 1"]], Float[Tensor, "B 1 N"]],
    k: int | Int[Tensor, " B"],
    mask: Bool[Tensor, "B N"] | None,
    tolerance: float | None,
    worth: Float[Tensor, "B N"] | None = None,
) -> Int64[Tensor, "B K"]:
    """The pivots of the kernel with that diagonal, whose rows are asked for as they are needed.

    What a token is worth multiplies its residual, as a share of its diagonal, and changes nothing else: as it stands in
    its row and in its column, it divides out of every factor.
    """
    check_inputs(diagonal if worth is None else worth, k, mask)
    diagonal = diagonal if mask is None else diagonal.masked_fill(~mask, 0)
    floor = torch.full_like(diagonal, -torch.inf) if tolerance is None else tolerance * diagonal
    residual, spent = state = torch.stack([diagonal, _spent(diagonal, worth, mask, tolerance)])  # [2, B, N]
    if mask is not None:
        state.masked_fill_(~mask, -torch.inf)  # in both, for what may not be taken
    picks = _no_picks(diagonal, k)
    factors = diagonal.new_empty(len(picks), *diagonal.shape)  # [K, B, N]
    size = diagonal.new_empty(len(diagonal), 1)
    for step, pick in enumerate(picks):
        is_new = residual > floor
        gain = residual if worth is None else (residual / diagonal).log() + 2 * worth
        torch.max(torch.where(is_new, gain, spent), -1, keepdim=True, out=(size, pick))
        if worth is not None:
            size = torch.where(is_new, residual, -1).gather(1, pick)
        past = factors[:step]
        own = past.gather(2, pick.expand(step, -1, -1))  # [step, B, 1]
        left = torch.baddbmm(row(pick), own.permute(1, 2, 0), past.transpose(0, 1), alpha=-1).squeeze(1)
        if tolerance is None:
            root = size.clamp(min=LEAST_RESIDUAL).sqrt()
        else:  # The root of a size below 0 is NaN, and what is divided by infinity adds nothing.
            root = size.sqrt().nan_to_num_(nan=torch.inf, posinf=torch.inf)
        factor = torch.div(left, root, out=factors[step])
        residual.addcmul_(factor, factor, value=-1)
        state.scatter_(2, pick.expand(2, -1, -1), -torch.inf)
    return _ascending(picks, k, mask)


def _spent(
    diagonal: Float[Tensor, "B N"],
    worth: Float[Tensor, "B N"] | None,
    mask: Bool[Tensor, "B N"] | None,
    tolerance: float | None,
) -> Float[Tensor, "B N"]:
    """What tokens are ranked by once their residual is rounding, below every gain: the diagonal, or the worth.

    The diagonal from -2 to -1 of the largest; the worth in logs, moved below the least gain that a residual above its
    tolerance can have.
    """
    if worth is None:
        return diagonal / diagonal.amax(-1, keepdim=True).clamp(min=torch.finfo(diagonal.dtype).tiny) - 2
    whole = 2 * worth
    low, high = (whole, whole) if mask is None else (whole.masked_fill(~mask, end) for end in (torch.inf, -torch.inf))
    return whole - (high.amax(-1, keepdim=True) - low.amin(-1, keepdim=True) + 1 - math.log(tolerance or 1.0))


def _by_kernel(
    steps: Callable[[Tensor, int], Int64[Tensor, "B K"]],
    like: Float[Tensor, "B N"],
    k: int | Int[Tensor, " B"],
    mask: Bool[Tensor, "B N"] | None,
) -> Int64[Tensor, "B K"]:
    """What a kernel picks, given the tokens that each row keeps and the most of them."""
    check_inputs(like, k, mask)
    width = widest(k)
    if width == 0:
        return torch.empty(len(like), 0, dtype=torch.int64, device=like.device)
    budget = per_row(k, like, torch.int32)
    budget = budget if mask is None else budget.minimum(mask.sum(-1, keepdim=True, dtype=torch.int32))
    with torch.cuda.device_of(like):  # Triton launches on the current one
        return steps(budget.reshape(-1).contiguous(), width)


def _without_padding(values: Float[Tensor, "B N"], mask: Bool[Tensor, "B N"] | None) -> Float[Tensor, "B N"]:
    """A copy with -inf at padding."""
    return values.clone() if mask is None else values.masked_fill(~mask, -torch.inf)


def _row_of(matrix: Float[Tensor, "B N M"], pick: Int64[Tensor, "B 1"]) -> Float[Tensor, "B 1 M"]:
    """The row of each matrix that its pick names."""
    return matrix.gather(1, pick.unsqueeze(-1).expand(-1, -1, matrix.shape[-1]))


def _no_picks(like: Float[Tensor, "B N"], k: int | Int[Tensor, " B"]) -> Int64[Tensor, "K B 1"]:
    """Room for as many picks as the largest budget, step by step."""
    return torch.empty(widest(k), len(like), 1, dtype=torch.int64, device=like.device)


def _ascending(
    picks: Int64[Tensor, "K B 1"], k: int | Int[Tensor, " B"], mask: Bool[Tensor, "B N"] | None
) -> Int64[Tensor, "B K"]:
    """Each row's first k picks in ascending order, then -1; never more than it has real tokens."""
    chosen = picks.squeeze(-1).T  # [B, K]
    if mask is None and isinstance(k, int):
        return chosen.sort(dim=-1).values
    past = torch.iinfo(chosen.dtype).max
    budget = per_row(k, chosen, torch.int64)
    budget = budget if mask is None else budget.minimum(mask.sum(-1, keepdim=True))
    keep = chosen.masked_fill(torch.arange(len(picks), device=picks.device) >= budget, past).sort(dim=-1).values
    return keep.masked_fill(keep == past, -1)
