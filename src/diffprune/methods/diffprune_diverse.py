"""DiffPrune's scorer, deployed by worth and diversity: of tokens that say the same, one stays.

Top-K keeps neighbours that all score high; here each pick is the token that adds most to the determinant of
`q_i q_j cos(x_i, x_j)`, `q = exp(beta z)` with z the standardised logits. The same weights, nothing more to train.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffprune.methods.base import Card, Choice, Counts, Pruner, check_choices, require_block
from diffprune.nn import BlockSpec, make_scorer, standardise
from diffprune.nn.scorer import GROUPS, TILES, Scorer
from diffprune.ops import greedy_diverse
from diffprune.ops.places import places
from diffprune.registry import METHODS
from diffprune.types import VisualTokens

MOST = 1e6  # of beta and reach: float32 has room for what is made of them


@dataclass(frozen=True, slots=True, kw_only=True)
class DiverseOptions:
    """Args:
    beta: How much the scorer counts beside diversity: 0 leaves diversity alone, much of it is top-K.
    features: What makes two tokens alike: "encoder" (the features that are scored) or "scorer" (its last hidden state).
    reach: How far apart in the picture, in tokens, two tokens can be alike: cosines are multiplied by
        exp(-d^2 / (2 reach^2)); 0: however far.
    scorer, scorer_depth, final_norm, groups, tiles: Of the trained scorer, see `diffprune`.
    """

    beta: float = 2.0
    features: str = "scorer"
    reach: float = 0.0
    scorer: str = "blocks"
    scorer_depth: int = 2
    final_norm: bool = True
    groups: str = "patches"
    tiles: str = "apart"

    def __post_init__(self) -> None:
        check_choices(self, features=("encoder", "scorer"), scorer=("blocks", "bilinear"), groups=GROUPS, tiles=TILES)
        for name in ("beta", "reach"):
            value = getattr(self, name)
            if not 0 <= value <= MOST:
                raise ValueError(f"{name}={value} is not known; give a number from 0 to {MOST:g}")
        if self.features == "scorer" and self.scorer != "blocks":
            raise ValueError(
                f"features='scorer' compares the hidden states of a scorer's blocks, and scorer={self.scorer!r} has "
                "none; say features='encoder'"
            )


@METHODS.register("diffprune-diverse")
class DiffPruneDiverse(Pruner):
    """The scorer that `diffprune` trains, and a greedy choice by worth times diversity instead of its top K.

    A token made of several patches stands for their mean.
    """

    card = Card(
        idea="diffprune's trained scorer; each pick adds most to a determinant of worth and unlikeness",
        paper="DiffPrune: Differentiable Information Throttling for Token Pruning in Vision-Language Models",
        year=2026,
        licence="Apache-2.0",
        certainty="own",
    )
    trained: ClassVar[bool] = True
    deploys: ClassVar[str] = "diffprune"
    Options: ClassVar[type] = DiverseOptions

    def __init__(self, options: Any = None, *, block: BlockSpec | None = None) -> None:
        super().__init__(options, block=block)
        options, spec = self.options, require_block("diffprune-diverse", block)
        self.scorer = make_scorer(
            options.scorer,
            spec,
            depth=options.scorer_depth,
            final_norm=options.final_norm,
            groups=options.groups,
            tiles=options.tiles,
        )

    def score(self, tokens: VisualTokens) -> Float[Tensor, "B N"]:
        """The scorer's logits."""
        return self.scorer(tokens.x, mask=tokens.padding_mask, coords=tokens.coords, segment=tokens.segment)

    def select(self, tokens: VisualTokens, k: Counts) -> Int[Tensor, "B K"]:
        return self.choose(tokens, k).keep

    def choose(self, tokens: VisualTokens, k: Counts) -> Choice:
        hidden = None
        if self.options.features == "scorer" and isinstance(self.scorer, Scorer):
            logits, hidden = self.scorer.read(
                tokens.x, mask=tokens.padding_mask, coords=tokens.coords, segment=tokens.segment
            )
        else:
            logits = self.score(tokens)
        worth, features = self.worth(logits, tokens.padding_mask), self.compared(tokens, hidden)
        keep = greedy_diverse(features, worth, k, tokens.padding_mask, closeness=self.closeness(tokens))
        return Choice(keep, logits)

    def worth(self, logits: Float[Tensor, "B N"], mask: Tensor | None = None) -> Float[Tensor, "B N"]:
        """log q of each token."""
        return self.options.beta * standardise(logits, mask)

    def compared(self, tokens: VisualTokens, hidden: Float[Tensor, "B N W"] | None) -> Float[Tensor, "B N W"]:
        """The features by which two tokens are alike."""
        if hidden is not None:
            return hidden
        if tokens.group == 1:
            return tokens.x
        return tokens.x.float().unflatten(-1, (tokens.group, -1)).mean(-2)

    def closeness(self, tokens: VisualTokens) -> Float[Tensor, "B N N"] | None:
        """How near any two tokens are in the picture, from 0 to 1; None where that does not count."""
        if self.options.reach == 0:
            return None
        where = places(tokens)
        if where is None:
            raise ValueError(
                f"reach={self.options.reach} asks where tokens lie in the picture, and these have neither boxes nor a "
                "grid; leave reach out"
            )
        distance = torch.cdist(where, where, compute_mode="donot_use_mm_for_euclid_dist")
        return torch.exp(-0.5 * (distance / self.options.reach).square())
