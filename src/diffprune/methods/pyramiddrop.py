"""PyramidDrop: fewer visual tokens stage by stage, ranked by the last instruction token's attention. No training."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from diffprune.inside.budget import average_stages, check_cut, scale_layers
from diffprune.inside.state import LayerState
from diffprune.methods.base import Card, ScoringLayerPruner, check_choices
from diffprune.registry import METHODS

LAYERS = (8, 16, 24)  # of 32


@dataclass(frozen=True, slots=True, kw_only=True)
class PyramidDropOptions:
    """Args:
    layers: Decoder layers (from 0) before which tokens are dropped. Default: a quarter, half and three quarters of the
        model's depth, which is 8, 16 and 24 of 32.
    ratios: Share of all visual tokens that each stage holds.
    budget: "exact" puts K in place of the last stage, and no stage holds fewer; "average" makes K the mean over all
        layers, every stage the same share of the one before.
    native: As released: what is left is numbered anew after each cut. The release's own ratios are those of K = N / 8.
    """

    layers: Sequence[int] | None = None
    ratios: Sequence[float] = (0.5, 0.25, 0.125)
    budget: str = "exact"
    native: bool = False

    def __post_init__(self) -> None:
        check_choices(self, budget=("exact", "average"))
        for name in ("layers", "ratios"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, tuple(value))  # a list, where the options come from a file
        layers = LAYERS if self.layers is None else self.layers
        if len(layers) != len(self.ratios) or not layers:
            raise ValueError(
                f"layers={layers} and ratios={self.ratios} differ in number; give one ratio for each layer"
            )
        if list(layers) != sorted(set(layers)):
            raise ValueError(f"layers={layers} do not rise; name each layer once, the first one first")
        if list(self.ratios) != sorted(self.ratios, reverse=True) or not 0 < self.ratios[-1] <= self.ratios[0] <= 1:
            raise ValueError(f"ratios={self.ratios} do not fall from at most 1 to above 0; a dropped token stays away")


@METHODS.register("pyramiddrop")
class PyramidDrop(ScoringLayerPruner):
    """The ranking uses the layer about to run: its norm, its query and its keys."""

    card = Card(
        idea="drops in three stages, keeps the visual tokens that the last instruction token attends to most",
        paper="PyramidDrop: Accelerating Your Large Vision-Language Models via Pyramid Visual Redundancy Reduction",
        year=2024,
        licence="MIT",
        certainty="release read",
        budget="exact K after the last stage, or K as the mean over layers",
    )
    needs: ClassVar[frozenset[str]] = frozenset({"llm_attention"})
    native_positions: ClassVar[str] = "packed"
    Options: ClassVar[type] = PyramidDropOptions

    def cuts(self, num_layers: int) -> list[int]:
        """The layers before which tokens are dropped; a shallow model may have fewer of them than stages."""
        if self.options.layers is not None:
            return [check_cut(layer, num_layers) for layer in self.options.layers]
        return [check_cut(max(1, layer), num_layers) for layer in scale_layers(LAYERS, num_layers)]

    def stages(self, num_layers: int, num_visual: int, keep: int) -> dict[int, int]:
        options, cuts = self.options, self.cuts(num_layers)
        if keep >= num_visual:
            return dict.fromkeys(cuts, num_visual)
        if options.budget == "average":
            return average_stages(sorted(set(cuts)), num_layers, num_visual, keep)
        by_ratio = [int(num_visual * ratio) for ratio in options.ratios[:-1]]
        counts = [max(keep, count) for count in by_ratio] + [keep]
        return dict(zip(cuts, counts, strict=True))

    def score_at(self, state: LayerState) -> Float[Tensor, "B M"]:
        return state.last_attention(state.layer)
