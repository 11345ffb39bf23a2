"""HoloV: split the image into crops, give each a share of the budget by its attention, keep the best of each."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffprune.methods.average_pool import cells_of
from diffprune.methods.base import Card, Counts, Pruner, check_choices
from diffprune.nn import BlockSpec
from diffprune.ops import take_tokens
from diffprune.ops.hard_topk import check_inputs, per_row, widest
from diffprune.ops.quotas import count_members, fill_up, heaviest
from diffprune.ops.similarity import cls_attention, pack, raster
from diffprune.registry import METHODS
from diffprune.types import VisualTokens

ATTENTION_SCALE = 1e3
EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class HoloVOptions:
    """Args:
    variant: "release" as the released code works: runs of the raster order, the spread of similarities scaled within a
        run (so that it cancels), the best of a run by attention. "paper": crops of the picture, one scale for the whole
        image, the best of a crop by the combined score.
    crops: How many; default: `1024 / 576 * N / K`: 8, 16 and 32 for K = 128, 64 and 32 of 576.
    alpha: Weight of the spread of similarities beside the attention.
    native: As released: tokens come crop after crop, by falling attention inside one (a crop that is kept whole in
        raster order); a crop's surplus quota, which the release fills with all-zero tokens, stays unspent, so that
        less than K may be kept; a crop of a single token weighs a thousandth; and projected tokens are compared, else
        the encoder's, unless projected ones are given.
    """

    variant: str = "release"
    crops: int | None = None
    alpha: float = 0.09
    native: bool = False

    def __post_init__(self) -> None:
        check_choices(self, variant=("release", "paper"))
        if self.crops is not None and self.crops < 1:
            raise ValueError(f"crops={self.crops} is no number of crops; give at least 1, or leave it out")


class Scores(NamedTuple):
    """Of each crop's tokens the combined score, and of each crop its mean."""

    token: Float[Tensor, "B P M"]
    crop: Float[Tensor, "B P"]


@METHODS.register("holov")
class HoloV(Pruner):
    """Quotas in proportion to the crops' mean scores; a quota past a crop's size goes to the next best crops."""

    card = Card(
        idea="splits the budget over crops in proportion to their attention, keeps each crop's most attended tokens",
        paper="Don't Just Chase 'Highlighted Tokens' in MLLMs: Revisiting Visual Holistic Context Retention (HoloV)",
        year=2025,
        licence="Apache-2.0",
        certainty="release read",
    )
    needs: ClassVar[frozenset[str]] = frozenset({"cls_attention"})
    native_positions: ClassVar[str] = "packed"
    Options: ClassVar[type] = HoloVOptions

    def __init__(self, options: Any = None, *, block: BlockSpec | None = None) -> None:
        super().__init__(options, block=block)
        if self.is_native:
            self.needs = frozenset({"cls_attention", "projected"})  # pyright: ignore[reportAttributeAccessIssue]

    def select(self, tokens: VisualTokens, k: Counts) -> Int[Tensor, "B K"]:
        chosen = self._crop_by_crop(tokens, k)
        return pack(chosen, chosen >= 0, widest(k)) if self.is_native else raster(chosen)[:, : widest(k)]

    def _crop_by_crop(self, tokens: VisualTokens, k: Counts) -> Int[Tensor, "B M"]:
        """What is kept, crop after crop and best first, among -1 for all others."""
        attention = cls_attention(tokens, "holov")
        check_inputs(attention, k, tokens.mask)
        crops = self._crops(tokens, k)
        filled = crops.slot >= 0
        sizes, own = filled.sum(-1), crops.of(attention[..., None]).squeeze(-1)
        scores = score_crops(
            crops.of(tokens.x if tokens.projected is None else tokens.projected),
            own * ATTENTION_SCALE,
            filled,
            alpha=self.options.alpha,
            shared_scale=self.options.variant == "paper",
        )
        budget = per_row(k, attention, torch.int64).squeeze(-1)
        weight = scores.crop
        if self.is_native:  # the attention of a crop of one is not scaled up beside that of the others
            weight = torch.where(sizes == 1, own.sum(-1), weight)
        quota = split_budget(weight, sizes, budget, exact=not self.is_native)
        place = torch.arange(filled.shape[-1], device=filled.device)
        value = scores.token if self.options.variant == "paper" else own
        # A crop that is kept whole stays as it lies.
        value = torch.where((quota >= sizes)[..., None], -place.to(value.dtype), value).masked_fill(~filled, -torch.inf)
        order = value.sort(dim=-1, descending=True, stable=True).indices
        return torch.where(place < quota[..., None], crops.slot.gather(-1, order), -1).flatten(1)

    def _crops(self, tokens: VisualTokens, k: Counts) -> "Crops":
        num_tokens, wanted = tokens.x.shape[1], self.options.crops
        if self.options.variant == "release" and tokens.is_full and isinstance(k, int):
            num_crops = 1024 * num_tokens // (576 * max(1, k)) if wanted is None else wanted
            slot = even_runs(num_tokens, max(1, min(num_crops, num_tokens)), tokens.x.device)
            return Crops(slot.expand(len(tokens), -1, -1), is_view=slot.numel() == num_tokens)
        counts = tokens.counts
        num_crops = 1024 * counts // (576 * per_row(k, tokens.mask, torch.int64).squeeze(-1).clamp(min=1))
        num_crops = num_crops.clamp(min=1) if wanted is None else torch.full_like(counts, wanted)
        num_crops = num_crops.minimum(counts)
        if self.options.variant == "paper":
            return Crops(slots_of(cells_of(tokens, num_crops, "holov")[0]))
        # Runs of the raster order; the first ones have a token more where they do not divide evenly.
        place = tokens.mask.cumsum(-1) - 1
        size, longer = (part[:, None] for part in (counts // num_crops.clamp(min=1), counts % num_crops.clamp(min=1)))
        border = longer * (size + 1)
        run = torch.where(place < border, place // (size + 1), longer + (place - border) // size.clamp(min=1))
        return Crops(slots_of(run.masked_fill(~tokens.mask, -1)))


class Crops(NamedTuple):
    """Where the tokens of each crop are, -1 behind the last of a smaller one.

    Args:
        is_view: The crops are the tokens as they lie, cut evenly: nothing has to be gathered.
    """

    slot: Int[Tensor, "B P M"]
    is_view: bool = False

    def of(self, values: Float[Tensor, "B N L"]) -> Float[Tensor, "B P M L"]:
        """The values crop by crop, 0 where there is no token."""
        if self.is_view:
            return values.unflatten(1, self.slot.shape[1:])
        return take_tokens(values, self.slot.flatten(1)).unflatten(1, self.slot.shape[1:])


def even_runs(num_tokens: int, num_runs: int, device: torch.device) -> Int[Tensor, "P M"]:
    """0 .. N - 1 cut into runs, one a row; the first ones have a token more where they do not divide evenly."""
    size, longer = divmod(num_tokens, num_runs)
    index = torch.arange(num_tokens, device=device)
    border = longer * (size + 1)
    if not longer:
        return index.view(num_runs, size)
    shorter = torch.nn.functional.pad(index[border:].view(-1, size), (0, 1), value=-1)
    return torch.cat([index[:border].view(longer, size + 1), shorter])


def slots_of(crop: Int[Tensor, "B N"]) -> Int[Tensor, "B P M"]:
    """The tokens of each crop in raster order, -1 behind the last; a token of crop -1 is in none."""
    num_crops = int(crop.max()) + 1
    sizes = count_members(crop.clamp(min=0), crop >= 0, num_crops)  # [B, P]
    order = crop.masked_fill(crop < 0, num_crops).sort(dim=-1, stable=True).indices
    start = sizes.cumsum(-1) - sizes
    offset = torch.arange(int(sizes.max()), device=crop.device)
    place = (start[..., None] + offset).clamp(max=crop.shape[-1] - 1)
    slot = order.gather(-1, place.flatten(1)).view(place.shape)
    return slot.masked_fill(offset >= sizes[..., None], -1)


def score_crops(
    features: Float[Tensor, "B P M L"],
    attention: Float[Tensor, "B P M"],
    filled: Bool[Tensor, "B P M"],
    *,
    alpha: float,
    shared_scale: bool,
) -> Scores:
    """Token scores `a + alpha * v` and their mean over each crop.

    v is the variance of a token's cosine similarities within its crop, scaled to the mean of the attention a: in each
    crop by itself, which makes every crop's mean `(1 + alpha) mean(a)`, or over the whole image.

    Args:
        features: What is compared, crop by crop; 0 where there is no token.
        attention: a, likewise.
        filled: True where there is a token.
        shared_scale: Scale v over the whole image.
    """
    vectors = features.float()
    vectors = vectors / (vectors.norm(dim=-1, keepdim=True) + EPS)
    similarity = vectors @ vectors.transpose(-1, -2)  # [B, P, M, M]
    similarity.diagonal(dim1=-2, dim2=-1).zero_()
    sizes, empty = filled.sum(-1), ~filled
    others = (sizes - 1).clamp(min=1)[..., None]
    mean = similarity.sum(-1) / others
    # The release counts a token's own, emptied entry among the squares.
    squares = ((similarity - mean[..., None]) ** 2).masked_fill(empty[..., None, :], 0.0)
    variance = (squares.sum(-1) / others).masked_fill(empty, 0.0)  # [B, P, M]
    axes = (1, 2) if shared_scale else (2,)
    count = filled.sum(axes, keepdim=True).clamp(min=1)
    scale = (attention.abs().sum(axes, keepdim=True) / count) / (variance.abs().sum(axes, keepdim=True) / count + EPS)
    score = (attention + alpha * variance * scale).masked_fill(empty, 0.0)
    return Scores(score, score.sum(-1) / sizes.clamp(min=1))


def split_budget(
    crop_score: Float[Tensor, "B P"], sizes: Int[Tensor, "B P"], k: Int[Tensor, " B"], *, exact: bool
) -> Int[Tensor, "B P"]:
    """Tokens each crop keeps: its share of K rounded down, one more for the heaviest, never more than it has.

    Args:
        exact: Give what a crop cannot take to the heaviest crops that can.
    """
    weight = crop_score / (crop_score.sum(-1, keepdim=True) + EPS)
    order = heaviest(weight)
    quota = (weight * k[:, None]).floor().long()
    quota = fill_up(quota, quota + sizes.clamp(max=1), order, k)  # one each, heaviest first
    quota = torch.minimum(quota, sizes)
    return fill_up(quota, sizes, order, k) if exact else quota
