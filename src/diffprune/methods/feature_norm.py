"""Keep the tokens with the largest feature norm. No training."""

from jaxtyping import Float
from torch import Tensor

from diffprune.methods.base import Card, ScoringPruner
from diffprune.registry import METHODS
from diffprune.types import VisualTokens


@METHODS.register("feature_norm")
class FeatureNorm(ScoringPruner):
    card = Card(idea="keeps the K tokens whose encoder features have the largest norm")

    def score(self, tokens: VisualTokens) -> Float[Tensor, "B N"]:
        return tokens.x.float().norm(dim=-1).masked_fill(~tokens.mask, 0.0)
