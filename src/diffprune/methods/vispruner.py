"""VisPruner: half of the budget for what [CLS] looks at, half for what is unlike the rest. No training."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffprune.methods.base import Card, Counts, Pruner
from diffprune.nn.blocks import zero_padding
from diffprune.ops import cosine_matrix
from diffprune.ops.hard_topk import check_inputs, widest
from diffprune.ops.similarity import cls_attention, descending, pack, raster
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
    native_positions: ClassVar[str] = "packed"
    Options: ClassVar[type] = VisPrunerOptions

    def select(self, tokens: VisualTokens, k: Counts) -> Int[Tensor, "B K"]:
        attention = cls_attention(tokens, "vispruner")
        check_inputs(attention, k, tokens.mask)
        static = isinstance(k, int) and tokens.is_full  # then every row is as long as the others
        budgets = [k] * len(tokens) if isinstance(k, int) else k.tolist()
        important = [int(budget * self.options.important) for budget in budgets]
        wanted = [budget - first for budget, first in zip(budgets, important, strict=True)]
        order = descending(attention, tokens.mask)  # [B, N]
        similarity = cosine_matrix(zero_padding(tokens.x if self.is_native else tokens.x.float(), tokens.padding_mask))
        if static and important:
            best, rest, goal = order[:, : important[0]], order[:, important[0] :], wanted[0]
        else:
            real = tokens.mask.gather(-1, order)
            is_best = torch.arange(order.shape[-1], device=order.device) < order.new_tensor(important)[:, None]
            best = pack(order, real & is_best, max(important, default=0))
            rest, goal = pack(order, real & ~is_best, order.shape[-1] - min(important, default=0)), wanted
        diverse = drop_duplicates(similarity, rest, goal, self.options.step)
        return raster(torch.cat([best, diverse], dim=-1))[:, : widest(k)]


def drop_duplicates(
    similarity: Float[Tensor, "B N N"], listed: Int[Tensor, "B R"], wanted: int | list[int], step: int
) -> Int[Tensor, "B K"]:
    """What is left of each row's list once it is down to the wanted length.

    A round splits the list alternately in two and drops, of the first half, up to `step` tokens: those most similar to
    one of the second half. The first half goes on sorted by that similarity, then the second half as it was.

    Args:
        listed: Tokens, -1 behind the last of a shorter row.
        wanted: Of each row; or of all of them, none of which is shorter: then nothing has to be read.
    """
    if isinstance(wanted, int):
        while (length := listed.shape[-1]) > wanted:
            ranked, second = _halves(similarity, listed)
            listed = torch.cat([ranked[:, min(step, length - wanted, (length + 1) // 2) :], second], dim=-1)
        return listed
    left = (listed >= 0).sum(-1).tolist()
    while True:
        # Never more than there are in the first half; a row that is done drops nothing.
        drops = [min(step, max(0, now - goal), (now + 1) // 2) for now, goal in zip(left, wanted, strict=True)]
        left = [now - gone for now, gone in zip(left, drops, strict=True)]
        if not any(drops):
            return listed[:, : max(left, default=0)]
        ranked, second = _halves(similarity, listed)
        stays = torch.arange(ranked.shape[-1], device=listed.device) >= listed.new_tensor(drops)[:, None]
        after = torch.cat([ranked, second], dim=-1)
        stays = torch.cat([stays, torch.ones_like(second, dtype=torch.bool)], dim=-1)
        listed = pack(after, (after >= 0) & stays, max(left))


def _halves(
    similarity: Float[Tensor, "B N N"], listed: Int[Tensor, "B R"]
) -> tuple[Int[Tensor, "B A"], Int[Tensor, "B C"]]:
    """Every other token of the list, those most similar to one between them first and -1 last; and those between."""
    first, second = listed[:, ::2], listed[:, 1::2]  # one longer, the first, where the list is odd
    rows = torch.arange(len(listed), device=listed.device)[:, None, None]
    near = similarity[rows, first[:, :, None], second[:, None, :]]  # [B, A, C]
    closest = _largest(near.masked_fill((second < 0)[:, None, :], -torch.inf))
    return first.gather(-1, descending(closest.float(), first >= 0)), second


def _largest(values: Float[Tensor, "B A C"]) -> Float[Tensor, "B A"]:
    """The largest of each row; lowest of all where there is none to choose from."""
    return values.amax(-1) if values.shape[-1] else values.new_full(values.shape[:2], torch.finfo(values.dtype).min)
