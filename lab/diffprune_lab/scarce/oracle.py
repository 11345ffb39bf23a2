"""A pruner that knows what is drawn: every unit of every item its best token, then its second best, then the ground."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffprune.methods.base import Card, ScoringPruner
from diffprune.types import VisualTokens
from diffprune_lab.scarce import tokens as units
from diffprune_lab.scarce.draw import pack, render
from diffprune_lab.scarce.world import Scene
from diffprune_lab.scenes.oracle import GOLDEN


def rank_tokens(pixels: Int[Tensor, "B N U"]) -> Float[Tensor, "B N"]:
    """0 for the best token of each unit, -1 for the second best; tokens of no unit come last, spread over the picture.

    The inside of a thing and the plate of a sign take half as many as heads, bases, badges and letters.
    """
    tokens = pixels.shape[1]
    number = torch.arange(tokens, device=pixels.device)
    shown = pixels[:, :, 1:]  # [B, N, U - 1]
    rank = torch.argsort(shown, dim=1, descending=True, stable=True).argsort(1).float()
    unit = torch.arange(1, units.UNITS, device=pixels.device)
    slow = (unit == units.PLATE) | ((unit < units.FIRST_LETTER) & ((unit - 1) % 4 == units.REST))
    rank = torch.where(slow, 2 * rank + 1, rank)
    best = rank.neg().masked_fill(shown == 0, -torch.inf).amax(-1)
    return torch.maximum(best, -1e4 - (number * GOLDEN) % 1)


class Oracle(ScoringPruner):
    """Covers the items evenly, then the ground.

    Args:
        ranks: One row of scores for each picture, under the number made from its pixels (`VisualTokens.seeds`).
    """

    name: ClassVar[str] = "oracle"
    card: ClassVar[Card] = Card(idea="Knows what is drawn where; the bound for any pruner.")

    def __init__(self, ranks: Mapping[int, Float[Tensor, " N"]]) -> None:
        super().__init__()
        self.ranks = dict(ranks)

    @classmethod
    def of(cls, seeds: Sequence[int], scenes: Sequence[Scene], device: torch.device | str = "cpu") -> "Oracle":
        """From the numbers of the pictures and their scenes, which are drawn on the device."""
        ranks: dict[int, Tensor] = {}
        for start in range(0, len(scenes), 64):
            rows = slice(start, start + 64)
            pixels = units.unit_pixels(render(pack(scenes[rows]), device)[1])
            ranks.update(zip(seeds[rows], rank_tokens(pixels), strict=True))
        return cls(ranks)

    def score(self, tokens: VisualTokens) -> Float[Tensor, "B N"]:
        if tokens.seeds is None or any(seed not in self.ranks for seed in tokens.seeds):
            raise ValueError("the oracle knows nothing of these pictures; make it with Oracle.of of their scenes")
        return torch.stack([self.ranks[seed] for seed in tokens.seeds]).to(tokens.x.device)
