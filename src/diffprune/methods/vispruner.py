"""VisPruner: half of the budget for what [CLS] looks at, half for what is unlike the rest. No training."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffprune.methods.base import Card, Pruner
from diffprune.methods.similarity import cls_attention, cosine, descending, pack, raster
from diffprune.ops.hard_topk import check_inputs
from diffprune.registry import METHODS
from diffprune.types import VisualTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class VisPrunerOptions:
    """Args:
    important: Share of K that goes to the tokens with the most attention; the rest goes to diverse ones.
    step: Tokens dropped in one round of matching.
    native: Compare features in the precision they come in, as the release does, instead of float32.
    """

    important: float = 0.5
    step: int = 8
    native: bool = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.important <= 1.0:
            raise ValueError(f"important={self.important} is no share; give one from 0.0 to 1.0")
        if self.step < 1:
            raise ValueError(f"step={self.step} drops nothing; give at least 1")


@METHODS.register("vispruner")
class VisPruner(Pruner):
    """Rounds of bipartite matching: of every other token, those most similar to a token between them go."""

    card = Card(
        idea="keeps the tokens [CLS] attends to most, and of the rest those that have no near duplicate",
        paper="Beyond Text-Visual Attention: Exploiting Visual Cues for Effective Token Pruning in VLMs (VisPruner)",
        year=2025,
        licence="Apache-2.0",
        certainty="release read",
    )
    needs: ClassVar[frozenset[str]] = frozenset({"cls_attention"})
    Options: ClassVar[type] = VisPrunerOptions

    def select(self, tokens: VisualTokens, k: Int[Tensor, " B"]) -> Int[Tensor, "B K"]:
        return self._choose(tokens, k, native=self.options.native)

    def select_native(self, tokens: VisualTokens, k: Int[Tensor, " B"]) -> Int[Tensor, "B K"]:
        """What the release keeps, in its order, which is raster order."""
        return self._choose(tokens, k, native=True)

    def _choose(self, tokens: VisualTokens, k: Int[Tensor, " B"], *, native: bool) -> Int[Tensor, "B K"]:
        attention = cls_attention(tokens, "vispruner")
        check_inputs(attention, k, tokens.mask)
        important = [int(budget * self.options.important) for budget in k.tolist()]
        order = descending(attention, tokens.mask)  # [B, N]
        real = tokens.mask.gather(-1, order)
        head = torch.arange(order.shape[-1], device=order.device) < k.new_tensor(important)[:, None]
        similarity = cosine(tokens.x if native else tokens.x.float(), tokens.mask)
        rest = pack(order, real & ~head)
        wanted = [budget - first for budget, first in zip(k.tolist(), important, strict=True)]
        diverse = drop_duplicates(similarity, rest, wanted, self.options.step)
        return raster(torch.cat([pack(order, real & head), diverse], dim=-1))[:, : int(k.max()) if len(k) else 0]


def drop_duplicates(
    similarity: Float[Tensor, "B N N"], listed: Int[Tensor, "B R"], wanted: list[int], step: int
) -> Int[Tensor, "B K"]:
    """What is left of each row's list once it is down to the wanted length.

    A round splits the list alternately in two and drops, of the first half, up to `step` tokens: those most similar to
    one of the second half. The first half goes on sorted by that similarity, then the second half as it was.
    """
    left = (listed >= 0).sum(-1).tolist()
    rows = torch.arange(len(listed), device=listed.device)[:, None, None]
    while True:
        # Never more than there are in the first half; a row that is done drops nothing.
        drops = [min(step, max(0, now - goal), (now + 1) // 2) for now, goal in zip(left, wanted, strict=True)]
        if not any(drops):
            return listed
        first, second = listed[:, ::2], listed[:, 1::2]  # one longer, the first, where the list is odd
        near = similarity[rows, first[:, :, None], second[:, None, :]]  # [B, A, C]
        closest = _largest(near.masked_fill((second < 0)[:, None, :], -torch.inf))
        order = descending(closest.float(), first >= 0)
        ranked = first.gather(-1, order)
        stays = torch.arange(ranked.shape[-1], device=listed.device) >= listed.new_tensor(drops)[:, None]
        after = torch.cat([ranked, second], dim=-1)
        listed = pack(after, (after >= 0) & torch.cat([stays, torch.ones_like(second, dtype=torch.bool)], dim=-1))
        left = [now - gone for now, gone in zip(left, drops, strict=True)]


def _largest(values: Float[Tensor, "B A C"]) -> Float[Tensor, "B A"]:
    """The largest of each row; lowest of all where there is none to choose from."""
    return values.amax(-1) if values.shape[-1] else values.new_full(values.shape[:2], torch.finfo(values.dtype).min)
