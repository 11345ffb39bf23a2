"""Keep every token: the unpruned model, through the same path as every method."""

from typing import ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from diffprune.methods.base import Card, Counts, Pruner
from diffprune.ops import hard_topk
from diffprune.registry import METHODS
from diffprune.types import VisualTokens


@METHODS.register("full")
class Full(Pruner):
    card = Card(idea="keeps every token, the upper bound", budget="all tokens, whatever K")
    is_exact: ClassVar[bool] = False

    def select(self, tokens: VisualTokens, k: Counts) -> Int[Tensor, "B K"]:
        return hard_topk(torch.zeros(tokens.mask.shape, device=tokens.x.device), tokens.counts, tokens.mask)
