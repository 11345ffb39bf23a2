"""Hard top-k (H_K of the paper): which tokens stay, and the tokens that stayed. Also the checks both top-k share."""

import torch
from jaxtyping import Bool, Float, Int, Int64, Shaped
from torch import Tensor

from diffprune.ops.arguments import checked


@checked
def hard_topk(
    logits: Float[Tensor, "B N"],
    k: int | Int[Tensor, " B"],
    mask: Bool[Tensor, "B N"] | None = None,
) -> Int64[Tensor, "B K"]:
    """Indices of the k largest logits of each row, ascending; -1 fills the end of rows that keep fewer.

    Of equal logits the lower index goes first, so the choice does not depend on the device. Never an index of padding.
    An int `k` gives a static shape; of a tensor the largest value is read, which waits for the device it is on.

    Args:
        logits: Raw token importance.
        k: Tokens to keep, from 0 to the real tokens of the row.
        mask: True where a token is real.
    """
    check_inputs(logits, k, mask)
    num_tokens = logits.shape[-1]
    order = _descending(logits, mask)[:, : widest(k)]  # [B, K]
    rank = torch.arange(order.shape[-1], device=logits.device)
    # Slots past the row's own budget hold N, which sorts behind every token, and become -1 afterwards.
    keep = order.masked_fill(rank >= _budget(logits, k, mask), num_tokens).sort(dim=-1).values
    return keep.masked_fill(keep == num_tokens, -1)


@checked
def hard_mask(
    logits: Float[Tensor, "B N"],
    k: int | Int[Tensor, " B"],
    mask: Bool[Tensor, "B N"] | None = None,
) -> Bool[Tensor, "B N"]:
    """True at the tokens that `hard_topk` keeps. The shape is static whatever `k` is, so nothing waits for a device."""
    check_inputs(logits, k, mask)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    kept = rank < _budget(logits, k, mask)  # [B, N], by rank
    return torch.zeros_like(kept).scatter(-1, _descending(logits, mask), kept)


@checked
def take_tokens(x: Shaped[Tensor, "B N D"], keep: Int64[Tensor, "B K"]) -> Shaped[Tensor, "B K D"]:
    """The tokens that `keep` names, in its order; zeros where `keep` is -1."""
    index = keep.clamp(min=0).unsqueeze(-1).expand(-1, -1, x.shape[-1])  # [B, K, D]
    return x.gather(1, index).masked_fill((keep < 0).unsqueeze(-1), 0)


def widest(k: int | Int[Tensor, " B"]) -> int:
    """The largest budget: as it is where it is an int, else read, which waits for the device it is on."""
    if isinstance(k, int):
        return k
    return int(k.max()) if k.numel() else 0


def check_inputs(
    logits: Float[Tensor, "B N"],
    k: int | Shaped[Tensor, " B"],
    mask: Bool[Tensor, "B N"] | None = None,
    *,
    finite: bool = False,
) -> None:
    """Raise a `ValueError` that names the value where k or the logits make no sense.

    Python numbers are always checked, the values of tensors on the CPU alone: reading them elsewhere would stall the
    device at every step. There bad input gives bad output (a NaN logit a NaN row, a k past the row's tokens all of
    them) and no error. Nothing is checked while `torch.compile` traces.

    A row without a real token is fine as long as its k is 0.

    Args:
        finite: Refuse infinite logits too: they can be ranked, but not weighed.
    """
    if torch.compiler.is_compiling():
        return
    num_tokens = logits.shape[-1]
    if isinstance(k, int) and not 0 <= k <= num_tokens:
        raise ValueError(f"k={k} is not between 0 and the {num_tokens} tokens of a row; k is what stays")
    if logits.device.type != "cpu":
        return
    if isinstance(k, Tensor) or mask is not None:
        budget = per_row(k, logits, torch.float64).detach()
        count = torch.full_like(budget, num_tokens) if mask is None else mask.sum(-1, keepdim=True)
        bad = _first_true(~((budget >= 0) & (budget <= count)))  # written so that NaN is refused
        if bad is not None:
            kept, real = float(budget[bad]), int(count[bad])
            raise ValueError(f"k={kept:g} in row {bad[0]} is not between 0 and its {real} real tokens; k is what stays")
    is_bad = ~logits.isfinite() if finite else logits.isnan()
    bad = _first_true(is_bad if mask is None else is_bad & mask)
    if bad is not None:
        row, token = bad
        raise ValueError(f"logits[{row}, {token}] is {float(logits[bad])}; leave such tokens out with mask")


def per_row(value: float | int | Shaped[Tensor, "..."], logits: Shaped[Tensor, "B N"], dtype: torch.dtype) -> Tensor:
    """The value as a column [B, 1] beside the logits, or whatever has one row per image."""
    if isinstance(value, Tensor):
        return value.to(device=logits.device, dtype=dtype).reshape(-1, 1).expand(logits.shape[0], 1)
    return torch.full((logits.shape[0], 1), value, dtype=dtype, device=logits.device)


def _first_true(bad: Bool[Tensor, "..."]) -> tuple[int, ...] | None:
    """Where the first True is, or None."""
    return tuple(int(index) for index in bad.nonzero()[0]) if bad.any() else None


def _descending(logits: Float[Tensor, "B N"], mask: Bool[Tensor, "B N"] | None) -> Int64[Tensor, "B N"]:
    """Token indices from the largest logit to the smallest, ties by index, padding last."""
    if mask is not None:
        lowest = torch.finfo(logits.dtype).min  # a real token at -inf still goes before padding
        logits = logits.clamp(min=lowest).masked_fill(~mask, -torch.inf)
    return logits.sort(dim=-1, descending=True, stable=True).indices


def _budget(
    logits: Float[Tensor, "B N"], k: int | Int[Tensor, " B"], mask: Bool[Tensor, "B N"] | None
) -> Int64[Tensor, "B 1"]:
    """Each row's k, but never more than its real tokens: where k goes unchecked it must not reach padding."""
    budget = per_row(k, logits, torch.int64)
    return budget if mask is None else budget.minimum(mask.sum(-1, keepdim=True))
