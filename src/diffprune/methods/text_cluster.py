"""Text-guided clustering, of our own design: clusters get tokens by how much they have to do with the question.

It stands where a published method of that kind (ICCTP) would, of which neither code nor paper could be found; it is not
that method and states nothing about it.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffprune.methods.base import Card, Counts, Pruner, check_counts
from diffprune.ops import cosine_matrix, hard_mask, hard_topk, unit_range
from diffprune.ops.similarity import projected_and_text
from diffprune.registry import METHODS
from diffprune.types import VisualTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TextClusterOptions:
    """Args:
    tokens_per_cluster: Budget per cluster on average: K tokens come from K / this many clusters, rounded up.
    neighbours: Nearest tokens by which a token's density is measured.
    """

    tokens_per_cluster: int = 4
    neighbours: int = 5

    def __post_init__(self) -> None:
        check_counts(self, "tokens_per_cluster", "neighbours")


@METHODS.register("text_cluster")
class TextCluster(Pruner):
    """Density-peak clusters of projected tokens; each keeps its most relevant tokens, more where relevance lies.

    Distances shrink where both tokens have little to do with the text, so that the irrelevant part of a picture falls
    into few clusters.
    """

    card = Card(idea="clusters tokens, more finely where the text is concerned, and keeps the most relevant of each")
    needs: ClassVar[frozenset[str]] = frozenset({"projected", "text"})
    Options: ClassVar[type] = TextClusterOptions

    def select(self, tokens: VisualTokens, k: Counts) -> Int[Tensor, "B K"]:
        mask, relevance = tokens.mask, text_relevance(tokens)
        assert tokens.projected is not None  # text_relevance checks
        cosines = cosine_matrix(tokens.projected.float())
        distance = (1 - cosines).clamp(min=0) * (relevance.unsqueeze(2) + relevance.unsqueeze(1)) / 2
        num_clusters = (k + self.options.tokens_per_cluster - 1) // self.options.tokens_per_cluster
        cluster = density_peaks(distance, num_clusters, mask, neighbours=self.options.neighbours)
        return hard_topk(_priority(relevance, cluster, mask), k, mask)


def text_relevance(tokens: VisualTokens) -> Float[Tensor, "B N"]:
    """Cosine with the nearest text token, from 0 to 1 within each image."""
    projected, text = projected_and_text(tokens, "text_cluster")
    cosines = cosine_matrix(projected.float(), text.float())  # [B, N, M]
    if tokens.text_mask is not None:
        cosines = cosines.masked_fill(~tokens.text_mask.unsqueeze(1), -1.0)
    nearest = torch.nn.functional.pad(cosines, (0, 1), value=-1.0).amax(-1)  # a prompt without text ranks nothing
    return unit_range(nearest, tokens.mask)


def density_peaks(
    distance: Float[Tensor, "B N N"],
    num_clusters: int | Int[Tensor, " B"],
    mask: Bool[Tensor, "B N"],
    *,
    neighbours: int,
) -> Int[Tensor, "B N"]:
    """The centre each token belongs to, as a token index: dense tokens far from denser ones are centres."""
    num_tokens = distance.shape[-1]
    real = mask.unsqueeze(1) & mask.unsqueeze(2)
    own = torch.eye(num_tokens, dtype=torch.bool, device=distance.device)
    nearest = (
        distance.masked_fill(~real | own, torch.inf).topk(min(neighbours, num_tokens), largest=False).values
    )  # [B, N, neighbours]
    found = nearest.isfinite()
    density = (-nearest.where(found, 0).square().sum(-1) / found.sum(-1).clamp(min=1)).exp()  # [B, N]
    place = torch.arange(num_tokens, device=distance.device)
    denser = density.unsqueeze(1) > density.unsqueeze(2)  # [B, i, j]: j is denser than i
    denser |= (density.unsqueeze(1) == density.unsqueeze(2)) & (place < place.unsqueeze(1))  # no two are equal
    farthest = distance.where(real, 0).amax((1, 2)).view(-1, 1)
    separation = distance.masked_fill(~(denser & real), torch.inf).amin(-1).minimum(farthest)  # the peak has none
    is_centre = hard_mask((density * separation).where(mask, 0), num_clusters, mask)
    to_centres = distance.masked_fill(own, 0).masked_fill(~is_centre.unsqueeze(1), torch.inf)
    return torch.where(is_centre, place, to_centres.argmin(-1))


def _priority(
    relevance: Float[Tensor, "B N"], cluster: Int[Tensor, "B N"], mask: Bool[Tensor, "B N"]
) -> Float[Tensor, "B N"]:
    """What to keep first: the best of every cluster, then by highest averages (D'Hondt).

    A cluster of summed relevance m offers m / 1, m / 2, m / 3, ... for its tokens from the most relevant on. The K
    highest offers share K in proportion to m, never ask a cluster for more than it has, and sum to K exactly.
    """
    together = (cluster.unsqueeze(1) == cluster.unsqueeze(2)) & mask.unsqueeze(1)  # [B, i, j]: j is in i's cluster
    place = torch.arange(cluster.shape[-1], device=cluster.device)
    before = relevance.unsqueeze(1) > relevance.unsqueeze(2)
    before |= (relevance.unsqueeze(1) == relevance.unsqueeze(2)) & (place < place.unsqueeze(1))
    rank = (together & before).sum(-1)  # [B, N], from 0 within the cluster
    offer = (together * relevance.unsqueeze(1)).sum(-1) / (rank + 1)
    return offer + (rank == 0) * (cluster.shape[-1] + 1.0)  # an offer is N at most
