"""Scorers: one importance logit per visual token, from the image alone (paper, Section 4.2)."""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from diffprune.nn.blocks import Block, BlockSpec, make_norm, position_angles, zero_padding

GROUPS = ("patches", "merged")  # what is scored of a token made of several patches: each of them, or their mean
TILES = ("apart", "joined")  # whether a token attends to its own tile alone, or to all of the picture
MOST_BLOCKS = 64  # of a scorer; the deepest tower has fewer


class Scorer(nn.Module):
    """Transformer blocks of the tower's own kind and a linear head that starts at zero, so all logits start equal.

    Attention stays within an image, with `tiles="apart"` within a segment (a tile), and never reaches padding. Where a
    token is made of G patches, its logit is the mean of theirs, or with `groups="merged"` that of their mean, at a G-th
    of the patches.

    Args:
        spec: The tower's block.
        depth: How many of them.
        final_norm: Norm before the head.
        groups: What is scored of a token made of several patches, one of `GROUPS`.
        tiles: How far attention reaches in a picture of several tiles, one of `TILES`.
    """

    def __init__(
        self,
        spec: BlockSpec,
        depth: int = 2,
        *,
        final_norm: bool = True,
        groups: str = "patches",
        tiles: str = "apart",
    ) -> None:
        super().__init__()
        if groups not in GROUPS:
            raise ValueError(f"groups={groups!r:.80} is not known; give {' or '.join(map(repr, GROUPS))}")
        if tiles not in TILES:
            raise ValueError(f"tiles={tiles!r:.80} is not known; give {' or '.join(map(repr, TILES))}")
        if not 0 <= depth <= MOST_BLOCKS:
            raise ValueError(f"scorer_depth={str(depth)[:20]} is no number of blocks; give 0 to {MOST_BLOCKS}")
        self.spec, self.groups, self.tiles = spec, groups, tiles
        self.blocks = nn.ModuleList(Block(spec) for _ in range(depth))
        self.norm = make_norm(spec) if final_norm else nn.Identity()
        self.head = nn.Linear(spec.width, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(
        self,
        x: Float[Tensor, "B N D"],
        *,
        mask: Bool[Tensor, "B N"] | None = None,
        coords: Int[Tensor, "B N G 2"] | None = None,
        segment: Int[Tensor, "B N"] | None = None,
    ) -> Float[Tensor, "B N"]:
        """Logits in float32 at least; 0 at padding.

        Args:
            x: Encoder features, D = G * width.
            mask: True where a token is real; None where all are.
            coords: Place of each patch, needed where the tower has rotary positions.
            segment: Which tile a token comes from; tiles apart are scored at the cost of attention within each.
        """
        return self._read(x, mask, coords, segment)[0]

    def read(
        self,
        x: Float[Tensor, "B N D"],
        *,
        mask: Bool[Tensor, "B N"] | None = None,
        coords: Int[Tensor, "B N G 2"] | None = None,
        segment: Int[Tensor, "B N"] | None = None,
    ) -> tuple[Float[Tensor, "B N"], Float[Tensor, "B N W"]]:
        """Logits as `forward` gives them, and what the head reads them off: a token's last hidden state, after the
        norm, the mean of its patches."""
        logits, patches = self._read(x, mask, coords, segment)
        num_patches = patches.shape[1] // logits.shape[1]
        return logits, patches if num_patches == 1 else patches.unflatten(1, (-1, num_patches)).mean(2)

    def _read(
        self, x: Tensor, mask: Tensor | None, coords: Tensor | None, segment: Tensor | None
    ) -> tuple[Float[Tensor, "B N"], Float[Tensor, "B P W"]]:
        """Logits, and the last hidden state of every patch, padding with anything finite."""
        x = zero_padding(x, mask)
        if segment is None or self.tiles == "joined":
            return self._score_rows(x, mask, coords)
        real = torch.ones_like(segment, dtype=torch.bool) if mask is None else mask
        index = pack_segments(real, segment)  # [R, M]
        filled = index >= 0
        packed = x.flatten(0, 1)[index] * filled.unsqueeze(-1)
        places = None if coords is None else coords.flatten(0, 1)[index]
        logits, patches = self._score_rows(packed, None if bool(filled.all()) else filled, places)

        def spread(values: Tensor) -> Tensor:
            """From one row a tile to one row an image."""
            out = values.new_zeros(real.numel(), *values.shape[2:]).index_put((index[filled],), values[filled])
            return out.unflatten(0, real.shape)

        hidden = spread(patches.unflatten(1, (logits.shape[1], -1)))
        return spread(logits), hidden.flatten(1, 2)

    def _score_rows(self, x: Tensor, mask: Tensor | None, coords: Tensor | None) -> tuple[Tensor, Tensor]:
        """Logits and hidden patches of rows in which every real token attends to every other."""
        if self.groups == "merged":
            x, coords = merge_groups(x, coords, self.spec.width)
        num_patches = x.shape[-1] // self.spec.width
        patches = x.to(self.head.weight.dtype).unflatten(-1, (num_patches, -1)).flatten(1, 2)  # [B, N * G, W]
        patch_mask = None if mask is None else mask.repeat_interleave(num_patches, dim=1)
        angles = position_angles(coords, self.spec)
        for block in self.blocks:
            patches = block(patches, mask=patch_mask, angles=angles)
        patches = self.norm(patches)
        logits = exact_linear(patches, self.head).squeeze(-1)
        logits = logits.unflatten(1, (-1, num_patches)).mean(-1)  # a group's logit is the mean of its patches
        return logits if mask is None else torch.where(mask, logits, 0.0), patches


def merge_groups(
    x: Float[Tensor, "B N D"], coords: Int[Tensor, "B N G 2"] | None, width: int
) -> tuple[Float[Tensor, "B N W"], Int[Tensor, "B N 1 2"] | None]:
    """Each token's mean patch, at the place of its first: places are compared, so all may be off by the same."""
    merged = x.unflatten(-1, (-1, width)).mean(2)
    return merged, None if coords is None else coords[:, :, :1]


class BilinearScorer(nn.Module):
    """Each token against its image's mean token: `(Wq x_i + bq) . kbar / sqrt(h)`, `kbar = Wk mean(x) + bk`.

    VisionSelector's scorer without the [N, N] product its mean makes needless: given the image it is linear in x_i.
    Two linear maps instead of two blocks, called like `Scorer`; `coords` and `segment` change nothing.
    """

    def __init__(self, spec: BlockSpec) -> None:
        super().__init__()
        self.spec = spec
        self.query = nn.Linear(spec.width, max(1, spec.width // 2))
        self.key = nn.Linear(spec.width, max(1, spec.width // 2))
        for linear in (self.query, self.key):
            nn.init.normal_(linear.weight, std=1e-4)  # the release's start: logits near 0, but off the saddle at 0
            nn.init.zeros_(linear.bias)

    def forward(
        self,
        x: Float[Tensor, "B N D"],
        *,
        mask: Bool[Tensor, "B N"] | None = None,
        coords: Int[Tensor, "B N G 2"] | None = None,
        segment: Int[Tensor, "B N"] | None = None,
    ) -> Float[Tensor, "B N"]:
        """Logits in float32 at least; 0 at padding."""
        del coords, segment
        x = zero_padding(x, mask).to(torch.promote_types(x.dtype, torch.float32))
        tokens = x.unflatten(-1, (-1, self.spec.width)).mean(2)  # linear, so a group's mean patch has its mean logit
        real = torch.ones_like(tokens[..., 0]) if mask is None else mask
        mean = tokens.sum(1) / real.sum(1, keepdim=True).clamp(min=1)  # [B, W]
        key = exact_linear(mean, self.key)  # [B, h]
        logits = (exact_linear(tokens, self.query) @ key.unsqueeze(-1)).squeeze(-1) / key.shape[-1] ** 0.5
        return logits if mask is None else torch.where(mask, logits, 0.0)


def make_scorer(
    kind: str,
    spec: BlockSpec,
    *,
    depth: int = 2,
    final_norm: bool = True,
    groups: str = "patches",
    tiles: str = "apart",
) -> Scorer | BilinearScorer:
    """The scorer of that kind: "blocks" or "bilinear", which merges groups and joins tiles whatever is asked, being
    linear."""
    if kind == "blocks":
        return Scorer(spec, depth, final_norm=final_norm, groups=groups, tiles=tiles)
    if kind == "bilinear":
        return BilinearScorer(spec)
    raise ValueError(f"scorer={kind!r:.80} is not known; give 'blocks' or 'bilinear'")


def standardise(
    logits: Float[Tensor, "B N"], mask: Bool[Tensor, "B N"] | None = None, *, eps: float = 1e-2
) -> Float[Tensor, "B N"]:
    """Logits with mean 0 and deviation 1 over each row's real tokens, so that a temperature means the same in all.

    Deviations below `eps` are left small: logits that start equal stay equal, and their gradient stays finite.
    """
    real = torch.ones_like(logits, dtype=torch.bool) if mask is None else mask
    count = real.sum(-1, keepdim=True).clamp(min=1)
    centred = logits - logits.where(real, 0.0).sum(-1, keepdim=True) / count
    variance = centred.where(real, 0.0).square().sum(-1, keepdim=True) / count
    return centred / (variance + eps**2).sqrt()


def pack_segments(mask: Bool[Tensor, "B N"], segment: Int[Tensor, "B N"]) -> Int[Tensor, "R M"]:
    """One row per (image, segment): flat indices b * N + n of its real tokens in order, -1 where the row is shorter.

    Five tiles of 576 become 5 rows of 576, so attention costs 5 * 576^2 instead of 2880^2.
    """
    flat = mask.flatten().nonzero().squeeze(-1)  # row by row, in raster order
    image, tile = flat // mask.shape[1], segment.flatten()[flat].long()
    label = image * (tile.max() - tile.min() + 1) + tile  # distinct for distinct (image, segment)
    _, row, lengths = torch.unique(label, return_inverse=True, return_counts=True)
    order = row.argsort(stable=True)
    place = torch.arange(len(flat), device=flat.device) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    index = flat.new_full((len(lengths), int(lengths.max())), -1)
    index[row[order], place] = flat[order]
    return index


def exact_linear(x: Tensor, linear: nn.Linear) -> Tensor:
    """A linear map in float32 at least, also under autocast: a third of a thousand logits would tie in bfloat16."""
    wide = torch.promote_types(x.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x.to(wide), linear.weight.to(wide), linear.bias.to(wide))
