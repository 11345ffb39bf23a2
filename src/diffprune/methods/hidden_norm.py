"""Keep the visual tokens with the largest hidden state before a decoder layer: the plainest method inside the LLM."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Int
from torch import Tensor

from diffprune.inside.budget import check_cut
from diffprune.inside.state import LayerState
from diffprune.methods.base import Card, LayerPruner
from diffprune.ops import hard_topk, take_tokens
from diffprune.registry import METHODS


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenNormOptions:
    """Args:
    layer: The decoder layer (from 0) before which tokens are dropped.
    """

    layer: int = 2

    def __post_init__(self) -> None:
        if self.layer < 0:
            raise ValueError(f"layer={self.layer} is no decoder layer; count from 0")


@METHODS.register("hidden_norm")
class HiddenNorm(LayerPruner):
    """A control for methods that drop at the same place by a cleverer rule."""

    card = Card(idea="drops before one decoder layer, keeps the K visual tokens with the largest hidden-state norm")
    Options: ClassVar[type] = HiddenNormOptions

    def stages(self, num_layers: int, num_visual: int, keep: int) -> dict[int, int]:
        return {check_cut(self.options.layer, num_layers, first=0): min(keep, num_visual)}

    def select_at(self, state: LayerState, k: Int[Tensor, " B"]) -> Int[Tensor, "B K"]:
        norms = take_tokens(state.hidden, state.visual).float().norm(dim=-1)  # [B, M]
        return hard_topk(norms, k, state.visual >= 0)
