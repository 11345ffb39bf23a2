"""HoloV: split the image into crops, give each a share of the budget by its attention, keep the best of each."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffprune.methods.average_pool import cells_of
from diffprune.methods.base import Card, Pruner, check_choices
from diffprune.methods.quotas import count_members, fill_up, take_quota
from diffprune.methods.similarity import cls_attention, raster
from diffprune.ops import take_tokens
from diffprune.ops.hard_topk import check_inputs
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
    crops: How many; left out, `1024 / 576 * N / K`: 8, 16 and 32 for K = 128, 64 and 32 of 576.
    alpha: Weight of the spread of similarities beside the attention.
    native: Leave a crop's surplus quota unspent, where the release puts all-zero tokens; `select` may then keep less
        than K.
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
    """Of each token its combined score, and of each crop its mean."""

    token: Float[Tensor, "B N"]
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
    Options: ClassVar[type] = HoloVOptions

    def select(self, tokens: VisualTokens, k: Int[Tensor, " B"]) -> Int[Tensor, "B K"]:
        return raster(self._choose(tokens, k, native=self.options.native))

    def select_native(self, tokens: VisualTokens, k: Int[Tensor, " B"]) -> Int[Tensor, "B K"]:
        """What the release keeps, in its order: crop after crop, by falling attention inside one.

        A crop that is kept whole stays in raster order. -1 stands at the end of a row where the release pads with
        all-zero tokens.
        """
        return self._choose(tokens, k, native=True)

    def _choose(self, tokens: VisualTokens, k: Int[Tensor, " B"], *, native: bool) -> Int[Tensor, "B K"]:
        attention, mask = cls_attention(tokens, "holov"), tokens.mask
        check_inputs(attention, k, mask)
        crop = self._crops(tokens, k)
        num_crops = int(crop.max()) + 1
        sizes = count_members(crop, mask, num_crops)
        scores = score_crops(
            tokens.x if tokens.projected is None else tokens.projected,
            attention * ATTENTION_SCALE,
            crop.masked_fill(~mask, num_crops),
            sizes,
            alpha=self.options.alpha,
            shared_scale=self.options.variant == "paper",
        )
        quota = split_budget(scores.crop, sizes, k, exact=not native)
        value = scores.token if self.options.variant == "paper" else attention
        whole = (quota >= sizes).gather(-1, crop)
        value = torch.where(whole, -torch.arange(value.shape[-1], device=value.device).to(value.dtype), value)
        return take_quota(crop, value, quota, mask)

    def _crops(self, tokens: VisualTokens, k: Int[Tensor, " B"]) -> Int[Tensor, "B N"]:
        """The crop of each token, 0 at padding."""
        counts = tokens.counts
        wanted = (1024 * counts) // (576 * k.clamp(min=1)) if self.options.crops is None else self.options.crops
        crops = torch.minimum(torch.as_tensor(wanted, device=counts.device).clamp(min=1).expand_as(counts), counts)
        if self.options.variant == "paper":
            return cells_of(tokens, crops, "holov")[0].clamp(min=0)
        # Runs of the raster order; the first ones have a token more where they do not divide evenly.
        place = (tokens.mask.cumsum(-1) - 1).clamp(min=0)
        size, longer = (value[:, None] for value in (counts // crops.clamp(min=1), counts % crops.clamp(min=1)))
        border = longer * (size + 1)
        run = torch.where(place < border, place // (size + 1), longer + (place - border) // size.clamp(min=1))
        return run.masked_fill(~tokens.mask, 0)


def score_crops(
    features: Float[Tensor, "B N L"],
    attention: Float[Tensor, "B N"],
    crop: Int[Tensor, "B N"],
    sizes: Int[Tensor, "B P"],
    *,
    alpha: float,
    shared_scale: bool,
) -> Scores:
    """Token scores `a + alpha * v` and their mean over each crop.

    v is the variance of a token's cosine similarities within its crop, scaled to the mean of the attention a: in each
    crop by itself, which makes every crop's mean `(1 + alpha) mean(a)`, or over the whole image.

    Args:
        features: What is compared.
        attention: a; 0 at padding.
        crop: The crop of each token, P at padding.
        sizes: Tokens in each crop.
        shared_scale: Scale v over the whole image.
    """
    num_crops, widest = sizes.shape[-1], int(sizes.max())
    # One slot per token of a crop, so that tokens are compared within crops only.
    order = crop.sort(dim=-1, stable=True).indices
    start = sizes.cumsum(-1) - sizes
    offset = torch.arange(widest, device=crop.device)
    filled = offset < sizes[..., None]  # [B, P, M]
    place = (start[..., None] + offset).clamp(max=crop.shape[-1] - 1).flatten(1)
    slot = torch.where(filled.flatten(1), order.gather(-1, place), -1)  # [B, P * M]
    vectors = take_tokens(features.float(), slot)
    vectors = (vectors / (vectors.norm(dim=-1, keepdim=True) + EPS)).unflatten(1, (num_crops, widest))
    similarity = vectors @ vectors.transpose(-1, -2)  # [B, P, M, M]
    similarity = similarity.masked_fill(torch.eye(widest, dtype=torch.bool, device=crop.device), 0.0)
    others = (sizes - 1).clamp(min=1)[..., None]
    mean = similarity.sum(-1) / others
    # The release counts a token's own, emptied entry among the squares.
    squares = ((similarity - mean[..., None]) ** 2).masked_fill(~filled[..., None, :], 0.0)
    variance = (squares.sum(-1) / others).masked_fill(~filled, 0.0)  # [B, P, M]
    own = take_tokens(attention[..., None], slot)[..., 0].unflatten(1, (num_crops, widest))
    axes = (1, 2) if shared_scale else (2,)
    count = filled.sum(axes, keepdim=True).clamp(min=1)
    scale = (own.abs().sum(axes, keepdim=True) / count) / (variance.abs().sum(axes, keepdim=True) / count + EPS)
    score = (own + alpha * variance * scale).masked_fill(~filled, 0.0)
    token = torch.zeros_like(attention).scatter_add(-1, slot.clamp(min=0), score.flatten(1))
    return Scores(token, score.sum(-1) / sizes.clamp(min=1))


def split_budget(
    crop_score: Float[Tensor, "B P"], sizes: Int[Tensor, "B P"], k: Int[Tensor, " B"], *, exact: bool
) -> Int[Tensor, "B P"]:
    """Tokens each crop keeps: its share of K rounded down, one more for the heaviest, never more than it has.

    Args:
        exact: Give what a crop cannot take to the heaviest crops that can.
    """
    weight = crop_score / (crop_score.sum(-1, keepdim=True) + EPS)
    quota = (weight * k[:, None]).floor().long()
    ones = torch.minimum(sizes, torch.ones_like(sizes))
    quota = fill_up(quota, quota + ones, weight, k)  # one each, heaviest first
    quota = torch.minimum(quota, sizes)
    return fill_up(quota, sizes, weight, k) if exact else quota
