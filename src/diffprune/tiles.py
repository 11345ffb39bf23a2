"""Budgets per tile: for families that cut a picture into tiles, each tile keeps its own share of K.

A method sees one row per tile instead of one per image; what it decides is put back together per image.
"""

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffprune.methods.base import Choice, Kept, Pruner, Restricted, SelfSupervisedPruner, take
from diffprune.nn.scorer import pack_segments
from diffprune.ops import pad_rows, take_tokens
from diffprune.ops.noise import Generators
from diffprune.types import Grid, VisualTokens

BUDGETS = ("global", "per_tile")
_SEED_STEP = 0x9E3779B97F4A7C15  # odd, so tiles of one picture draw apart


class Tiles(NamedTuple):
    """One row per tile, and where it comes from.

    Args:
        tokens: The tiles' tokens.
        index: Each token's place in its image, -1 for padding.
        image: The image each tile belongs to.
    """

    tokens: VisualTokens
    index: Int[Tensor, "R M"]
    image: Int[Tensor, " R"]


class PerTile:
    """A method whose budget is spread over the tiles of each picture in proportion to their tokens.

    Called like the method it wraps, with one K per image.
    """

    def __init__(self, method: Pruner) -> None:
        self.method = method
        self.is_inside = method.is_inside

    def choose(self, tokens: VisualTokens, k: Int[Tensor, " B"]) -> Choice:
        """Indices per image, ascending, chosen tile by tile, and every token's score, each tile scored by itself."""
        tiles = split_tiles(tokens)
        keep, logits = self.method.choose(tiles.tokens, spread_budget(tiles, k))
        spread = None if logits is None else _spread(logits, tiles, tokens)
        return Choice(_gathered(keep, tiles, len(tokens))[0], spread)

    def deploy(self, tokens: VisualTokens, k: Int[Tensor, " B"]) -> Kept:
        """The tokens kept of each image, tile by tile; tokens merge within a tile only."""
        if not self.method.is_merging:
            return take(tokens, self.choose(tokens, k).keep)
        tiles = split_tiles(tokens)
        x, keep = self.method.deploy(tiles.tokens, spread_budget(tiles, k))
        index, order = _gathered(keep, tiles, len(tokens))
        return Kept(take_tokens(x.flatten(0, 1)[None], order.flatten()[None])[0].unflatten(0, order.shape), index)

    def restrict(
        self, tokens: VisualTokens, k: Int[Tensor, " B"], *, tau: float | Tensor, generator: Generators = None
    ) -> Restricted:
        """All tokens, each weakened by its weight; the weights of a tile sum to its own K."""
        if isinstance(self.method, SelfSupervisedPruner):  # its loss is of whole pictures
            return self.method.restrict(tokens, k, tau=tau, generator=generator)
        tiles = split_tiles(tokens)
        if isinstance(generator, Sequence):
            generator = [generator[image] for image in tiles.image.tolist()]
        if isinstance(tau, Tensor) and tau.ndim:
            tau = tau[tiles.image]
        out = self.method.restrict(tiles.tokens, spread_budget(tiles, k), tau=tau, generator=generator)
        fields_per_token = ("x", "alpha", "logits", "soft_mask")
        values = {name: getattr(out, name) for name in fields_per_token}
        penalty = None if out.penalty is None else mean_by_image(out.penalty, tiles.image, len(tokens))
        return out._replace(
            penalty=penalty,
            **{name: _spread(value, tiles, tokens) for name, value in values.items() if value is not None},
        )


def split_tiles(tokens: VisualTokens) -> Tiles:
    """The tokens with one row per tile; a picture without tiles stays one row."""
    num_tokens = tokens.x.shape[1]
    segment = torch.zeros_like(tokens.mask, dtype=torch.long) if tokens.segment is None else tokens.segment
    flat = pack_segments(tokens.mask, segment)  # [R, M] into B * N
    image, mask = flat[:, 0] // num_tokens, flat >= 0
    per_token = {"coords", "boxes", "cls_attention", "keys", "projected", "regions"}
    changes: dict[str, Any] = {}
    for field in fields(tokens):
        value = getattr(tokens, field.name)
        if value is None:
            continue
        if field.name == "x" or field.name in per_token:
            changes[field.name] = _rows(value, flat)
        elif field.name == "planes":
            changes["planes"] = tuple(_rows(plane, flat) for plane in value)
        elif field.name in ("text", "text_mask"):
            changes[field.name] = value[image]
    tile = segment.flatten()[flat[:, 0]]
    if tokens.seeds is not None:
        pairs = zip(image.tolist(), tile.tolist(), strict=True)
        changes["seeds"] = tuple((tokens.seeds[i] + t * _SEED_STEP) % 2**56 for i, t in pairs)
    boxes = changes.get("boxes")
    grid = tuple(_grid(None if boxes is None else boxes[row, keep], int(keep.sum())) for row, keep in enumerate(mask))
    rows = replace(tokens, mask=mask, grid=grid, segment=None, slots=None, **changes)
    return Tiles(rows, torch.where(mask, flat - image[:, None] * num_tokens, -1), image)


def spread_budget(tiles: Tiles, k: Int[Tensor, " B"]) -> Int[Tensor, " R"]:
    """Tokens each tile keeps: in proportion to its tokens, at least one, and together exactly k of the image."""
    out = torch.zeros_like(tiles.image)
    for image, budget in enumerate(k.tolist()):
        rows = (tiles.image == image).nonzero()[:, 0]
        sizes = tiles.tokens.counts[rows].tolist()
        if budget < len(sizes):
            raise ValueError(
                f"keep={budget} is less than the picture's {len(sizes)} tiles, and budget='per_tile' keeps one token "
                "of each at least; keep more, or say budget='global'"
            )
        out[rows] = torch.tensor(shares(budget, sizes), device=out.device)
    return out


def shares(total: int, sizes: Sequence[int]) -> list[int]:
    """Whole numbers from 1 to each size, in proportion to the sizes, that sum to `total` (largest remainder)."""
    exact = [total * size / sum(sizes) for size in sizes]
    out = [max(1, math.floor(share)) for share in exact]
    while sum(out) < total:
        open_tiles = [tile for tile, size in enumerate(sizes) if out[tile] < size]
        out[max(open_tiles, key=lambda tile: (exact[tile] - out[tile], -tile))] += 1
    while sum(out) > total:  # tiles raised to one took it from the others
        out[
            min((tile for tile in range(len(out)) if out[tile] > 1), key=lambda tile: (exact[tile] - out[tile], -tile))
        ] -= 1
    return out


def _rows(value: Tensor, flat: Int[Tensor, "R M"]) -> Tensor:
    """Per-token values [B, N, ...] by tile [R, M, ...], zeros at padding."""
    out = value.flatten(0, 1)[flat.clamp_min(0)]
    return out.masked_fill((flat < 0).view(*flat.shape, *(1,) * (out.ndim - 2)), 0)


def _spread(value: Tensor, tiles: Tiles, tokens: VisualTokens) -> Tensor:
    """Per-token values by tile [R, M, ...] back in their images [B, N, ...], zeros at padding."""
    real = tiles.index >= 0
    image = tiles.image[:, None].expand_as(tiles.index)[real]
    out = value.new_zeros(*tokens.mask.shape, *value.shape[2:])
    return out.index_put((image, tiles.index[real]), value[real])


def mean_by_image(values: Float[Tensor, " R"], image: Int[Tensor, " R"], num_images: int) -> Float[Tensor, " B"]:
    """What tiles have as a mean over each image's, so that none weighs by their number."""
    count = values.new_zeros(num_images).index_add(0, image, torch.ones_like(values))
    return values.new_zeros(num_images).index_add(0, image, values) / count.clamp(min=1)


def _gathered(keep: Int[Tensor, "R K"], tiles: Tiles, num_images: int) -> tuple[Tensor, Tensor]:
    """What tiles keep as indices per image, ascending, and for each its place in the flattened `keep` (-1: padding)."""
    places = torch.where(keep >= 0, tiles.index.gather(1, keep.clamp_min(0)), -1)
    rows, orders = [], []
    for image in range(num_images):
        chosen = ((tiles.image == image)[:, None] & (places >= 0)).flatten().nonzero()[:, 0]
        row, order = places.flatten()[chosen].sort()
        rows.append(row)
        orders.append(chosen[order])
    return pad_rows(rows, -1), pad_rows(orders, -1)


def _grid(boxes: Tensor | None, num_tokens: int) -> Grid:
    """(rows, columns) of one tile, from where its tokens look."""
    if boxes is None:
        return num_tokens, 1
    grid = len(boxes[:, 1].unique()), len(boxes[:, 0].unique())
    return grid if grid[0] * grid[1] == num_tokens else (num_tokens, 1)
