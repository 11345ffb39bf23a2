"""What a validation tells of a run that goes wrong, in one sentence each: asked once the temperature has settled.

A run can go wrong in ways that its loss does not show: tokens are throttled well and dropped badly, or all tokens score
alike, or the ranking is upside down, so that the tokens it would drop serve better than those it would keep.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from diffprune.methods.base import ScoringPruner
from diffprune.types import VisualTokens

FLAT = 1e-3  # deviation of a picture's logits below which, at any temperature of ours, all tokens weigh alike
CLEARLY = 0.02  # share of the loss by which the ranking turned around must be better
GIVEN_BACK = 0.5  # share of what throttled tokens gain over random choice that dropping may lose again


@contextmanager
def reversed_scores(method: ScoringPruner) -> Iterator[list[Tensor]]:
    """Inside, the method keeps the tokens it would drop first; given is the deviation of every picture's logits."""
    score, deviations = method.score, []

    def turned(tokens: VisualTokens) -> Tensor:
        logits, real = score(tokens), tokens.mask
        count = real.sum(-1).clamp_min(1)
        mean = torch.where(real, logits, 0.0).sum(-1) / count
        away = torch.where(real, logits - mean.unsqueeze(-1), 0.0)
        deviations.append((away.square().sum(-1) / count).sqrt().detach().double().cpu())
        return -logits

    method.score = turned  # type: ignore[method-assign]  # of this instance alone
    try:
        yield deviations
    finally:
        del method.score  # the class's own again


def signs(record: dict[str, Any], *, whole: bool = False, throttles: bool = True) -> dict[str, str]:
    """What is wrong by a validation's record, as sentences by their keys; empty where nothing is.

    Args:
        record: Losses `hard`, `throttled` and `random`, and where the method ranks tokens `reversed`, the hard loss
            with its ranking upside down, and `deviation` of its logits.
        whole: Whether the budget keeps all tokens of the held-out pictures.
        throttles: Whether the throttled loss is of answers from weakened tokens, so that dropping compares with it.
    """
    hard, throttled, random = record["hard"], record["throttled"], record["random"]
    turned, deviation = record.get("reversed"), record.get("deviation")
    if whole:
        return {
            "whole": (
                "the budget keeps every token of the held-out pictures, so there is nothing to choose and nothing to "
                "learn; start again with a smaller budget.keep or budget.range"
            )
        }
    found = {}
    if deviation is not None and deviation < FLAT:
        found["flat"] = (
            f"the scorer tells no tokens apart (its logits deviate by {deviation:.1e} within a picture); raise "
            "optim.lr, or give it more steps"
        )
    elif turned is not None and turned < (1 - CLEARLY) * hard:
        found["reversed"] = (
            f"the ranking is upside down: the tokens it drops first give a loss of {turned:.4f}, those it keeps "
            f"{hard:.4f}; start again with a lower tau.start, or another seed"
        )
    if hard >= random:
        found["random"] = (
            f"dropping by this ranking (loss {hard:.4f}) is no better than random choice ({random:.4f}); give it more "
            "steps, or another seed"
        )
    elif throttles and hard - throttled > GIVEN_BACK * (random - throttled):
        found["gap"] = (
            f"the scorer is good throttled (loss {throttled:.4f}) and loses most of that when tokens are dropped "
            f"({hard:.4f}, random choice {random:.4f}); lower tau.end, or take recipe=bridge"
        )
    return found
