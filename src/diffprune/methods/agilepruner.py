"""AgilePruner: walk tokens by attention and skip near duplicates, more of them the richer the image. No training."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffprune.methods.base import Card, Counts, Pruner
from diffprune.nn.blocks import zero_padding
from diffprune.ops import cosine_matrix
from diffprune.ops.hard_topk import check_inputs, per_row, widest
from diffprune.ops.similarity import cls_attention, descending, raster, walk
from diffprune.registry import METHODS
from diffprune.types import VisualTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class AgilePrunerOptions:
    """Args:
    average_rank: Effective rank of a usual image, against which an image's own is measured. The authors' number is
        not published; default: half of the largest rank the features can have.
    step: Growth of the threshold from one kept token to the next, for an image of average rank.
    max_distance: The threshold's ceiling (ours: the authors' is not published).
    """

    average_rank: float | None = None
    step: float = 0.01
    max_distance: float = 0.5

    def __post_init__(self) -> None:
        if self.average_rank is not None and self.average_rank <= 0:
            raise ValueError(f"average_rank={self.average_rank} is no rank; give a positive one, or leave it out")
        if self.step < 0:
            raise ValueError(f"step={self.step} lets the threshold fall; give 0 or more")
        if not 0 <= self.max_distance <= 2:
            raise ValueError(f"max_distance={self.max_distance} is no cosine distance; give one from 0 to 2")


@METHODS.register("agilepruner")
class AgilePruner(Pruner):
    """The i-th kept token strikes out those nearer than `min(i * step * erank / average_rank, max_distance)`.

    Where fewer than K survive, the struck-out tokens with the most attention fill up.
    """

    card = Card(
        idea="walks tokens by attention, skips near duplicates, the more of them the larger the image's effective rank",
        paper="AgilePruner: An Empirical Study of Attention and Diversity for Adaptive Visual Token Pruning",
        year=2026,
        licence="Apache-2.0 (no code released)",
        certainty="formula",
    )
    needs: ClassVar[frozenset[str]] = frozenset({"cls_attention"})
    Options: ClassVar[type] = AgilePrunerOptions

    def select(self, tokens: VisualTokens, k: Counts) -> Int[Tensor, "B K"]:
        attention, mask = cls_attention(tokens, "agilepruner"), tokens.mask
        check_inputs(attention, k, mask)
        order = descending(attention, mask)
        real = mask.gather(-1, order)
        growth = self._growth(tokens)[:, None]  # [B, 1]
        ceiling = self.options.max_distance
        rows = torch.arange(len(order), device=order.device)[:, None, None]
        visited = cosine_matrix(zero_padding(tokens.x.float(), tokens.padding_mask))[
            rows, order[:, :, None], order[:, None, :]
        ]
        alive = walk(visited, real, lambda number: 1 - (number * growth).clamp(max=ceiling).float())
        # Survivors in order, then the struck-out in order.
        queue = order.gather(-1, ((~alive).byte() + (~real).byte()).sort(dim=-1, stable=True).indices)
        kept = torch.arange(queue.shape[-1], device=queue.device) < per_row(k, queue, torch.int64)
        return raster(queue.masked_fill(~kept, -1))[:, : widest(k)]

    def _growth(self, tokens: VisualTokens) -> Float[Tensor, " B"]:
        """What each kept token adds to the threshold."""
        rank = effective_rank(tokens.x, tokens.mask)
        average = self.options.average_rank
        usual = tokens.counts.clamp(min=1, max=tokens.x.shape[-1]) / 2 if average is None else average
        return self.options.step * rank / usual


def effective_rank(x: Float[Tensor, "B N D"], mask: Bool[Tensor, "B N"]) -> Float[Tensor, " B"]:
    """exp of the entropy of the singular values, taken as shares of their sum: 1 for one direction, r for r equal ones.

    From the eigenvalues of the smaller Gram matrix, in float64 (their roots would show float32's rounding).
    """
    real = x.masked_fill(~mask[..., None], 0).double()
    flipped = real.transpose(-1, -2)
    gram = real @ flipped if x.shape[1] <= x.shape[2] else flipped @ real
    spectrum = torch.linalg.eigvalsh(gram)
    noise = spectrum.amax(-1, keepdim=True) * gram.shape[-1] * torch.finfo(torch.float64).eps
    values = torch.where(spectrum > noise, spectrum, 0.0).sqrt()
    share = values / values.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    return torch.exp(torch.special.entr(share).sum(-1)).float()
