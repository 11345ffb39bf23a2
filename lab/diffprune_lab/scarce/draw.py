"""Scenes to pixels, a whole batch at once, in integers only: a GPU draws exactly what a CPU draws."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain

import numpy as np
import torch
from jaxtyping import Int, Int16, UInt8
from torch import Tensor

from diffprune_lab.scarce import grounds, masks
from diffprune_lab.scarce.world import Scene, sprites

PICTURE = grounds.PICTURE
PIXELS = PICTURE * PICTURE
PARTS = 8  # a label is owner * PARTS + part
_CHUNK = 64  # pictures whose grounds are painted together

Packed = Mapping[str, np.ndarray | Tensor]


def pack(scenes: Sequence[Scene]) -> dict[str, np.ndarray]:
    """The drawing programs of a batch: `sprites` [S, 6], `counts` [B], `ground` [B, 1 + 5 R] (region map, regions)."""
    if not scenes:
        raise ValueError("There is nothing to draw: give pack() at least one scene.")
    drawn = [sprites(scene) for scene in scenes]
    counts = np.array([len(one) for one in drawn], dtype=np.int32)
    flat = chain.from_iterable(chain.from_iterable(drawn))
    ground = [(scene.region_map, *chain.from_iterable(scene.regions)) for scene in scenes]
    return {
        "sprites": np.fromiter(flat, dtype=np.int32, count=6 * int(counts.sum())).reshape(-1, 6),
        "counts": counts,
        "ground": np.array(ground, dtype=np.int32),
    }


def render(
    packed: Packed, device: torch.device | str = "cpu"
) -> tuple[UInt8[Tensor, "B 3 192 192"], Int16[Tensor, "B 192 192"], Int16[Tensor, "B 192 192"]]:
    """(pixels, labels, regions): the pictures, owner * PARTS + part of each pixel, and the region behind it."""
    arrays = {name: torch.as_tensor(packed[name]) for name in ("sprites", "counts", "ground")}
    device = torch.device(device)
    batch = len(arrays["counts"])
    pixels = torch.empty(batch, 3, PIXELS, dtype=torch.uint8, device=device)
    labels = torch.zeros(batch, PIXELS, dtype=torch.int16, device=device)
    behind = torch.empty(batch, PIXELS, dtype=torch.int16, device=device)
    ground = arrays["ground"].to(device, non_blocking=True)
    for start in range(0, batch, _CHUNK):
        rows = slice(start, start + _CHUNK)
        _paint_ground(pixels[rows], behind[rows], ground[rows])
    _paint_sprites(pixels, labels, arrays["sprites"], arrays["counts"])
    shape = (batch, PICTURE, PICTURE)
    return pixels.view(batch, 3, PICTURE, PICTURE), labels.view(shape), behind.view(shape)


@dataclass(frozen=True, slots=True)
class _Stores:
    """Masks and textures on one device."""

    textures: Tensor  # [T * 256 * 256] int16
    regions: Tensor  # [R, P] int64
    grounds: Tensor  # [color, 3] int16
    across: Tensor  # [P] int64, column of each pixel
    down: Tensor  # [P] int64, row of each pixel
    palette: Tensor  # [color * 2, 3] int16
    offsets: Tensor
    coverages: Tensor
    tones: Tensor
    parts: Tensor


@cache
def _stores(device: torch.device) -> _Stores:
    def put(array: np.ndarray, kind: type) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array).astype(kind)).to(device)

    place = np.arange(PIXELS)
    return _Stores(
        textures=put(grounds.textures().reshape(-1), np.int16),
        regions=put(grounds.region_maps().reshape(-1, PIXELS), np.int64),
        grounds=put(np.array(grounds.GROUND_COLORS), np.int16),
        across=put(place % PICTURE, np.int64),
        down=put(place // PICTURE, np.int64),
        palette=put(masks.PALETTE.reshape(-1, 3), np.int16),
        offsets=put(masks.OFFSETS, np.int64),
        coverages=put(masks.COVERAGES, np.int16),
        tones=put(masks.TONES, np.int64),
        parts=put(masks.PARTS, np.int16),
    )


def _paint_ground(pixels: UInt8[Tensor, "B 3 P"], behind: Int16[Tensor, "B P"], ground: Int[Tensor, "B G"]) -> None:
    """Each pixel blends the two colors of its region by the region's texture, in place."""
    stores = _stores(pixels.device)
    region = stores.regions.index_select(0, ground[:, 0].long())  # [B, P]
    number, right, down, one, two = (
        part.long().gather(1, region) for part in ground[:, 1:].view(len(ground), grounds.REGIONS, 5).unbind(2)
    )
    row, column = (stores.down + down) % grounds.SIDE, (stores.across + right) % grounds.SIDE
    place = (number * grounds.SIDE + row) * grounds.SIDE + column
    weight = stores.textures.index_select(0, place.flatten()).view_as(place)[:, None]
    first, second = (
        stores.grounds.index_select(0, color.flatten()).view(*color.shape, 3).transpose(1, 2) for color in (one, two)
    )
    pixels.copy_(((second - first) * weight).bitwise_right_shift_(6).add_(first))
    behind.copy_(region)


def _paint_sprites(
    pixels: UInt8[Tensor, "B 3 P"], labels: Int16[Tensor, "B P"], drawn: Int[Tensor, "S 6"], counts: Int[Tensor, " B"]
) -> None:
    """Paint the sprites over what is there, in place, in three layers: things and plates, tiles, glyphs."""
    mask, x, y, one, two, owner = drawn.long().unbind(1)
    picture = torch.repeat_interleave(counts.long())
    corner = y * PICTURE + x
    lengths, starts = (torch.from_numpy(array)[mask] for array in (masks.LENGTHS, masks.STARTS))
    columns = torch.stack([lengths, starts, picture, corner, one, two, owner])
    layers = (
        mask < masks.LETTER_TILE,
        (mask >= masks.LETTER_TILE) & (mask < masks.FIRST_GLYPH),
        mask >= masks.FIRST_GLYPH,
    )
    for layer in layers:
        if layer.any():
            _paint_layer(pixels, labels, columns[:, layer])


def _paint_layer(pixels: UInt8[Tensor, "B 3 P"], labels: Int16[Tensor, "B P"], columns: Int[Tensor, "7 S"]) -> None:
    """Paint sprites that do not touch each other: one gather and one scatter for all their texels."""
    stores, device = _stores(pixels.device), pixels.device
    total = int(columns[0].sum())  # on the CPU, so the device is never waited for
    columns[1] -= columns[0].cumsum(0) - columns[0]
    lengths, shift, picture, corner, one, two, owner = columns.to(device, non_blocking=True)
    sprite = torch.repeat_interleave(lengths, output_size=total)  # [X]
    texel = shift[sprite] + torch.arange(total, device=device)
    tone = stores.tones[texel]
    color = torch.where(tone % 2 == 0, one[sprite], two[sprite])
    paint = stores.palette[color * 2 + tone // 2].T  # [3, X]
    at = corner[sprite] + stores.offsets[texel]
    label_place = picture[sprite] * PIXELS + at
    place = picture[sprite] * 3 * PIXELS + at
    place = (place + torch.arange(3, device=device)[:, None] * PIXELS).reshape(-1)
    flat = pixels.view(-1)
    under = flat[place].view(3, -1).to(torch.int16)
    paint = ((paint - under) * stores.coverages[texel]).bitwise_right_shift_(4).add_(under)
    flat.scatter_(0, place, paint.reshape(-1).to(torch.uint8))
    shown = stores.coverages[texel] * 2 >= masks.FULL
    label = (owner[sprite] * PARTS).to(torch.int16) + stores.parts[texel]
    labels_flat = labels.view(-1)
    labels_flat.scatter_(0, label_place, torch.where(shown, label, labels_flat[label_place]))
