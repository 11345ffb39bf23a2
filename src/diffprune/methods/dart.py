"""DART: keep a few pivots and the visual tokens least like each of them, so that no two say the same. No training."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from diffprune.inside.budget import check_cut
from diffprune.inside.reader import at_columns, columns_of
from diffprune.inside.state import LayerState
from diffprune.methods.base import Card, LayerPruner
from diffprune.ops import hard_mask, take_tokens
from diffprune.registry import METHODS


@dataclass(frozen=True, slots=True, kw_only=True)
class DartOptions:
    """Args:
    layer: The decoder layer (from 0) before which tokens are dropped; the keys are those of the layer before it.
    visual_pivots: Visual tokens with the largest keys; they stay.
    text_pivots: Instruction tokens with the largest keys.
    native: As released: every pivot adds int(N * (1 - ratio) / pivots) tokens, so that K is met only nearly
        (up to `visual_pivots` tokens too many), and pivots take their turns in the order of a Python set.
    ratio: Share dropped, of `native` alone. Default: 1 - K / N to three decimals, as the release's examples give it.
    """

    layer: int = 2
    visual_pivots: int = 4
    text_pivots: int = 4
    native: bool = False
    ratio: float | None = None

    def __post_init__(self) -> None:
        if self.visual_pivots < 1 or self.text_pivots < 0:
            raise ValueError(
                f"visual_pivots={self.visual_pivots} and text_pivots={self.text_pivots}: give at least one visual pivot"
            )
        if self.ratio is not None and not self.native:
            raise ValueError(f"ratio={self.ratio} is how the release counts; give keep, or native=True beside it")
        if self.ratio is not None and not 0 <= self.ratio < 1:
            raise ValueError(f"ratio={self.ratio} is no share to drop; give 0 or more and less than 1")


@METHODS.register("dart")
class Dart(LayerPruner):
    """Needs keys and hidden states alone, no attention."""

    card = Card(
        idea="drops before decoder layer 2, keeps pivots with large keys and the visual tokens least like them",
        paper="Stop Looking for Important Tokens in Multimodal Language Models: Duplication Matters More",
        year=2025,
        licence="Apache-2.0",
        certainty="unofficial",
    )
    needs: ClassVar[frozenset[str]] = frozenset({"llm_attention", "text"})
    Options: ClassVar[type] = DartOptions

    @property
    def num_pivots(self) -> int:
        return self.options.visual_pivots + self.options.text_pivots

    def stages(self, num_layers: int, num_visual: int, keep: int) -> dict[int, int]:
        layer = check_cut(self.options.layer, num_layers)
        if keep >= num_visual or not self.options.native:
            return {layer: min(keep, num_visual)}
        if self.options.ratio is None and keep < self.options.visual_pivots:
            raise ValueError(
                f"keep={keep} is less than the {self.options.visual_pivots} visual pivots that native DART always "
                f"keeps; keep at least {self.options.visual_pivots}, or lower visual_pivots"
            )
        picks = self.picks_by_ratio(num_visual, keep)
        return {layer: min(num_visual, self.options.visual_pivots + self.num_pivots * picks)}

    def picks_by_ratio(self, num_visual: int, keep: int) -> int:
        """Tokens each pivot adds in the release, where 0.889 is what stands for 64 of 576: 7 and not 8."""
        ratio = round(1 - keep / num_visual, 3) if self.options.ratio is None else self.options.ratio
        return int(num_visual * (1 - ratio) / self.num_pivots)

    def native_picks(self, num_visual: int, k: int) -> int:
        """Tokens each pivot adds, from what `stages` makes of K; a number it never comes to is taken for K itself."""
        added = k - self.options.visual_pivots
        if k >= num_visual:
            return num_visual  # a prompt that keeps all beside one that does not
        return self.picks_by_ratio(num_visual, k) if added % self.num_pivots else added // self.num_pivots

    def select_at(self, state: LayerState, k: Int[Tensor, " B"]) -> Int[Tensor, "B K"]:
        options, real = self.options, state.visual >= 0
        size = state.keys().float().abs().sum((1, 3))  # [B, T], L1 norm over heads and channels
        own = hard_mask(at_columns(size, state.visual), k.clamp(max=options.visual_pivots), real)  # [B, M]
        asking = state.instruction
        text = hard_mask(size, asking.sum(-1).clamp(max=options.text_pivots), asking)  # [B, T]
        order = set_order if options.native else largest_first
        pivots = order(own, text, state.visual, size)  # [B, P] columns
        num_pivots = (pivots >= 0).sum(-1)
        if options.native:
            counts = zip(real.sum(-1).tolist(), k.tolist(), strict=True)
            each = torch.tensor([self.native_picks(*count) for count in counts], device=k.device)
            picks = each[:, None].expand_as(pivots)
        else:
            picks = share_out(k - own.sum(-1), num_pivots, pivots.shape[1])
        features = F.normalize(state.normed().float(), dim=-1)
        kept = own | least_alike(
            take_tokens(features, state.visual), take_tokens(features, pivots), picks * (pivots >= 0), real & ~own
        )
        return columns_of(kept)


def least_alike(
    tokens: Float[Tensor, "B M L"],
    pivots: Float[Tensor, "B P L"],
    picks: Int[Tensor, "B P"],
    candidates: Bool[Tensor, "B M"],
) -> Bool[Tensor, "B M"]:
    """True at the tokens picked: pivot after pivot takes its number of candidates with the lowest cosine to it.

    What one has taken, the next cannot; where candidates run out, it takes what is left. Features have unit length.
    """
    picked = torch.zeros_like(candidates)
    for index in range(pivots.shape[1]):
        likeness = (tokens * pivots[:, index : index + 1]).sum(-1)  # [B, M]
        free = candidates & ~picked
        picked = picked | hard_mask(-likeness, picks[:, index].minimum(free.sum(-1)), free)
    return picked


def share_out(total: Int[Tensor, " B"], among: Int[Tensor, " B"], width: int) -> Int[Tensor, "B P"]:
    """Equal whole parts for the first `among` of `width` places; what remains goes to the first ones, one each."""
    place = torch.arange(width, device=total.device)
    part, rest = total // among.clamp_min(1), total % among.clamp_min(1)
    return (part[:, None] + (place < rest[:, None])) * (place < among[:, None])


def largest_first(
    own: Bool[Tensor, "B M"], text: Bool[Tensor, "B T"], visual: Int[Tensor, "B M"], size: Float[Tensor, "B T"]
) -> Int[Tensor, "B P"]:
    """Columns of the pivots: visual ones before text ones, each from the largest key to the smallest, then -1."""
    rows = []
    for row in range(len(visual)):
        groups = (visual[row][own[row]], text[row].nonzero()[:, 0])
        rows.append(torch.cat([group[size[row, group].sort(descending=True, stable=True).indices] for group in groups]))
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)


def set_order(
    own: Bool[Tensor, "B M"], text: Bool[Tensor, "B T"], visual: Int[Tensor, "B M"], size: Float[Tensor, "B T"]
) -> Int[Tensor, "B P"]:
    """The pivots' columns in the order in which a Python set of them is walked, which is the release's."""
    rows = [
        torch.tensor(list(set(columns)), dtype=torch.int64, device=visual.device)
        for columns in ([c for c in row.tolist() if c >= 0] for row in largest_first(own, text, visual, size))
    ]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
