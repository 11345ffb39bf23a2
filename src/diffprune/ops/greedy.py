"""Greedy choices of a set: each step takes the token that adds most to what is taken already.

Every function runs as many steps as the largest k, each a few operations over all rows, and gives indices as
`hard_topk` does: ascending, never padding, -1 at the end of rows that keep fewer. A greedy choice of k begins with its
choice of k - 1, so a row with a smaller budget simply stops earlier. Of equal gains the lower index goes first. There
is no gradient.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor
from torch.nn import functional

from diffprune.ops.hard_topk import check_inputs, per_row

# Of its own squared length, what a token must still have outside the span of the others to count as new: float32 leaves
# rounding of some 1e-5 there once the span is full, and two tokens this close are half a degree apart.
RANK_TOLERANCE = 1e-4


@torch.no_grad()
def cosine_matrix(
    first: Float[Tensor, "B M D"],
    second: Float[Tensor, "B N D"] | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "B M N"]:
    """Cosine of the angle between every token of `first` and every one of `second` (of `first`, where left out).

    A token of zeros has cosine 0 with all.

    Args:
        first, second: Tokens; they are brought to length one in the type they have.
        dtype: Type of the products; that of the tokens where left out.
    """
    first = functional.normalize(first, dim=-1).to(dtype)
    second = first if second is None else functional.normalize(second, dim=-1).to(dtype)
    return first @ second.transpose(1, 2)


def unit_range(values: Float[Tensor, "B N"], mask: Bool[Tensor, "B N"], *, floor: float = 0.0) -> Float[Tensor, "B N"]:
    """(value - min + floor) / (max - min) over each row's real tokens; 1 where all are equal, 0 at padding."""
    lowest = values.masked_fill(~mask, torch.inf).amin(-1, keepdim=True)
    spread = values.masked_fill(~mask, -torch.inf).amax(-1, keepdim=True) - lowest
    return torch.where(spread > 0, (values - lowest + floor) / spread, 1.0).masked_fill(~mask, 0.0)


@torch.no_grad()
def greedy_determinant(
    kernel: Float[Tensor, "B N N"],
    k: int | Int[Tensor, " B"],
    mask: Bool[Tensor, "B N"] | None = None,
    *,
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
        tolerance: The share of its diagonal below which a token's residual counts as rounding.
    """

    def row(pick: Int64[Tensor, "B 1"]) -> Float[Tensor, "B N"]:
        return kernel.gather(1, pick.unsqueeze(-1).expand(-1, -1, kernel.shape[-1])).squeeze(1)

    return _pivoted_cholesky(kernel.diagonal(dim1=1, dim2=2), row, k, mask, tolerance)


@torch.no_grad()
def greedy_orthogonal(
    x: Float[Tensor, "B N D"],
    k: int | Int[Tensor, " B"],
    mask: Bool[Tensor, "B N"] | None = None,
    *,
    tolerance: float = RANK_TOLERANCE,
) -> Int64[Tensor, "B K"]:
    """The tokens that are longest outside the span of those taken before them: column-pivoted QR.

    The same choice as `greedy_determinant(x @ x^T, ...)` without that matrix; its rows are made as they are needed.
    """

    def row(pick: Int64[Tensor, "B 1"]) -> Float[Tensor, "B N"]:
        taken = x.gather(1, pick.unsqueeze(-1).expand(-1, -1, x.shape[-1]))  # [B, 1, D]
        return (taken @ x.transpose(1, 2)).squeeze(1)

    return _pivoted_cholesky(x.square().sum(-1), row, k, mask, tolerance)


@torch.no_grad()
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
    real = _real(distance[:, 0], mask)
    padded = distance.masked_fill(~real.unsqueeze(-1), torch.inf)  # no token is near to padding
    # A column's smallest entry is the token itself; a token that is alone in its row has no other.
    nearest = padded.topk(min(2, padded.shape[1]), dim=1, largest=False).values[:, -1]  # [B, N]
    check_inputs(nearest, k, mask)
    taken, picks = ~real, _no_picks(real, k)
    for step in range(picks.shape[1]):
        pick = nearest.masked_fill(taken, -torch.inf).argmax(-1, keepdim=True)  # [B, 1]
        own = padded.gather(1, pick.unsqueeze(-1).expand(-1, -1, padded.shape[-1])).squeeze(1)
        nearest = own if step == 0 else nearest.minimum(own)
        taken = taken.scatter(1, pick, True)
        picks[:, step] = pick.squeeze(-1)
    return _ascending(picks, real, k)


@torch.no_grad()
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
    check_inputs(coverage.sum(1), k, mask)
    real = _real(coverage[:, 0], mask)
    covered = coverage.new_zeros(*coverage.shape[:2], 1)  # [B, R, 1]
    taken, picks = ~real, _no_picks(real, k)
    for step in range(picks.shape[1]):
        gain = (coverage - covered).clamp_(min=0).sum(1)  # [B, N]
        pick = gain.masked_fill(taken, -torch.inf).argmax(-1, keepdim=True)
        own = coverage.gather(2, pick.unsqueeze(1).expand(-1, coverage.shape[1], -1))
        covered = covered.maximum(own)
        taken = taken.scatter(1, pick, True)
        picks[:, step] = pick.squeeze(-1)
    return _ascending(picks, real, k)


def _pivoted_cholesky(
    diagonal: Float[Tensor, "B N"],
    row: Callable[[Int64[Tensor, "B 1"]], Float[Tensor, "B N"]],
    k: int | Int[Tensor, " B"],
    mask: Bool[Tensor, "B N"] | None,
    tolerance: float,
) -> Int64[Tensor, "B K"]:
    """The pivots of the kernel with that diagonal, whose rows are asked for as they are needed."""
    check_inputs(diagonal, k, mask)
    real = _real(diagonal, mask)
    residual = diagonal.masked_fill(~real, 0)
    floor = tolerance * residual
    # From -2 to -1, so behind every residual that is left and before what is taken.
    exhausted = residual / residual.amax(-1, keepdim=True).clamp(min=torch.finfo(residual.dtype).tiny) - 2
    taken, picks = ~real, _no_picks(real, k)
    factors = residual.new_zeros(len(residual), picks.shape[1], residual.shape[1])  # [B, K, N]
    for step in range(picks.shape[1]):
        value = residual.where(residual > floor, exhausted).masked_fill(taken, -torch.inf)
        size, pick = value.max(-1, keepdim=True)  # [B, 1] each; of equal ones the first
        past = factors[:, :step]
        own = past.gather(2, pick.unsqueeze(1).expand(-1, step, -1))  # [B, step, 1]
        left = row(pick) - (own.transpose(1, 2) @ past).squeeze(1)
        factor = torch.where(size > 0, left / size.clamp(min=torch.finfo(size.dtype).tiny).sqrt(), 0)
        factors[:, step] = factor
        residual = residual - factor.square()
        taken = taken.scatter(1, pick, True)
        picks[:, step] = pick.squeeze(-1)
    return _ascending(picks, real, k)


def _real(like: Float[Tensor, "B N"], mask: Bool[Tensor, "B N"] | None) -> Bool[Tensor, "B N"]:
    return torch.ones_like(like, dtype=torch.bool) if mask is None else mask


def _no_picks(real: Bool[Tensor, "B N"], k: int | Int[Tensor, " B"]) -> Int64[Tensor, "B K"]:
    """Room for as many picks as the largest budget."""
    width = k if isinstance(k, int) else int(k.max()) if k.numel() else 0
    return torch.zeros(len(real), width, dtype=torch.int64, device=real.device)


def _ascending(
    picks: Int64[Tensor, "B K"], real: Bool[Tensor, "B N"], k: int | Int[Tensor, " B"]
) -> Int64[Tensor, "B K"]:
    """Each row's first k picks in ascending order, then -1; never more than it has real tokens."""
    num_tokens = real.shape[-1]
    budget = per_row(k, picks.double(), torch.int64).minimum(real.sum(-1, keepdim=True))
    step = torch.arange(picks.shape[-1], device=picks.device)
    keep = picks.masked_fill(step >= budget, num_tokens).sort(dim=-1).values
    return keep.masked_fill(keep == num_tokens, -1)
