"""Where methods inside the language model drop visual tokens, and what a prompt has left of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffprune.backbones.base import Backbone
from diffprune.inside.state import LayerState
from diffprune.methods.base import ScoringLayerPruner
from diffprune.types import Budget


@dataclass(frozen=True, kw_only=True)
class Cuts:
    """Where a method inside the language model drops tokens, and by which scores.

    Args:
        num_visual: Visual tokens of every prompt, side by side.
        left: For each layer with a cut, how many of them go on from there.
        score: The method's ranking of the visual tokens that are left, from what it sees before a layer.
        language_model: The stock layers, whose projections the scores are computed with.
    """

    num_visual: int
    left: dict[int, int]
    score: Callable[[LayerState], Float[Tensor, "B M"]]
    language_model: Any

    def widths(self, length: int, num_layers: int) -> list[int]:
        """Columns of a prompt in each layer."""
        widths, now = [], length
        for layer in range(num_layers):
            now = length - self.num_visual + self.left[layer] if layer in self.left else now
            widths.append(now)
        return widths


def cuts_of(method: Any, backbone: Backbone, num_visual: int, keep: int) -> Cuts | None:
    """Where the method drops tokens of a prompt with so many; None for a method before the language model."""
    if not method.is_inside:
        return None
    if not isinstance(method, ScoringLayerPruner) or method.positions != "original":
        raise ValueError(
            f"the fast path cannot run {method.name!r} as it is set: of the methods inside the language model it runs "
            "those that score every token, with original positions; generate() works without it"
        )
    if backbone.newline is not None:
        raise ValueError(
            f"the fast path cannot run {method.name!r} on {backbone.family}, whose visual tokens have newlines between "
            "them; generate() works without it"
        )
    left = method.stages(len(backbone.language_model.layers), num_visual, keep)
    return Cuts(num_visual=num_visual, left=left, score=method.score_at, language_model=backbone.language_model)


def count_before_layers(method: Any, budget: Budget, num_visual: int) -> int:
    """Visual tokens a prompt has left before its first decoder layer."""
    if method.name == "full" or method.is_inside:
        return num_visual
    return budget.count(num_visual)


def columns_after_cut(
    first: Int[Tensor, " B"], keep: Int[Tensor, "B K"], visual: int, width: int
) -> Int[Tensor, "B T"]:
    """Columns that go on: all but the visual ones from `first` on that are not in `keep`."""
    num_kept = keep.shape[1]
    column = torch.arange(width - visual + num_kept, device=keep.device)
    rank = column - first[:, None]
    chosen = first[:, None] + keep.gather(1, rank.clamp(0, num_kept - 1))
    behind = torch.where(rank < 0, column, column + visual - num_kept)
    return torch.where((rank >= 0) & (rank < num_kept), chosen, behind)
