"""DivPrune: keep tokens that are far from one another. No training, no text."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Int
from torch import Tensor

from diffprune.methods.base import Card, Counts, Pruner
from diffprune.ops import cosine_matrix, greedy_max_min, wide_cosines
from diffprune.registry import METHODS
from diffprune.types import VisualTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class DivPruneOptions:
    """Args:
    native: As released: distances in the tokens' own type, where half precision ties; else in float32.
    """

    native: bool = False


@METHODS.register("divprune")
class DivPrune(Pruner):
    """Greedy max-min diversity under the cosine distance of projected tokens."""

    card = Card(
        idea="keeps tokens far from one another: each pick is the one farthest from its nearest picked token",
        paper="DivPrune: Diversity-based Visual Token Pruning for Large Multimodal Models",
        year=2025,
        licence="CC BY-NC 4.0",
        certainty="release read",
    )
    needs: ClassVar[frozenset[str]] = frozenset({"projected"})
    native_positions: ClassVar[str] = "packed"
    Options: ClassVar[type] = DivPruneOptions

    def select(self, tokens: VisualTokens, k: Counts) -> Int[Tensor, "B K"]:
        projected = tokens.projected
        if projected is None:
            raise ValueError("divprune compares VisualTokens.projected, which is None; let the backbone give it")
        distance = 1 - (cosine_matrix(projected) if self.options.native else wide_cosines(projected))
        return greedy_max_min(distance, k, tokens.padding_mask)
