"""Greedy choices on a GPU in Triton: the same picks as `diffprune.ops.greedy`, without a launch for every operation.

    largest determinant   one launch for all steps up to WHOLE_TOKENS tokens: one program an image, past factors in a
                          buffer that stays in the first cache; beyond, tokens are split over programs, a launch a step
    max-min               one launch for all steps, and one before it for who is lonely
    coverage              two launches a step: which targets gained, and what that takes from every token's gain

Imported by `diffprune.ops.greedy` alone, and only where there is a GPU and Triton. Nothing here waits for the device.
"""
# pyright: basic, reportIndexIssue=false, reportMissingImports=false, reportUnknownMemberType=false, reportMissingTypeStubs=false

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

LONGEST_ROW = 32768  # tokens of one row that a program can hold
WHOLE_TOKENS = 1024  # up to here one program holds a row's tokens and their factors
TILE = 128  # tokens of one program where a row is split
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
FEW_PROGRAMS = 264  # two for each multiprocessor of a large GPU; with fewer, smaller tiles use more of them


# --- largest determinant ----------------------------------------------------------------------------------------------


@triton.jit
def _better(gain, rest, place, other_gain, other_rest, other_place):
    """The one of two tokens that gains more, of equal ones the lower index."""
    first = (gain > other_gain) | ((gain == other_gain) & (place < other_place))
    return tl.where(first, gain, other_gain), tl.where(first, rest, other_rest), tl.where(first, place, other_place)


@triton.jit
def _gain(rest, diagonal, tolerance, worth, spent, HAS_WORTH: tl.constexpr):
    """What each token is ranked by, and its residual where that is more than rounding, else -1."""
    is_new = rest > tolerance * diagonal
    gain = rest
    if HAS_WORTH:
        gain = tl.log(tl.where(is_new, tl.math.div_rn(rest, diagonal), 1.0)) + 2 * worth
    return tl.where(is_new, gain, spent), tl.where(is_new, rest, -1.0)


@triton.jit
def _factor(line, explained, rest):
    """The direction of a pick as the others see it; past the rank nothing is taken out any more."""
    return tl.where(rest > 0, (line - explained) * (1.0 / tl.math.sqrt_rn(tl.maximum(rest, 1e-30))), 0.0)


@triton.jit(do_not_specialize=["K", "row_stride", "token_stride"])
def _determinant_whole(
    kernel, diagonals, worth, real, budget, factors, out, N, K, row_stride, token_stride, tolerance,
    HAS_WORTH: tl.constexpr, HAS_MASK: tl.constexpr, BN: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """All steps for one image; `factors` [B, K, N] is written and read by this program alone."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BN)
    live = n < N
    if HAS_MASK:
        live = live & (tl.load(real + row * N + n, mask=live, other=0) != 0)
    kernel += row * N * N
    factors += row * K * N
    diagonal = tl.load(diagonals + row * row_stride + n.to(tl.int64) * token_stride, mask=live, other=0.0)
    own_worth = tl.zeros((BN,), tl.float32)
    # What is taken past the rank, below every gain: `_spent` of the reference.
    if HAS_WORTH:
        own_worth = tl.load(worth + row * N + n, mask=live, other=0.0)
        last = 2 * own_worth
        high = tl.max(tl.where(live, last, float("-inf")), 0)
        low = tl.min(tl.where(live, last, float("inf")), 0)
        last -= high - low + 1 - tl.log(tolerance)
    else:
        last = tl.math.div_rn(diagonal, tl.maximum(tl.max(diagonal, 0), TINY)) - 2
    last = tl.where(live, last, float("-inf"))
    rest = tl.where(live, diagonal, float("-inf"))
    taken = n < 0
    s = tl.arange(0, CHUNK)
    for step in range(0, tl.load(budget + row)):
        gain, new = _gain(rest, diagonal, tolerance, own_worth, last, HAS_WORTH)
        _, size, pick = tl.reduce((gain, new, n), 0, _better)
        pick = tl.minimum(pick, N - 1)  # NaN compares with nothing, and may leave any lane
        line = tl.load(kernel + pick.to(tl.int64) * N + n, mask=live, other=0.0)
        explained = tl.zeros((CHUNK, BN), tl.float32)
        for first in range(0, step, CHUNK):
            past = first + s
            before = past < step
            own = tl.load(factors + past * N + pick, mask=before, other=0.0)
            others = tl.load(factors + past[:, None] * N + n[None, :], mask=before[:, None] & live[None, :], other=0.0)
            explained += own[:, None] * others
        factor = _factor(line, tl.sum(explained, 0), size)
        tl.store(factors + step * N + n, factor, mask=live)
        taken = taken | (n == pick)
        rest = tl.where(taken, float("-inf"), rest - factor * factor)
        last = tl.where(taken, float("-inf"), last)
        tl.debug_barrier()  # other threads of the program read this factor in the steps to come
    tl.store(out + row * K + tl.cumsum(taken.to(tl.int32), 0) - 1, n.to(tl.int64), mask=taken)


@triton.jit(do_not_specialize=["step", "source", "target", "K"])
def _determinant_step(
    kernel, whole, spent, worth, residual, factors, budget, best, best_rest, best_place, picks,
    N, K, G, step, source, target, tolerance,
    HAS_WORTH: tl.constexpr, BG: tl.constexpr, BT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One step for some tokens of an image: takes the best of all programs' last bests, and leaves its own.

    `best`, `best_rest`, `best_place` [2, B, G] are read at `source` and written at `target`, offsets of the halves.
    Before the first step there is nothing to take: it leaves its best alone.
    """
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if step < tl.load(budget + row):
        n = tile * BT + tl.arange(0, BT)
        live = n < N
        rest = tl.load(residual + row * N + n, mask=live, other=float("-inf"))
        last = tl.load(spent + row * N + n, mask=live, other=float("-inf"))
        own_worth = tl.zeros((BT,), tl.float32)
        if HAS_WORTH:
            own_worth = tl.load(worth + row * N + n, mask=live, other=0.0)
        if step >= 0:
            g = tl.arange(0, BG)
            gains = tl.load(best + source + row * G + g, mask=g < G, other=float("-inf"))
            rests = tl.load(best_rest + source + row * G + g, mask=g < G, other=-1.0)
            places = tl.load(best_place + source + row * G + g, mask=g < G, other=N)
            _, size, pick = tl.reduce((gains, rests, places), 0, _better)
            pick = tl.minimum(pick, N - 1)
            line = tl.load(kernel + row * N * N + pick.to(tl.int64) * N + n, mask=live, other=0.0)
            factors += row * K * N
            explained = tl.zeros((CHUNK, BT), tl.float32)
            for first in range(0, step, CHUNK):
                past = first + tl.arange(0, CHUNK)
                before = past < step
                own = tl.load(factors + past * N + pick, mask=before, other=0.0)
                at = factors + past[:, None] * N + n[None, :]
                explained += own[:, None] * tl.load(at, mask=before[:, None] & live[None, :], other=0.0)
            # What may not be taken, padding too, is at -inf and stays there.
            last = tl.where(n == pick, float("-inf"), last)
            is_open = last > float("-inf")
            factor = tl.where(is_open, _factor(line, tl.sum(explained, 0), size), 0.0)
            rest = tl.where(is_open, rest - factor * factor, float("-inf"))
            tl.store(factors + step * N + n, factor, mask=live)
            tl.store(residual + row * N + n, rest, mask=live)
            tl.store(spent + row * N + n, last, mask=live)
            if tile == 0:
                tl.store(picks + row * K + step, pick.to(tl.int64))
        full = tl.load(whole + row * N + n, mask=live, other=0.0)
        gain, new = _gain(rest, full, tolerance, own_worth, last, HAS_WORTH)
        top, size, pick = tl.reduce((gain, new, n), 0, _better)
        tl.store(best + target + row * G + tile, top)
        tl.store(best_rest + target + row * G + tile, size)
        tl.store(best_place + target + row * G + tile, pick)


# --- max-min ----------------------------------------------------------------------------------------------------------


@triton.jit
def _second_smallest(distance, real, out, N, HAS_MASK: tl.constexpr, BM: tl.constexpr, BT: tl.constexpr):
    """The second smallest entry of each column over the real rows, infinity where there is but one."""
    row = tl.program_id(1).to(tl.int64)
    m, n = tl.arange(0, BM), tl.program_id(0) * BT + tl.arange(0, BT)
    distance += row * N * N
    low = tl.full((BM, BT), float("inf"), tl.float32)
    high = tl.full((BM, BT), float("inf"), tl.float32)
    for first in range(0, N, BM):
        live = first + m < N
        if HAS_MASK:
            live = live & (tl.load(real + row * N + first + m, mask=live, other=0) != 0)
        at = distance + (first + m).to(tl.int64)[:, None] * N + n[None, :]
        value = tl.load(at, mask=live[:, None] & (n < N)[None, :], other=float("inf")).to(tl.float32)
        high = tl.minimum(high, tl.maximum(low, value))
        low = tl.minimum(low, value)
    _, smallest = tl.min(low, 0, return_indices=True)
    others = tl.where(m[:, None] == smallest[None, :], high, low)  # where the smallest is, the next one above it
    tl.store(out + row * N + n, tl.min(others, 0), mask=n < N)


@triton.jit(do_not_specialize=["K"])
def _max_min(distance, nearest, real, budget, out, N, K, HAS_MASK: tl.constexpr, BN: tl.constexpr):
    """All steps for one image."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BN)
    live = n < N
    if HAS_MASK:
        live = live & (tl.load(real + row * N + n, mask=live, other=0) != 0)
    distance += row * N * N
    near = tl.load(nearest + row * N + n, mask=live, other=float("-inf"))
    taken = n < 0
    for step in range(0, tl.load(budget + row)):
        _, pick = tl.max(near, 0, return_indices=True)
        pick = tl.minimum(pick, N - 1)
        line = tl.load(distance + pick.to(tl.int64) * N + n, mask=live, other=float("-inf")).to(tl.float32)
        taken = taken | (n == pick)
        # From the second on what is taken counts, and no longer who is lonely.
        near = tl.where(taken, float("-inf"), tl.where(step == 0, line, tl.minimum(near, line)))
    tl.store(out + row * K + tl.cumsum(taken.to(tl.int32), 0) - 1, n.to(tl.int64), mask=taken)


# --- coverage ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["step", "K"])
def _coverage_pick(
    coverage, covered, was, gained, count, budget, best, where_best, picks, R, N, K, G, step,
    BG: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """The next pick of an image, and the targets it covers better than those before: `gained` and what `was` there."""
    row = tl.program_id(0).to(tl.int64)
    found = 0
    if step < tl.load(budget + row):
        g = tl.arange(0, BG)
        _, winner = tl.max(tl.load(best + row * G + g, mask=g < G, other=float("-inf")), 0, return_indices=True)
        pick = tl.load(where_best + row * G + tl.minimum(winner, G - 1))
        tl.store(picks + row * K + step, pick.to(tl.int64))
        for first in range(0, R, BR):
            r = first + tl.arange(0, BR)
            own = tl.load(coverage + (row * R + r) * N + pick, mask=r < R, other=0.0)
            old = tl.load(covered + row * R + r, mask=r < R, other=0.0)
            more = own > old
            place = found + tl.cumsum(more.to(tl.int32), 0) - 1
            tl.store(gained + row * R + place, r, mask=more)
            tl.store(was + row * R + place, old, mask=more)
            tl.store(covered + row * R + r, own, mask=more)
            found += tl.sum(more.to(tl.int32), 0)
    tl.store(count + row, found)


@triton.jit(do_not_specialize=["step", "K"])
def _coverage_step(
    coverage, covered, was, gained, count, budget, gain, picks, best, where_best, R, N, K, G, step,
    BR: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """What the pick took from the gain of some tokens of an image, and the best of them now.

    In float64: what is left at the end is small beside what was there at the start.
    """
    tile, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if step < tl.load(budget + row):
        n = tile * BT + tl.arange(0, BT)
        live = n < N
        total = tl.load(count + row)
        less = tl.zeros((BR, BT), tl.float64)
        for first in range(0, total, BR):
            i = first + tl.arange(0, BR)
            r = tl.load(gained + row * R + i, mask=i < total, other=0)
            old = tl.load(was + row * R + i, mask=i < total, other=0.0).to(tl.float64)
            new = tl.load(covered + row * R + r, mask=i < total, other=0.0).to(tl.float64)
            at = coverage + (row * R + r)[:, None] * N + n[None, :]
            value = tl.load(at, mask=(i < total)[:, None] & live[None, :], other=0.0).to(tl.float64)
            less += tl.minimum(value, new[:, None]) - tl.minimum(value, old[:, None])
        rest = tl.load(gain + row * N + n, mask=live, other=float("-inf")) - tl.sum(less, 0)
        rest = tl.where(n == tl.load(picks + row * K + step), float("-inf"), rest)
        tl.store(gain + row * N + n, rest, mask=live)
        size, place = tl.max(rest, 0, return_indices=True)
        tl.store(best + row * G + tile, size)
        tl.store(where_best + row * G + tile, tl.minimum(tile * BT + place, N - 1))


# --- whether they can be had ------------------------------------------------------------------------------------------


@triton.jit
def _one(out):
    tl.store(out, 1)


def try_out() -> None:
    """Compile and launch the least kernel; whatever keeps Triton from compiling is raised here."""
    _one[(1,)](torch.zeros(1, dtype=torch.int32, device="cuda"))


# --- what calls them --------------------------------------------------------------------------------------------------


def determinant(
    kernel: Float[Tensor, "B N N"],
    diagonal: Float[Tensor, "B N"],
    spent: Callable[[], Float[Tensor, "B N"]],
    worth: Float[Tensor, "B N"] | None,
    count: Int[Tensor, " B"],
    mask: Bool[Tensor, "B N"] | None,
    width: int,
    *,
    tolerance: float,
) -> Int64[Tensor, "B K"]:
    """The picks of `greedy_determinant`, ascending, -1 at the end of rows that keep fewer.

    Args:
        diagonal: Of the kernel.
        spent: Gives what a token is ranked by once its residual is rounding; the single launch makes it by itself.
        worth: As there.
        count: Tokens each row keeps, at most its real ones.
        width: The largest of them.
    """
    batch, num_tokens, _ = kernel.shape
    kernel = kernel.contiguous()
    worth = None if worth is None else worth.float().contiguous()
    factors = kernel.new_empty(batch, width, num_tokens)
    out = _no_picks(kernel, width)
    if num_tokens <= WHOLE_TOKENS:
        held = max(128, triton.next_power_of_2(num_tokens))
        _determinant_whole[(batch,)](
            kernel, diagonal, worth, _bytes(mask), count, factors, out, num_tokens, width, *diagonal.stride(),
            tolerance, HAS_WORTH=worth is not None, HAS_MASK=mask is not None, BN=held, CHUNK=8, num_warps=held // 128,
        )  # fmt: skip
        return out
    tile = _tile(batch, num_tokens)
    tiles = triton.cdiv(num_tokens, tile)
    diagonal = diagonal.contiguous()
    residual, last = state = torch.stack([diagonal, spent()])  # [2, B, N]
    if mask is not None:
        state.masked_fill_(~mask, -torch.inf)  # in both, for what may not be taken
    best, best_rest = torch.empty(2, 2, batch, tiles, device=kernel.device)
    best_place = torch.empty_like(best, dtype=torch.int32)
    half = batch * tiles
    for step in range(-1, width):
        source, target = (0, half) if step % 2 == 0 else (half, 0)
        _determinant_step[(tiles, batch)](
            kernel, diagonal, last, worth, residual, factors, count, best, best_rest, best_place, out,
            num_tokens, width, tiles, step, source, target, tolerance,
            HAS_WORTH=worth is not None, BG=triton.next_power_of_2(tiles), BT=tile, CHUNK=4096 // tile, num_warps=4,
        )  # fmt: skip
    return _ascending(out)


def max_min(
    distance: Float[Tensor, "B N N"], count: Int[Tensor, " B"], mask: Bool[Tensor, "B N"] | None, width: int
) -> Int64[Tensor, "B K"]:
    """The picks of `greedy_max_min`; see `determinant`."""
    batch, num_tokens, _ = distance.shape
    distance, real = distance.contiguous(), _bytes(mask)
    nearest = distance.new_empty(batch, num_tokens, dtype=torch.float32)
    tile = 32 if batch * num_tokens < 32 * FEW_PROGRAMS else 128
    _second_smallest[(triton.cdiv(num_tokens, tile), batch)](
        distance, real, nearest, num_tokens, HAS_MASK=mask is not None, BM=4096 // tile, BT=tile, num_warps=4
    )
    out = _no_picks(distance, width)
    held = max(128, triton.next_power_of_2(num_tokens))
    warps = min(16 if held <= 8192 else 32, held // 128)
    _max_min[(batch,)](
        distance, nearest, real, count, out, num_tokens, width, HAS_MASK=mask is not None, BN=held, num_warps=warps
    )
    return out


def coverage(
    covers: Float[Tensor, "B R N"], count: Int[Tensor, " B"], mask: Bool[Tensor, "B N"] | None, width: int
) -> Int64[Tensor, "B K"]:
    """The picks of `greedy_coverage`; see `determinant`."""
    batch, targets, num_tokens = covers.shape
    covers = covers.contiguous()
    tile = _tile(batch, num_tokens)
    tiles = triton.cdiv(num_tokens, tile)
    gain = covers.sum(1, dtype=torch.float64)
    gain = gain if mask is None else gain.masked_fill(~mask, -torch.inf)
    padded = torch.nn.functional.pad(gain, (0, tile * tiles - num_tokens), value=-torch.inf)
    best, place = padded.unflatten(1, (tiles, tile)).max(-1)  # [B, G]
    where_best = (place + torch.arange(tiles, device=gain.device) * tile).to(torch.int32)
    covered = covers.new_zeros(batch, targets)
    was, gained = torch.empty_like(covered), torch.empty_like(covered, dtype=torch.int32)
    num_gained = torch.empty_like(count)
    out = _no_picks(covers, width)
    for step in range(width):
        _coverage_pick[(batch,)](
            covers, covered, was, gained, num_gained, count, best, where_best, out, targets, num_tokens, width, tiles,
            step, BG=triton.next_power_of_2(tiles), BR=1024, num_warps=8,
        )  # fmt: skip
        _coverage_step[(tiles, batch)](
            covers, covered, was, gained, num_gained, count, gain, out, best, where_best, targets, num_tokens, width,
            tiles, step, BR=2048 // tile, BT=tile, num_warps=4,
        )  # fmt: skip
    return _ascending(out)


def _tile(batch: int, num_tokens: int) -> int:
    """Tokens of one program, so that there is a program for every multiprocessor where that is possible."""
    return 32 if batch * triton.cdiv(num_tokens, 32) <= FEW_PROGRAMS else TILE


def _no_picks(like: Tensor, width: int) -> Int64[Tensor, "B K"]:
    """-1 in every slot, which those of rows that keep fewer stay at."""
    return torch.full((like.shape[0], width), -1, dtype=torch.int64, device=like.device)


def _ascending(picks: Int64[Tensor, "B K"]) -> Int64[Tensor, "B K"]:
    """Each row's picks in ascending order, -1 at the end."""
    past = torch.iinfo(picks.dtype).max
    picks = picks.masked_fill(picks < 0, past).sort(dim=-1).values
    return picks.masked_fill(picks == past, -1)


def _bytes(mask: Bool[Tensor, "B N"] | None) -> Tensor | None:
    return None if mask is None else mask.contiguous().view(torch.uint8)
