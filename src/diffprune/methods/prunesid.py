"""PruneSID: group tokens by principal component, thin each group by similarity, keep each group's best."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from diffprune.methods.base import Card, Counts, Pruner, check_choices
from diffprune.nn.blocks import zero_padding
from diffprune.ops import cosine_matrix
from diffprune.ops.hard_topk import check_inputs, per_row, widest
from diffprune.ops.jacobi import jacobi_eigenvectors
from diffprune.ops.quotas import count_members, fill_up, heaviest, take_quota
from diffprune.ops.similarity import cls_attention, descending, may_wait, pack, raster, settle
from diffprune.registry import METHODS
from diffprune.types import VisualTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneSIDOptions:
    """Args:
    tokens_per_group: K over this is the number of groups.
    components: "exact" takes principal components from the Gram matrix; "subspace" comes near to them by a few rounds
        of subspace iteration, in a small part of the time; "lowrank" draws the release's randomised approximation
        (`torch.pca_lowrank`) from torch's global generator, so it is only as repeatable as its seed. "auto" is
        "lowrank" where `native` is set, else "subspace".
    native: As released: [CLS] is counted in K, so that K - 1 tokens of the picture are kept, and they come group after
        group, best first.
    """

    tokens_per_group: int = 4
    components: str = "auto"
    native: bool = False

    def __post_init__(self) -> None:
        check_choices(self, components=("auto", "exact", "subspace", "lowrank"))
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
    native_positions: ClassVar[str] = "packed"
    Options: ClassVar[type] = PruneSIDOptions

    def select(self, tokens: VisualTokens, k: Counts) -> Int[Tensor, "B K"]:
        chosen = self._group_by_group(tokens, k)
        return pack(chosen, chosen >= 0, max(0, widest(k) - 1)) if self.is_native else raster(chosen)[:, : widest(k)]

    def _group_by_group(self, tokens: VisualTokens, k: Counts) -> Int[Tensor, "B N"]:
        """What is kept, group after group and best first, among -1 for all others.

        With one K for all pictures nothing of this reads values back from the device where that is not allowed.
        """
        attention, mask, padding = cls_attention(tokens, "prunesid"), tokens.mask, tokens.padding_mask
        check_inputs(attention, k, mask)
        if self.is_native:
            self._check_native(k)
        if not isinstance(k, int):
            k = per_row(k, attention, torch.int64).squeeze(-1)
        x = tokens.x.float()
        loadings, num_groups = self._principal(x, padding, k)
        group = best_component(loadings, num_groups)
        if padding is not None:
            group.masked_fill_(~padding, 0)
        similarity = cosine_matrix(zero_padding(x, padding))
        rank = ranks(attention, padding)
        survives = suppress(similarity, rank, group, mask, k / 32 * mean_similarity(similarity, padding))
        sizes, thinned = (count_members(group, chosen, loadings.shape[-1]) for chosen in (mask, survives))
        quota = split_budget(sizes, thinned, k, k - 1 if self.is_native else k)
        place = torch.where(survives, rank, rank + mask.shape[-1])  # survivors first
        return take_quota(group, place, quota, mask, sizes)

    def _principal(
        self, x: Float[Tensor, "B N D"], padding: Bool[Tensor, "B N"] | None, k: Counts
    ) -> tuple[Float[Tensor, "B N G"], Counts]:
        """How much each token has of each component, and how many components each picture has."""
        most = max(1, min(x.shape[-1] - 1, x.shape[1]))  # no more components than there are
        per_group = self.options.tokens_per_group
        width = min(max(1, widest(k) // per_group), most)
        loadings = self._loadings()
        if isinstance(k, int):
            return loadings(x, padding, width, width), width
        num_groups = (k // per_group).clamp(min=1, max=most)
        return row_by_row_alike(loadings, x, padding, num_groups, width), num_groups

    def _check_native(self, k: Counts) -> None:
        """A `ValueError` where the release's own parts do not fit into K."""
        smallest = k if isinstance(k, int) else min(k.tolist(), default=None)
        least = max(2, self.options.tokens_per_group)
        if smallest is not None and smallest < least:
            raise ValueError(f"keep={smallest} leaves native PruneSID no group; it needs K of at least {least}")

    def _loadings(self) -> Callable[..., Float[Tensor, "B N G"]]:
        kind = self.options.components
        if kind == "auto":
            kind = "lowrank" if self.is_native else "subspace"
        return {"exact": exact_loadings, "subspace": subspace_loadings, "lowrank": drawn_loadings}[kind]


def centred_features(x: Float[Tensor, "B N D"], mask: Bool[Tensor, "B N"] | None) -> Float[Tensor, "B N D"]:
    """Sigmoid of the features, each token's own mean taken off, float32, 0 at padding."""
    squashed = torch.sigmoid(x.float())
    return zero_padding(squashed - squashed.mean(-1, keepdim=True), mask)


def all_real(x: Float[Tensor, "B N D"]) -> Bool[Tensor, "B N"]:
    """The mask of tokens none of which is padding."""
    return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)


def row_by_row_alike(
    loadings: Callable[..., Float[Tensor, "B N G"]],
    x: Float[Tensor, "B N D"],
    mask: Bool[Tensor, "B N"] | None,
    num_groups: Int[Tensor, " B"],
    width: int,
) -> Float[Tensor, "B N G"]:
    """The loadings of pictures of as many tokens and groups together, and of others apart.

    How components are found depends on both numbers, and what a picture keeps must not depend on its neighbours.
    """
    mask = all_real(x) if mask is None else mask
    out = torch.zeros(*mask.shape, width, device=x.device)
    numbers = torch.stack([num_groups, mask.sum(-1)], dim=-1)
    for own, count in numbers.unique(dim=0).tolist():
        alike = (numbers == numbers.new_tensor([own, count])).all(-1).nonzero()[:, 0]
        end = count if bool(mask[alike, :count].all()) else mask.shape[-1]
        out[alike, :end, :own] = loadings(x[alike, :end], mask[alike, :end], num_groups[alike], own)
    return out


def exact_loadings(
    x: Float[Tensor, "B N D"], mask: Bool[Tensor, "B N"] | None, num_groups: Counts, width: int
) -> Float[Tensor, "B N G"]:
    """How much each token has of each of the `width` leading principal components, by absolute value.

    With tokens as variables and channels as observations; from the smaller of the two Gram matrices, in float64.
    """
    centred = centred_features(x, mask).double()
    if x.shape[1] <= x.shape[2]:
        vectors = torch.linalg.eigh(centred @ centred.transpose(-1, -2)).eigenvectors
    else:
        channels = torch.linalg.eigh(centred.transpose(-1, -2) @ centred).eigenvectors
        vectors = functional.normalize(centred @ channels, dim=1)
    return vectors.flip(-1)[..., :width].abs().float()  # eigenvalues come ascending


_ROUNDS = (1, 2, 2, 2, 2)  # powers of the Gram matrix: the first columns are too much alike for its square
_SMALL = 128  # rows of a symmetric matrix that a CPU decomposes no later than a GPU
_LARGE = 256  # rows of one past which it is decomposed on the GPU, whether waiting is allowed or not


def iterated_columns(width: int) -> int:
    """Columns iterated for that many components: the further behind the next one is, the faster it is gone."""
    return max(2 * width, width + 16)


def subspace_loadings(
    x: Float[Tensor, "B N D"], mask: Bool[Tensor, "B N"] | None, num_groups: Counts, width: int
) -> Float[Tensor, "B N G"]:
    """Loadings by subspace iteration on the smaller Gram matrix, for which only a small matrix is decomposed.

    Each round multiplies some columns by the Gram matrix or its square and makes them orthonormal again; the components
    are then read off within their span. Where that would not be smaller by half, this is `exact_loadings`, unless that
    would have to wait where it may not: then all columns are iterated, whose span is the whole.
    """
    size, columns = min(x.shape[1:]), iterated_columns(width)
    saves_nothing = 2 * columns > size
    if saves_nothing and size > _LARGE:
        return exact_loadings(x, mask, num_groups, width)
    # Kept from the first call on, which may wait, for one that may not.
    start = start_columns(size, size if saves_nothing else columns, x.device)
    if saves_nothing and may_wait(x.device):
        return exact_loadings(x, mask, num_groups, width)
    centred = centred_features(x, mask).double()
    rows = centred if x.shape[1] <= x.shape[2] else centred.transpose(-1, -2)  # [B, size, ...]
    gram = rows @ rows.transpose(-1, -2)
    powers = {1: gram, 2: gram @ gram}
    basis = start.expand(len(x), -1, -1)
    for power in _ROUNDS:
        basis = orthonormal(powers[power] @ basis)
    vectors = basis @ leading_eigenvectors(basis.transpose(-1, -2) @ gram @ basis, width)
    if rows is not centred:
        vectors = functional.normalize(centred @ vectors, dim=1)
    return vectors.abs().float()


def leading_eigenvectors(symmetric: Float[Tensor, "B Q Q"], width: int) -> Float[Tensor, "B Q G"]:
    """The `width` eigenvectors of the largest eigenvalues in columns, the largest one's first.

    A GPU decomposes small matrices one after another, in many tiny steps, and is waited for in any case. Where it may
    not be, some more operations do without.
    """
    size, device = symmetric.shape[-1], symmetric.device
    if size <= _LARGE and not may_wait(device):
        vectors = jacobi_eigenvectors(symmetric)
    else:
        vectors = torch.linalg.eigh(symmetric.cpu() if size <= _SMALL else symmetric).eigenvectors
    return vectors[..., size - width :].flip(-1).to(device)  # eigenvalues come ascending


def orthonormal(columns: Float[Tensor, "B M Q"]) -> Float[Tensor, "B M Q"]:
    """Columns of the same span, orthonormal up to rounding: Cholesky-QR, of a few small operations and no wait."""
    product = columns.transpose(-1, -2) @ columns
    # Holds the factor up where a picture has fewer components, whatever the lengths of the columns, 0 included.
    product.diagonal(dim1=-2, dim2=-1).mul_(1 + 1e-13).add_(1e-280)
    lower = torch.linalg.cholesky_ex(product).L
    return torch.linalg.solve_triangular(lower, columns.transpose(-1, -2), upper=False).transpose(-1, -2)


@cache
def start_columns(size: int, columns: int, device: torch.device) -> Float[Tensor, "M Q"]:
    """Where every iteration starts: a row of random numbers for each token or channel, the same in any batch."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(size, columns, generator=generator, dtype=torch.float64).to(device)


def drawn_loadings(
    x: Float[Tensor, "B N D"], mask: Bool[Tensor, "B N"] | None, num_groups: Counts, width: int
) -> Float[Tensor, "B N G"]:
    """Loadings by a randomised decomposition, image by image."""
    mask = all_real(x) if mask is None else mask
    out = torch.zeros(*mask.shape, width, device=x.device)
    for row, own_width in enumerate([num_groups] * len(x) if isinstance(num_groups, int) else num_groups.tolist()):
        own = torch.sigmoid(x[row, mask[row]].float()).T  # [D, n]; its columns are centred inside
        out[row, mask[row], :own_width] = torch.pca_lowrank(own, q=own_width)[2].abs()
    return out


def best_component(loadings: Float[Tensor, "B N G"], num_groups: Counts) -> Int[Tensor, "B N"]:
    """The component each token has most of, among the row's own number of them."""
    if not isinstance(num_groups, int):
        beyond = torch.arange(loadings.shape[-1], device=loadings.device) >= num_groups[:, None]
        loadings = loadings.masked_fill(beyond[:, None, :], -1.0)
    return loadings.argmax(-1)


def mean_similarity(similarity: Float[Tensor, "B N N"], mask: Bool[Tensor, "B N"] | None) -> Float[Tensor, " B"]:
    """Mean over pairs of different tokens."""
    total = similarity.triu(1).sum((-1, -2))
    if mask is None:
        count = similarity.shape[-1]
        return total / torch.full_like(total, max(1, count * (count - 1) // 2))  # a GPU multiplies by one over a number
    counts = mask.sum(-1)
    return total / (counts * (counts - 1) // 2).clamp(min=1)


def suppress(
    similarity: Float[Tensor, "B N N"],
    rank: Int[Tensor, "B N"],
    group: Int[Tensor, "B N"],
    mask: Bool[Tensor, "B N"],
    limit: Float[Tensor, " B"],
) -> Bool[Tensor, "B N"]:
    """True where a token survives: none of its group that survives and ranks before it is more similar than `limit`."""
    earlier = rank[:, None, :] < rank[:, :, None]  # [B, i, j]: j is visited before i
    together = group[:, :, None] == group[:, None, :]
    alike = (similarity > limit[:, None, None]) & earlier
    conflict = torch.logical_and(alike, together, out=torch.empty_like(similarity))
    real = mask.to(similarity.dtype)[..., None]
    # Of 0 and 1: what is left of a token's 1 when each survivor that strikes it out has taken 1 off. Two operations.
    return settle(lambda alive: real.baddbmm(conflict, alive, alpha=-1).clamp_(min=0), real, rounds=8).squeeze(-1) > 0


def ranks(attention: Float[Tensor, "B N"], mask: Bool[Tensor, "B N"] | None) -> Int[Tensor, "B N"]:
    """Each token's place by falling attention, from 0; padding last."""
    order = descending(attention, mask)
    place = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, place)


def split_budget(
    sizes: Int[Tensor, "B G"], survivors: Int[Tensor, "B G"], k: Counts, total: Counts
) -> Int[Tensor, "B G"]:
    """Tokens each group keeps, `total` in all: one each, the rest in proportion to its survivors, up to a cap.

    Args:
        survivors: How many of each group's own survive.
        k: The budget the caps are made for: 5 for every 64 of it, no more than survive, raised until they hold k.
    """
    cap, order = raise_caps(survivors.clamp(max=5 * -(-column(k) // 64)), sizes, k), heaviest(survivors)
    one = sizes.clamp(max=1)
    if total is not k:  # there may be a group more than places
        one = fill_up(torch.zeros_like(one), one, order, total)
    spare = (column(total) - one.sum(-1, keepdim=True)).clamp_(min=0)
    whole = (survivors.cumsum(-1) * spare).double()  # whole numbers up to the division, so that a half is a half
    borders = (whole / survivors.sum(-1, keepdim=True).clamp_(min=1)).round_().long()  # and goes to the even number
    quota = one + borders
    quota[:, 1:].sub_(borders[:, :-1])
    return fill_up(torch.minimum(quota, cap), cap, order, total)


def raise_caps(cap: Int[Tensor, "B G"], sizes: Int[Tensor, "B G"], k: Counts) -> Int[Tensor, "B G"]:
    """The caps, all raised by the least same number (never past a group's size) that lets them hold k together."""
    room = (sizes - cap).sort(dim=-1).values
    # A rise r gives sum_i min(r, room_i), the least over j of what the j smallest rooms hold and r times the others.
    held = room.cumsum(-1) - room
    others = torch.arange(room.shape[-1], 0, -1, device=room.device)
    beyond = held + (cap.sum(-1, keepdim=True) - column(k))  # negative: what the others miss
    return torch.minimum(cap - (beyond // others).amin(-1, keepdim=True).clamp_(max=0), sizes)


def column(k: Counts) -> int | Int[Tensor, "B 1"]:
    """Budgets beside one number per group."""
    return k if isinstance(k, int) else k[:, None]
