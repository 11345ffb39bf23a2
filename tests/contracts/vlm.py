"""What the backbone contracts share: methods made for testing, and the stock model's answer with tokens masked."""

from typing import Any

import torch
from torch import Tensor

from diffprune.backbones.prompts import Batch
from diffprune.methods.base import Card, Pruner, Restricted, ScoringPruner, take
from diffprune.model import PrunedVLM
from diffprune.restriction import restrict
from diffprune.types import LMInputs, VisualTokens
from tests import tiny


class EveryOther(Pruner):
    """Keeps k tokens spread over the row, so that gaps lie everywhere."""

    name = "every_other"
    card = Card(idea="for tests")

    def select(self, tokens: VisualTokens, k: Tensor) -> Tensor:
        rows = [torch.arange(int(c)) * int(n) // int(c) for n, c in zip(tokens.counts, k, strict=True)]
        out = torch.full((len(rows), int(k.max())), -1)
        for i, row in enumerate(rows):
            out[i, : len(row)] = row
        return out


class Moved(ScoringPruner):
    """Scores a token by how far its features moved from those of a reference picture."""

    name = "moved"
    card = Card(idea="for tests")

    def __init__(self, reference: Tensor) -> None:
        super().__init__()
        self.reference = reference

    def score(self, tokens: VisualTokens) -> Tensor:
        return (tokens.x - self.reference).norm(dim=-1)


def pruned(family: str, method: str | Pruner = "full", **kwargs: Any) -> PrunedVLM:
    """The tiny model of a family with a method around it."""
    model, processor = tiny.build(family)
    return PrunedVLM(model, processor, method=method, **kwargs)


def stays(batch: Batch, lm: LMInputs) -> Tensor:
    """True at the columns of the unpruned sequence that the language model still sees."""
    mask = torch.zeros_like(batch.features["attention_mask"])
    return mask.scatter(1, lm.source, lm.attention_mask).bool()


def stock_inputs(vlm: PrunedVLM, batch: Batch, attention_mask: Tensor) -> dict[str, Any]:
    """Arguments of the untouched model's own forward: everything there, some tokens masked, positions as they were."""
    return {**batch.features, "attention_mask": attention_mask, "position_ids": vlm.backbone.positions(batch)}


def splice_all(vlm: PrunedVLM, batch: Batch, tokens: VisualTokens) -> LMInputs:
    """The unpruned sequence, projected and spliced by our own path."""
    return vlm.splice(batch, tokens, take(tokens, tokens.everything))


def throttle(vlm: PrunedVLM, batch: Batch, tokens: VisualTokens, **step: Any) -> tuple[LMInputs, Restricted]:
    """What the language model is given in training, and what the method made of the tokens."""
    counts = vlm.counts(tokens, step.pop("keep", None))
    tokens, kept = restrict(vlm.rule, tokens, counts, **{"tau": 1.0, **step})
    return vlm.splice(batch, tokens, kept), kept
