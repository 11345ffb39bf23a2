"""ToMe in front of the language model: merge the most similar pairs, round after round, until K tokens are left."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffprune.methods._key_metric import check_heads, key_metric
from diffprune.methods.base import Card, Counts, Kept, MergingPruner, check_choices
from diffprune.nn import BlockSpec
from diffprune.nn.blocks import zero_padding
from diffprune.ops import cosine_matrix, take_tokens
from diffprune.ops.hard_topk import check_inputs, per_row
from diffprune.ops.similarity import descending, raster_order
from diffprune.registry import METHODS
from diffprune.types import VisualTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ToMeOptions:
    """Args:
    metric: What is compared: "features" of the tokens, or the encoder's "keys", averaged over heads.
    heads: Of the encoder, over which its keys are averaged (1: they are averaged already). Default: those of the
        tower's block, where the keys are as wide.
    native: Leave the tokens in the order the release's matching gives them (unmerged ones by falling similarity, then
        the other set) instead of raster order; between rounds it decides who can meet whom in the next one.
    """

    metric: str = "features"
    heads: int | None = None
    native: bool = False

    def __post_init__(self) -> None:
        check_choices(self, metric=("features", "keys"))
        check_heads(self.heads)


class SizedTokens(NamedTuple):
    """Tokens on their way: what is averaged, how many tokens each holds, and where it stands (-1 for padding)."""

    values: Float[Tensor, "B M F"]
    sizes: Float[Tensor, "B M"]
    positions: Int[Tensor, "B M"]


@METHODS.register("tome")
class ToMe(MergingPruner):
    """A merged token is the mean of all it holds and stands where the token stood that the others were merged into."""

    card = Card(
        idea="merges the most similar pairs by size-weighted mean, at most half of the tokens a round, down to K",
        paper="Token Merging: Your ViT But Faster",
        year=2022,
        licence="CC BY-NC 4.0",
        certainty="formula",
    )
    Options: ClassVar[type] = ToMeOptions

    def __init__(self, options: Any = None, *, block: BlockSpec | None = None) -> None:
        super().__init__(options, block=block)
        if self.options.metric == "keys":
            self.needs = frozenset({"keys"})  # pyright: ignore[reportAttributeAccessIssue]

    def reduce(self, tokens: VisualTokens, k: Counts) -> Kept:
        sized = self._merge(tokens, k)
        return Kept(sized.values[..., : tokens.x.shape[-1]].to(tokens.x.dtype), sized.positions)

    def _merge(self, tokens: VisualTokens, k: Counts) -> SizedTokens:
        mask, width = tokens.mask, tokens.x.shape[-1]
        check_inputs(mask.float(), k, mask)
        values = tokens.x.float()
        if self.options.metric == "keys":
            values = torch.cat([values, key_metric(tokens, "tome", self.block, self.options.heads)], dim=-1)
        compared = slice(width, None) if self.options.metric == "keys" else slice(None)
        index = torch.arange(mask.shape[-1], device=mask.device).expand(mask.shape)
        sized = in_raster_order(
            SizedTokens(values.masked_fill(~mask[..., None], 0.0), mask.float(), index.masked_fill(~mask, -1))
        )
        # How many are left of each row, here and on the device. With one goal for all a full row bounds the others.
        left, goals = ([mask.shape[-1]], [k]) if isinstance(k, int) else (tokens.counts.tolist(), k.tolist())
        counts, goal = tokens.counts, per_row(k, mask, torch.int64).squeeze(-1)
        while any(merges := [min(now // 2, now - wanted) for now, wanted in zip(left, goals, strict=True)]):
            gone = torch.minimum(counts // 2, counts - goal)
            sized = merge_pairs(sized, sized.values[..., compared], gone)
            counts = counts - gone
            left = [now - merged for now, merged in zip(left, merges, strict=True)]
            sized = SizedTokens(*(part[:, : max(left)] for part in sized))
            sized = sized if self.is_native else in_raster_order(sized)
        return SizedTokens(*(part[:, : max(left, default=0)] for part in sized))


def merge_pairs(sized: SizedTokens, metric: Float[Tensor, "B M E"], num_merges: Int[Tensor, " B"]) -> SizedTokens:
    """One round of bipartite matching, `num_merges` tokens fewer; padding at the end.

    Tokens are split alternately in two sets. Each of the first proposes its most similar one of the second; the most
    similar proposals are merged. Out come the rest of the first set by falling similarity, then the second set. A row
    that merges nothing stays as it is.
    """
    real = sized.positions >= 0
    metric = zero_padding(metric, real)
    similarity = cosine_matrix(metric[:, ::2], metric[:, 1::2])  # [B, A, C]
    similarity = similarity.masked_fill(~real[:, None, 1::2], -torch.inf)
    best, partner = similarity.max(-1)
    order = descending(best, real[:, ::2])  # [B, A], by rank
    rank = torch.arange(order.shape[-1], device=order.device).expand(order.shape)
    merged = torch.zeros_like(real[:, ::2]).scatter(-1, order, rank < num_merges[:, None])
    joins = merged[..., None] & (partner[..., None] == torch.arange(similarity.shape[-1], device=order.device))
    # Sums as products with 0 and 1: the same on every device and in every run, unlike scattered sums.
    joins = joins.float().transpose(1, 2)  # [B, C, A]
    mass = sized.values * sized.sizes[..., None]
    sizes, values = sized.sizes.clone(), sized.values.clone()
    sizes[:, 1::2] += (joins @ sized.sizes[:, ::2, None])[..., 0]
    total = mass[:, 1::2] + joins @ mass[:, ::2]
    changed = (joins.sum(-1, keepdim=True)) > 0
    values[:, 1::2] = torch.where(changed, total / sizes[:, 1::2, None].clamp(min=1), values[:, 1::2])
    # The new order: places in the old one, merged tokens and padding behind all others.
    place = torch.arange(real.shape[-1], device=order.device).expand(real.shape)
    listed = torch.where((num_merges > 0)[:, None], torch.cat([2 * order, place[:, 1::2]], dim=-1), place)
    gone = torch.zeros_like(real)
    gone[:, ::2] = merged
    last = (gone | ~real).gather(-1, listed).byte().sort(dim=-1, stable=True).indices
    listed = listed.gather(-1, last)
    positions = sized.positions.masked_fill(gone, -1).gather(-1, listed)
    left = positions >= 0
    return SizedTokens(take_tokens(values, listed.masked_fill(~left, -1)), sizes.gather(-1, listed) * left, positions)


def in_raster_order(sized: SizedTokens) -> SizedTokens:
    """The tokens by position, padding at the end."""
    order = raster_order(sized.positions)
    return SizedTokens(
        take_tokens(sized.values, order), sized.sizes.gather(-1, order), sized.positions.gather(-1, order)
    )
