"""ATP-LLaVA: learned thresholds on a redundancy score and on a lattice of places. After an unofficial sketch.

    S_red = (S_self + S_cross) / 2      S_sp = 1 - 3 / stride^2 on a lattice, 0 between      theta_r, theta_s in (0, 1)
TRAINING    soft mask max(sigmoid(10 (S_red - theta_r)), sigmoid(10 (S_sp - theta_s))) of token j; the base is frozen
INFERENCE   keep the K tokens farthest above either threshold, or (adaptive) all that are above one
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from diffprune.inside.budget import RELEASE_DEPTH, average_stages, check_cut, geometric_stages, scale_layers
from diffprune.inside.reader import at_columns, columns_of
from diffprune.inside.state import Decision, LayerState
from diffprune.methods.base import Card, TrainableLayerPruner, check_choices
from diffprune.nn import BlockSpec
from diffprune.nn.language import LanguageSpec
from diffprune.nn.scorer import exact_linear
from diffprune.ops import hard_topk
from diffprune.ops.noise import Generators
from diffprune.ops.places import grid_places
from diffprune.registry import METHODS

LAYERS = (4, 14, 24)  # of 32
ROWS = 32  # of an attention map that are made at once


@dataclass(frozen=True, slots=True, kw_only=True)
class ATPLLaVAOptions:
    """Args:
    layers: Decoder layers (from 0) before which tokens are dropped. Default: 4, 14 and 24 of 32, at the same depth.
    budget: "exact" leaves K tokens after the last cut, every cut the same share of what is there; "average" makes K the
        mean over all layers; "adaptive" keeps what is above a threshold, at least 1 and at most as many as "exact".
        Default: "exact", and "adaptive" with `native`.
    strides: Of the lattices that the spatial score is made of; a coarser one scores higher.
    slope: Lambda of the spatial score, 1 - lambda / stride^2.
    sharpness: Of the soft masks in training.
    depth_weight: Of the tokens kept, each counted by the depth of its cut.
    target_weight: Of the distance of the tokens kept from those that "exact" would leave.
    native: As sketched: the thresholds decide how many stay, up to K.
    """

    layers: Sequence[int] | None = None
    budget: str | None = None
    strides: Sequence[int] = (2, 3, 4, 6, 8)
    slope: float = 3.0
    sharpness: float = 10.0
    depth_weight: float = 0.05
    target_weight: float = 0.2
    native: bool = False

    def __post_init__(self) -> None:
        if self.budget is None:
            object.__setattr__(self, "budget", "adaptive" if self.native else "exact")
        check_choices(self, budget=("exact", "average", "adaptive"))
        for name in ("layers", "strides"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, tuple(value))  # a list, where the options come from a file
        layers = LAYERS if self.layers is None else self.layers
        if not layers or list(layers) != sorted(set(layers)):
            raise ValueError(f"layers={layers} do not rise; name each layer once, the first one first")
        if any(stride < 1 for stride in self.strides):
            raise ValueError(f"strides={self.strides} has one below 1; a lattice of stride 1 holds every token")
        if self.sharpness <= 0:
            raise ValueError(f"sharpness={self.sharpness} makes no mask; give a number above 0")


class Scores(NamedTuple):
    """What the thresholds of a cut are laid on."""

    redundancy: Float[Tensor, "B M"]
    spatial: Float[Tensor, "B M"]
    thresholds: Float[Tensor, "B 2"]

    @property
    def above(self) -> tuple[Float[Tensor, "B M"], Float[Tensor, "B M"]]:
        """How far each token is above either threshold."""
        redundancy, spatial = self.thresholds.split(1, dim=-1)
        return self.redundancy - redundancy, self.spatial - spatial


@METHODS.register("atp_llava")
class ATPLLaVA(TrainableLayerPruner):
    """Two numbers of a prompt, its mean scores, decide its thresholds at each cut."""

    card = Card(
        idea="drops in three stages what is below two learned thresholds, one on attention and one on a lattice",
        paper="ATP-LLaVA: Adaptive Token Pruning for Large Vision Language Models",
        year=2024,
        licence="no official code",
        certainty="unofficial",
        budget="exact K after the last stage, K as the mean over layers, or adaptive up to K; frozen-base variant",
    )
    needs: ClassVar[frozenset[str]] = frozenset({"llm_attention"})
    Options: ClassVar[type] = ATPLLaVAOptions

    def __init__(
        self, options: Any = None, *, block: BlockSpec | None = None, language: LanguageSpec | None = None
    ) -> None:
        super().__init__(options, block=block, language=language)
        self.thresholds = nn.ModuleList(Thresholds() for _ in self.cuts(self.language.layers))

    def cuts(self, num_layers: int) -> list[int]:
        """The layers before which tokens are dropped; a shallow model may have fewer of them."""
        if self.options.layers is not None:
            return [check_cut(layer, num_layers) for layer in self.options.layers]
        return sorted({check_cut(max(1, layer), num_layers) for layer in scale_layers(LAYERS, num_layers)})

    def stages(self, num_layers: int, num_visual: int, keep: int) -> dict[int, int]:
        cuts = self.cuts(num_layers)
        if self.options.budget == "average":
            return average_stages(cuts, num_layers, num_visual, keep)
        return geometric_stages(cuts, num_visual, keep)

    def scores(self, state: LayerState) -> Scores:
        """Both scores of every visual token, and the prompt's thresholds at this cut."""
        valid = state.visual >= 0
        counted = valid if state.soft_mask is None else valid & (state.soft_mask > 0.5)
        self_score = at_columns(state.mean_logits(state.visual), state.visual)
        cross_score = at_columns(text_attention(state), state.visual)
        both = [to_unit(score, counted) for score in (self_score, cross_score)]
        means = [(score * counted).sum(-1) / counted.sum(-1).clamp(min=1) for score in both]
        cut = self.cuts(self.language.layers).index(state.layer)
        return Scores(
            redundancy=(both[0] + both[1]) / 2,
            spatial=lattice_score(grid_places(state.origin), self.options.strides, self.options.slope),
            thresholds=self.thresholds[cut](torch.stack(means, dim=-1)),
        )

    def select_at(self, state: LayerState, k: Int[Tensor, " B"]) -> Int[Tensor, "B K"]:
        valid = state.visual >= 0
        margin = torch.maximum(*self.scores(state).above)
        if self.options.budget == "adaptive":
            passing = ((margin > 0) & valid).sum(-1)
            k = torch.where(k < valid.sum(-1), passing.clamp(min=1).minimum(k), k)
        return hard_topk(margin, k, valid)

    def decide(
        self, state: LayerState, k: Int[Tensor, " B"], *, tau: float | Tensor, generator: Generators = None
    ) -> Decision:
        options, valid = self.options, state.visual >= 0
        above = self.scores(state).above
        reached = torch.maximum(*((options.sharpness * margin).sigmoid() for margin in above))
        soft_mask = reached.masked_fill(~valid, 0.0)
        left = soft_mask if state.soft_mask is None else soft_mask * state.soft_mask
        count = valid.sum(-1).clamp(min=1)
        share = (left * valid).sum(-1) / count  # of the tokens, after this cut
        depth = state.layer * RELEASE_DEPTH / self.language.layers
        distance = (share - k / count).abs() / len(self.thresholds)
        penalty = options.depth_weight * depth * share + options.target_weight * distance
        return Decision(soft_mask, torch.maximum(*above), penalty)


class Thresholds(nn.Module):
    """theta_r and theta_s in (0, 1) from the mean scores of a prompt: z = W means, sigmoid(heads(z))."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.enter = nn.Linear(2, width)
        self.heads = nn.Linear(width, 2)

    def forward(self, means: Float[Tensor, "B 2"]) -> Float[Tensor, "B 2"]:
        return exact_linear(exact_linear(means, self.enter), self.heads).sigmoid()


def text_attention(state: LayerState) -> Float[Tensor, "B T"]:
    """Attention that each column gets from the instruction, mean over its tokens and heads; never all rows at once."""
    text = columns_of(state.instruction)
    rows = [state.attention(some).mean(1).sum(1) for some in text.split(ROWS, dim=1)]
    return torch.stack(rows).sum(0) / (text >= 0).sum(-1, keepdim=True).clamp(min=1)


def to_unit(score: Float[Tensor, "B M"], counted: Bool[Tensor, "B M"]) -> Float[Tensor, "B M"]:
    """The scores stretched so that the smallest of the tokens that count is 0 and the largest 1."""
    low = score.masked_fill(~counted, torch.inf).amin(-1, keepdim=True)
    high = score.masked_fill(~counted, -torch.inf).amax(-1, keepdim=True)
    span = (high - low).nan_to_num(1.0, 1.0, 1.0).clamp(min=1e-12)
    return ((score - low.nan_to_num(0.0, 0.0, 0.0)) / span).clamp(0.0, 1.0)


def lattice_score(places: Int[Tensor, "B M 2"], strides: Sequence[int], slope: float) -> Float[Tensor, "B M"]:
    """1 - slope / stride^2 at tokens of the coarsest lattice they stand on, and 0 at those that stand on none."""
    score = torch.zeros(places.shape[:2], device=places.device)
    for stride in strides:
        is_on = (places % stride == stride // 2).all(-1)  # in the middle of its cell
        score = torch.where(is_on, score.clamp(min=1 - slope / stride**2), score)
    return score
