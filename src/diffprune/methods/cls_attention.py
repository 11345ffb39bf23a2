"""FasterVLM: keep the tokens that the encoder's [CLS] token attends to most. No training."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from diffprune.methods.base import Card, ScoringPruner
from diffprune.ops.similarity import cls_attention
from diffprune.registry import METHODS
from diffprune.types import VisualTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ClsAttentionOptions:
    """Args:
    native: As released: what is left is numbered without gaps, where positions are plain. The choice is the same.
    """

    native: bool = False


@METHODS.register("cls_attention")
class ClsAttention(ScoringPruner):
    """Mean over heads of the [CLS] row of the attention of the block whose output is used."""

    card = Card(
        idea="keeps the K tokens that the encoder's [CLS] token attends to most",
        paper="FasterVLM: [CLS] Attention is All You Need for Training-Free Visual Token Pruning",
        year=2024,
        licence="Apache-2.0",
        certainty="release read",
    )
    needs: ClassVar[frozenset[str]] = frozenset({"cls_attention"})
    native_positions: ClassVar[str] = "packed"
    Options: ClassVar[type] = ClsAttentionOptions

    def score(self, tokens: VisualTokens) -> Float[Tensor, "B N"]:
        return cls_attention(tokens, "cls_attention")
