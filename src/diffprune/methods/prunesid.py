"""PruneSID: group tokens by principal component, thin each group by similarity, keep each group's best."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffprune.methods.base import Card, Pruner, check_choices
from diffprune.methods.quotas import count_members, fill_up, take_quota
from diffprune.methods.similarity import cls_attention, cosine, descending, raster, walk
from diffprune.ops.hard_topk import check_inputs
from diffprune.registry import METHODS
from diffprune.types import VisualTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneSIDOptions:
    """Args:
    tokens_per_group: K over this is the number of groups.
    components: "exact" takes principal components from the Gram matrix; "lowrank" draws the release's randomised
        approximation (`torch.pca_lowrank`) from torch's global generator, so it is only as repeatable as its seed.
    native: Count [CLS] in K, as the release does: K - 1 tokens of the picture are kept.
    """

    tokens_per_group: int = 4
    components: str = "exact"
    native: bool = False

    def __post_init__(self) -> None:
        check_choices(self, components=("exact", "lowrank"))
        if self.tokens_per_group < 1:
            raise ValueError(f"tokens_per_group={self.tokens_per_group} makes no groups; give at least 1")


@METHODS.register("prunesid")
class PruneSID(Pruner):
    """A group's tokens are visited by falling attention; each visited one strikes out those too similar to it."""

    card = Card(
        idea="groups tokens by principal component, suppresses near duplicates in a group, keeps each group's best",
        paper="PruneSID: Vision Token Compression in VLMs via Synergistic Importance-Diversity",
        year=2026,
        licence="Apache-2.0",
        certainty="release read",
    )
    needs: ClassVar[frozenset[str]] = frozenset({"cls_attention"})
    Options: ClassVar[type] = PruneSIDOptions

    def select(self, tokens: VisualTokens, k: Int[Tensor, " B"]) -> Int[Tensor, "B K"]:
        return raster(self._choose(tokens, k, native=self.options.native))

    def select_native(self, tokens: VisualTokens, k: Int[Tensor, " B"]) -> Int[Tensor, "B K"]:
        """What the release keeps beside [CLS], K - 1 tokens, in its order: group after group, best first."""
        return self._choose(tokens, k, native=True)

    def _choose(self, tokens: VisualTokens, k: Int[Tensor, " B"], *, native: bool) -> Int[Tensor, "B K"]:
        attention, mask = cls_attention(tokens, "prunesid"), tokens.mask
        check_inputs(attention, k, mask)
        per_group = self.options.tokens_per_group
        if native and len(k) and int(k.min()) < max(2, per_group):
            raise ValueError(
                f"keep={int(k.min())} leaves native PruneSID no group; it needs K of at least {max(2, per_group)}"
            )
        most = max(1, min(tokens.x.shape[-1] - 1, tokens.x.shape[1]))  # no more components than there are
        num_groups = (k // per_group).clamp(min=1, max=most)
        loadings = exact_loadings if self.options.components == "exact" else drawn_loadings
        group = best_component(loadings(tokens.x, mask, num_groups), num_groups).masked_fill(~mask, 0)
        similarity = cosine(tokens.x.float(), mask)
        survives = suppress(similarity, attention, group, mask, k / 32 * mean_similarity(similarity, mask))
        sizes, thinned = (count_members(group, chosen, int(num_groups.max())) for chosen in (mask, survives))
        quota = split_budget(sizes, thinned, k, k - 1 if native else k)
        return take_quota(group, rank_value(attention, survives, mask), quota, mask)


def centred_features(x: Float[Tensor, "B N D"], mask: Bool[Tensor, "B N"]) -> Float[Tensor, "B N D"]:
    """Sigmoid of the features, each token's own mean taken off, float32, 0 at padding."""
    squashed = torch.sigmoid(x.float())
    return (squashed - squashed.mean(-1, keepdim=True)).masked_fill(~mask[..., None], 0.0)


def exact_loadings(
    x: Float[Tensor, "B N D"], mask: Bool[Tensor, "B N"], num_groups: Int[Tensor, " B"]
) -> Float[Tensor, "B N G"]:
    """How much each token has of each leading principal component, by absolute value.

    With tokens as variables and channels as observations; from the smaller of the two Gram matrices, in float64.
    """
    centred = centred_features(x, mask).double()
    width = int(num_groups.max())
    if x.shape[1] <= x.shape[2]:
        vectors = torch.linalg.eigh(centred @ centred.transpose(-1, -2)).eigenvectors
    else:
        channels = torch.linalg.eigh(centred.transpose(-1, -2) @ centred).eigenvectors
        vectors = torch.nn.functional.normalize(centred @ channels, dim=1)
    return vectors.flip(-1)[..., :width].abs().float()  # eigenvalues come ascending


def drawn_loadings(
    x: Float[Tensor, "B N D"], mask: Bool[Tensor, "B N"], num_groups: Int[Tensor, " B"]
) -> Float[Tensor, "B N G"]:
    """The same by a randomised decomposition, image by image."""
    out = torch.zeros(*mask.shape, int(num_groups.max()), device=x.device)
    for row, width in enumerate(num_groups.tolist()):
        own = torch.sigmoid(x[row, mask[row]].float()).T  # [D, n]; its columns are centred inside
        out[row, mask[row], :width] = torch.pca_lowrank(own, q=width)[2].abs()
    return out


def best_component(loadings: Float[Tensor, "B N G"], num_groups: Int[Tensor, " B"]) -> Int[Tensor, "B N"]:
    """The component each token has most of, among the row's own number of them."""
    beyond = torch.arange(loadings.shape[-1], device=loadings.device) >= num_groups[:, None]
    return loadings.masked_fill(beyond[:, None, :], -1.0).argmax(-1)


def mean_similarity(similarity: Float[Tensor, "B N N"], mask: Bool[Tensor, "B N"]) -> Float[Tensor, " B"]:
    """Mean over pairs of different tokens."""
    counts = mask.sum(-1)
    pairs = (counts * (counts - 1) // 2).clamp(min=1)
    return similarity.triu(1).sum((-1, -2)) / pairs


def suppress(
    similarity: Float[Tensor, "B N N"],
    attention: Float[Tensor, "B N"],
    group: Int[Tensor, "B N"],
    mask: Bool[Tensor, "B N"],
    limit: Float[Tensor, " B"],
) -> Bool[Tensor, "B N"]:
    """True where a token survives: no survivor of its group with more attention is more similar to it than `limit`."""
    order = descending(attention, mask)
    apart = group[:, :, None] != group[:, None, :]
    rows = torch.arange(len(mask), device=mask.device)[:, None, None]
    visited = similarity.masked_fill(apart, -torch.inf)[rows, order[:, :, None], order[:, None, :]]
    alive = walk(visited, mask.gather(-1, order), lambda number: limit[:, None].expand(number.shape))
    return torch.zeros_like(mask).scatter(-1, order, alive)


def rank_value(
    attention: Float[Tensor, "B N"], survives: Bool[Tensor, "B N"], mask: Bool[Tensor, "B N"]
) -> Float[Tensor, "B N"]:
    """A value that puts survivors before the suppressed, and each of the two by attention."""
    num_tokens = mask.shape[-1]
    place = torch.arange(num_tokens, device=mask.device).expand(mask.shape)
    rank = torch.zeros_like(place).scatter(-1, descending(attention, mask), place)
    return (survives * num_tokens - rank).float()


def split_budget(
    sizes: Int[Tensor, "B G"], survivors: Int[Tensor, "B G"], k: Int[Tensor, " B"], total: Int[Tensor, " B"]
) -> Int[Tensor, "B G"]:
    """Tokens each group keeps, `total` in all: one each, the rest in proportion to its survivors, up to a cap.

    Args:
        k: The budget the caps are made for: 5 for every 64 of it, no more than survive, raised until they hold k.
    """
    cap = torch.minimum((5 * -(-k // 64))[:, None], torch.minimum(sizes, survivors))
    cap = raise_caps(cap, sizes, k)
    one = sizes.clamp(max=1)
    spare = (total - one.sum(-1)).clamp(min=0)
    share = (survivors / survivors.sum(-1, keepdim=True).clamp(min=1)).cumsum(-1)
    borders = (share * spare[:, None]).round().long()  # halves go to the even number
    quota = one + torch.diff(borders, dim=-1, prepend=torch.zeros_like(borders[:, :1]))
    return fill_up(torch.minimum(quota, cap), cap, survivors, total)


def raise_caps(cap: Int[Tensor, "B G"], sizes: Int[Tensor, "B G"], k: Int[Tensor, " B"]) -> Int[Tensor, "B G"]:
    """The caps, all raised by the least same number (never past a group's size) that lets them hold k together."""
    low, high = torch.zeros_like(k), sizes.amax(-1)
    for _ in range(int(high.max()).bit_length() + 1):
        middle = (low + high) // 2
        holds = torch.minimum(cap + middle[:, None], sizes).sum(-1) >= k
        low, high = torch.where(holds, low, middle + 1), torch.where(holds, middle, high)
    return torch.minimum(cap + high[:, None], sizes)
