"""FastV: after a few decoder layers, keep the visual tokens that the last prompt token attends to most. No training."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from diffprune.inside.budget import average_stages, check_cut
from diffprune.inside.state import LayerState
from diffprune.methods.base import Card, ScoringLayerPruner, check_choices
from diffprune.registry import METHODS


@dataclass(frozen=True, slots=True, kw_only=True)
class FastVOptions:
    """Args:
    layer: The decoder layer (from 0) before which tokens are dropped; the attention is that of the layer before it.
    budget: "exact" leaves K tokens at the cut; "average" makes K the mean over all layers.
    """

    layer: int = 2
    budget: str = "exact"

    def __post_init__(self) -> None:
        check_choices(self, budget=("exact", "average"))


@METHODS.register("fastv")
class FastV(ScoringLayerPruner):
    """One cut, ranked by one row of one attention map, head mean."""

    card = Card(
        idea="drops before decoder layer 2, keeps the K visual tokens that the last prompt token attends to most",
        paper="An Image is Worth 1/2 Tokens After Layer 2: Plug-and-Play Inference Acceleration for LVLMs",
        year=2024,
        licence="no licence file",
        certainty="release read",
        budget="exact K after the cut, or K as the mean over layers",
    )
    needs: ClassVar[frozenset[str]] = frozenset({"llm_attention"})
    Options: ClassVar[type] = FastVOptions

    def stages(self, num_layers: int, num_visual: int, keep: int) -> dict[int, int]:
        layer = check_cut(self.options.layer, num_layers)
        if self.options.budget == "average":
            return average_stages([layer], num_layers, num_visual, keep)
        return {layer: min(keep, num_visual)}

    def score_at(self, state: LayerState) -> Float[Tensor, "B M"]:
        return state.last_attention()
