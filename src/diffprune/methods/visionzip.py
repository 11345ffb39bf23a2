"""VisionZip: keep the tokens [CLS] attends to most, merge the rest into a few contextual ones. No training."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffprune.methods._key_metric import check_heads, key_metric
from diffprune.methods.base import Card, Counts, Kept, MergingPruner
from diffprune.nn.blocks import zero_padding
from diffprune.ops import cosine_matrix, hard_mask, take_tokens
from diffprune.ops.hard_topk import check_inputs, per_row, widest
from diffprune.ops.similarity import cls_attention, pack
from diffprune.registry import METHODS
from diffprune.types import VisualTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionZipOptions:
    """Args:
    contextual: How much of K is contextual tokens: an int is tokens, a float a share. The default is the release's
        20 of 128, 10 of 64, 5 of 32.
    heads: Of the encoder, over which its keys are averaged (1: they are averaged already). Default: those of the
        tower's block, where the keys are as wide.
    native: As released: [CLS] is counted in K, so that K - 1 tokens come from the picture, and contextual tokens come
        behind the dominant ones.
    """

    contextual: int | float = 10 / 64
    heads: int | None = None
    native: bool = False

    def __post_init__(self) -> None:
        check_heads(self.heads)
        value = self.contextual
        if isinstance(value, bool) or value < 0 or (isinstance(value, float) and not value < 1):
            raise ValueError(f"contextual={value!r:.80} is no part of K; give tokens (10) or a share below 1.0 (0.156)")


@METHODS.register("visionzip")
class VisionZip(MergingPruner):
    """A contextual token is its target token plus the mean of the tokens assigned to it; it stands at the target."""

    card = Card(
        idea="keeps the tokens [CLS] attends to most and merges the others by key similarity into contextual tokens",
        paper="VisionZip: Longer is Better but Not Necessary in Vision Language Models",
        year=2024,
        licence="Apache-2.0",
        certainty="release read",
        budget="exact K, dominant + contextual",
    )
    needs: ClassVar[frozenset[str]] = frozenset({"cls_attention", "keys"})
    native_positions: ClassVar[str] = "packed"
    Options: ClassVar[type] = VisionZipOptions

    def reduce(self, tokens: VisualTokens, k: Counts) -> Kept:
        merged = self._merge(tokens, k)
        return merged if self.is_native else merged.in_raster_order()

    def _merge(self, tokens: VisualTokens, k: Counts) -> Kept:
        """The dominant tokens as they lie, then the contextual ones."""
        attention, mask = cls_attention(tokens, "visionzip"), tokens.mask
        check_inputs(attention, k, mask)
        metric = zero_padding(key_metric(tokens, "visionzip", self.block, self.options.heads), tokens.padding_mask)
        contextual = self._contextual(k)
        main = k - int(self.is_native) - contextual
        dominant = hard_mask(attention, main, mask)
        rest = mask & ~dominant
        target = spaced_targets(rest, per_row(contextual, mask, torch.int64))
        index = torch.arange(mask.shape[-1], device=mask.device).expand(mask.shape)
        centres = pack(index, target, widest(contextual))  # [B, C]
        x = zero_padding(tokens.x, tokens.padding_mask)
        merged = (take_tokens(x, centres) + mean_of_assigned(x, metric, rest & ~target, centres)).to(x.dtype)
        kept = pack(index, dominant, widest(main))
        joined = torch.cat([take_tokens(x, kept), merged], dim=1)
        positions = torch.cat([kept, centres], dim=-1)
        found = positions >= 0  # rows that have fewer dominant tokens have a gap before their contextual ones
        places = torch.arange(found.shape[-1], device=found.device).expand(found.shape)
        order = pack(places, found, max(0, widest(k) - int(self.is_native)))
        positions = positions.gather(-1, order.clamp(min=0)).masked_fill(order < 0, -1)
        return Kept(take_tokens(joined, order), positions)

    def _contextual(self, k: Counts) -> Counts:
        """How many of each row's K are contextual; a `ValueError` where that leaves no dominant token."""
        share, extra = self.options.contextual, int(self.is_native)
        budgets = [k] if isinstance(k, int) else k.tolist()
        counts = [share if isinstance(share, int) else math.floor(budget * share + 0.5) for budget in budgets]
        for budget, count in zip(budgets, counts, strict=True):
            if budget and budget - extra - count < 1:
                smallest = share + 1 + extra if isinstance(share, int) else _smallest(share, extra)
                raise ValueError(
                    f"keep={budget} leaves VisionZip no dominant token beside {count} contextual ones"
                    f"{' and [CLS]' if extra else ''}; keep at least {smallest}, or lower contextual={share}"
                )
        return counts[0] if isinstance(k, int) else k.new_tensor(counts)


def _smallest(share: float, extra: int) -> int:
    """The least K from which on a share of contextual tokens leaves a dominant one."""
    last = math.ceil((1.5 + extra) / (1 - share)) + 1  # past it there always is one
    failing = [k for k in range(1, last + 1) if k - extra - math.floor(k * share + 0.5) < 1]
    return max(failing, default=0) + 1


def spaced_targets(rest: Bool[Tensor, "B N"], contextual: Int[Tensor, "B 1"]) -> Bool[Tensor, "B N"]:
    """True at every `n // contextual`-th of the n remaining tokens, the first `contextual` of them."""
    step = (rest.sum(-1, keepdim=True) // contextual.clamp(min=1)).clamp(min=1)
    place = rest.cumsum(-1) - 1
    return rest & (place % step == 0) & (place // step < contextual)


def mean_of_assigned(
    x: Float[Tensor, "B N D"],
    metric: Float[Tensor, "B N E"],
    free: Bool[Tensor, "B N"],
    centres: Int[Tensor, "B C"],
) -> Float[Tensor, "B C D"]:
    """Of each centre the mean, float32, of the free tokens most similar to it; 0 where it has none."""
    if not centres.shape[-1]:
        return x.new_zeros(len(x), 0, x.shape[-1], dtype=torch.float32)
    similarity = cosine_matrix(metric, take_tokens(metric, centres))  # [B, N, C]
    nearest = similarity.masked_fill((centres < 0)[:, None, :], -torch.inf).argmax(-1)
    assigned = (nearest[..., None] == torch.arange(centres.shape[-1], device=x.device)) & free[..., None]
    counts = assigned.sum(1).clamp(min=1)[..., None]
    return assigned.float().transpose(1, 2) @ x.float() / counts
