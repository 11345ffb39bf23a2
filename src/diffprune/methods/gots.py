"""GOTS: keep the tokens that are longest outside the span of those already kept. No training, no text."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Int
from torch import Tensor

from diffprune.methods.base import Card, Counts, Pruner
from diffprune.nn.blocks import zero_padding
from diffprune.ops import greedy_orthogonal
from diffprune.ops.greedy import RANK_TOLERANCE
from diffprune.registry import METHODS
from diffprune.types import VisualTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class GOTSOptions:
    """Args:
    native: As released: past the rank of the features the rounding of their residuals decides; else their norm does. A
        share of N tokens is rounded down, but never to none.
    """

    native: bool = False


@METHODS.register("gots")
class GOTS(Pruner):
    """Column-pivoted QR of the encoder features as they are, so the first pick is the longest token.

    A token made of several patches stands for their mean.
    """

    card = Card(
        idea="keeps tokens that are long and new: each pick has the largest part orthogonal to those before it",
        paper="GOTS: Greedy Orthogonal Token Selection for High-Resolution Vision-Language Models",
        year=2026,
        licence="Apache-2.0 (package metadata, no licence file)",
        certainty="release read",
    )
    native_rounding: ClassVar[str] = "down"
    Options: ClassVar[type] = GOTSOptions

    def select(self, tokens: VisualTokens, k: Counts) -> Int[Tensor, "B K"]:
        x = zero_padding(tokens.x, tokens.padding_mask)
        if tokens.group > 1:
            x = x.float().unflatten(-1, (tokens.group, -1)).mean(-2)
        return greedy_orthogonal(x, k, tokens.padding_mask, tolerance=None if self.options.native else RANK_TOLERANCE)
