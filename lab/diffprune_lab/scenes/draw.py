"""Scenes to pixels, a whole batch at once, in integers only: a GPU draws exactly what a CPU draws.

A batch is drawn in three steps. The ground of every picture is a blend of two colors by a stored pattern of weights.
Then all sprites are painted together: each brings the row of texels of its mask, so the work is one gather and one
scatter over the pixels that really change, however many sprites there are. Two layers, because letters lie on plates;
within a layer no two sprites touch. Last, the few pictures that are not clear are blurred, darkened and grained.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain

import numpy as np
import torch
from jaxtyping import Int16, Int32, UInt8
from torch import Tensor

from diffprune_lab.scenes import atlas, grounds
from diffprune_lab.scenes.world import Scene

PICTURE = atlas.PICTURE
_PIXELS = PICTURE * PICTURE
_CHUNK = 32  # pictures drawn together on a CPU: what they need stays in the cache

Packed = Mapping[str, np.ndarray | Tensor]


def pack(scenes: Sequence[Scene]) -> dict[str, np.ndarray]:
    """The drawing programs of a batch as four small int32 arrays, cheap to make and to send.

    `sprites` [S, 5] holds mask, x, y, color and owner of every sprite of the batch, `counts` [B] how many of them
    belong to each picture, `ground` [B, 3] and `finish` [B, 3] what `Scene` says of them.
    """
    if not scenes:
        raise ValueError("There is nothing to draw: give pack() at least one scene.")
    counts = np.array([len(scene.sprites) for scene in scenes], dtype=np.int32)
    flat = chain.from_iterable(chain.from_iterable(scene.sprites for scene in scenes))
    return {
        "sprites": np.fromiter(flat, dtype=np.int32, count=5 * int(counts.sum())).reshape(-1, 5),
        "counts": counts,
        "ground": np.array([scene.ground for scene in scenes], dtype=np.int32),
        "finish": np.array([scene.finish for scene in scenes], dtype=np.int32),
    }


def render(
    packed: Packed, device: torch.device | str = "cpu", owner: bool = False
) -> UInt8[Tensor, "B 3 192 192"] | tuple[UInt8[Tensor, "B 3 192 192"], UInt8[Tensor, "B 192 192"]]:
    """The pictures of a packed batch, and with `owner` also a map of what each pixel belongs to.

    In the owner map 0 is background or clutter, 1 to 4 a thing (its place in `Scene.things`, counted from 1), 5 a
    sign's plate, and from 6 on a glyph: the letters of the sign, or the tags of the things in a diagram.
    """
    arrays = {name: torch.as_tensor(packed[name]) for name in ("sprites", "counts", "ground", "finish")}
    device = torch.device(device)
    batch = len(arrays["counts"])
    pixels = torch.empty(batch, 3, _PIXELS, dtype=torch.uint8, device=device)
    owners = torch.zeros(batch, _PIXELS, dtype=torch.uint8, device=device) if owner else None
    step = _CHUNK if device.type == "cpu" else batch
    ends = arrays["counts"].cumsum(0).tolist()
    for start in range(0, batch, step):
        stop = min(batch, start + step)
        first, last = ends[start - 1] if start else 0, ends[stop - 1]
        _paint_ground(pixels[start:stop], arrays["ground"][start:stop])
        _paint_sprites(
            pixels[start:stop],
            owners[start:stop] if owners is not None else None,
            arrays["sprites"][first:last],
            arrays["counts"][start:stop],
        )
        _finish(pixels[start:stop].view(-1, 3, PICTURE, PICTURE), arrays["finish"][start:stop])
    pictures = pixels.view(batch, 3, PICTURE, PICTURE)
    return pictures if owners is None else (pictures, owners.view(batch, PICTURE, PICTURE))


@dataclass(frozen=True, slots=True)
class _Stores:
    """The atlas on one device."""

    weights: Tensor  # [pattern, 192 * 192] int16
    grounds: Tensor  # [ground, 3] int16
    palette: Tensor  # [3, color * tone] int16
    offsets: Tensor  # [texel] int32
    coverages: Tensor  # [texel] int16
    tones: Tensor  # [texel] int32
    grain: Tensor  # [2 * 192 * 192] int16, the noise twice over: any shift of it is one slice


@cache
def _stores(device: torch.device) -> _Stores:
    def put(array: np.ndarray, kind: type) -> Tensor:
        return torch.from_numpy(array.astype(kind)).to(device)

    return _Stores(
        weights=put(grounds.ground_weights().reshape(-1, _PIXELS), np.int16),
        grounds=put(atlas.GROUND_COLORS, np.int16),
        palette=put(np.ascontiguousarray(atlas.PALETTE.reshape(-1, 3).T), np.int16),
        offsets=put(atlas.TEXEL_OFFSETS, np.int32),
        coverages=put(atlas.TEXEL_VALUES // atlas.TONES, np.int16),
        tones=put(atlas.TEXEL_VALUES % atlas.TONES, np.int32),
        grain=put(np.tile(grounds.grain(), 2), np.int16),
    )


def _paint_ground(pixels: UInt8[Tensor, "B 3 P"], ground: Int32[Tensor, "B 3"]) -> None:
    """Fill the pictures with their grounds, in place: first + (second - first) * weight / 64."""
    stores = _stores(pixels.device)
    pattern, first, second = ground.to(pixels.device, non_blocking=True).unbind(1)
    base = stores.grounds.index_select(0, first)[:, :, None]  # [B, 3, 1]
    slope = stores.grounds.index_select(0, second)[:, :, None] - base
    weights = stores.weights.index_select(0, pattern)[:, None, :]  # [B, 1, P]
    # 64 times a difference of colors fits into int16; the shift rounds down, also below zero.
    pixels.copy_((weights * slope).bitwise_right_shift_(6).add_(base))


def _paint_sprites(
    pixels: UInt8[Tensor, "B 3 P"],
    owners: UInt8[Tensor, "B P"] | None,
    sprites: Int32[Tensor, "S 5"],
    counts: Int32[Tensor, " B"],
) -> None:
    """Paint the sprites over what is there, in place: first all masks but glyphs, then the glyphs."""
    mask, x, y, color, owner = sprites.unbind(1)
    picture = torch.repeat_interleave(counts) * _PIXELS  # first pixel of the sprite's picture in the owner map
    corner = y * PICTURE + x
    starts = torch.from_numpy(atlas.MASK_STARTS)[mask]
    lengths = torch.from_numpy(atlas.MASK_LENGTHS)[mask]
    columns = torch.stack([lengths, starts, picture * 3 + corner, color * atlas.TONES, picture + corner, owner])
    glyph = mask >= atlas.FIRST_GLYPH
    for layer in (columns[:, ~glyph], columns[:, glyph]):
        if layer.shape[1]:
            _paint_layer(pixels, owners, layer.int())


def _paint_layer(
    pixels: UInt8[Tensor, "B 3 P"], owners: UInt8[Tensor, "B P"] | None, columns: Int32[Tensor, "6 S"]
) -> None:
    """Paint sprites that do not touch each other: one gather and one scatter for all their texels.

    Args:
        columns: Of each sprite: number of texels, first texel in the atlas, corner in the flat pixels, first tone of
            its color, corner in the flat owner map, owner.
    """
    stores, device = _stores(pixels.device), pixels.device
    lengths = columns[0]
    total = int(lengths.sum())  # on the CPU, so the device is never waited for
    columns[1] -= lengths.cumsum(0) - lengths  # now: from a place among this layer's texels to one in the atlas
    lengths, shift, corner, color, owner_corner, owner = columns.to(device, non_blocking=True)
    sprite = torch.repeat_interleave(lengths, output_size=total)  # [X], for X texels: whose each one is
    texel = shift.index_select(0, sprite) + torch.arange(total, dtype=torch.int32, device=device)
    offset = stores.offsets.index_select(0, texel)
    shade = color.index_select(0, sprite) + stores.tones.index_select(0, texel)
    channel = torch.arange(3, dtype=torch.int32, device=device)[:, None]
    place = corner.index_select(0, sprite) + offset
    place = (place + channel * _PIXELS).view(-1).long()  # [3 * X], channel by channel
    shade = (shade + channel * stores.palette.shape[1]).view(-1)
    paint = stores.palette.view(-1).index_select(0, shade).view(3, -1)
    flat = pixels.view(-1)
    under = flat.index_select(0, place).view(3, -1).to(torch.int16)
    paint = paint.sub_(under).mul_(stores.coverages.index_select(0, texel)).bitwise_right_shift_(4).add_(under)
    flat.scatter_(0, place, paint.view(-1).to(torch.uint8))
    if owners is not None:
        # Clutter lies where nothing is owned, so writing its 0 changes nothing.
        place = owner_corner.index_select(0, sprite) + offset
        owners.view(-1).scatter_(0, place.long(), owner.to(torch.uint8).index_select(0, sprite))


def _finish(pictures: UInt8[Tensor, "B 3 192 192"], finish: Int32[Tensor, "B 3"]) -> None:
    """Blur, darken and grain the pictures that ask for it, in place."""
    blur, gain, grain = finish.unbind(1)
    stores = _stores(pictures.device)

    # Whole pictures are taken and put back as 64-bit words: eight pixels at a time.
    words = pictures.view(len(pictures), -1).view(torch.int64)

    def change(which: Tensor, operation: Callable[[Tensor, Tensor], Tensor], amount: Tensor) -> None:
        if which.any():
            rows = which.nonzero()[:, 0]
            amount = amount[rows].to(pictures.device, non_blocking=True)
            rows = rows.to(pictures.device, non_blocking=True)
            chosen = words.index_select(0, rows).view(torch.uint8).view(-1, 3, PICTURE, PICTURE)
            changed = operation(chosen.to(torch.int16), amount).to(torch.uint8)
            words.index_copy_(0, rows, changed.view(len(rows), -1).view(torch.int64))

    change(blur == 1, lambda chosen, _: _soften(chosen), blur)
    change(blur == 2, lambda chosen, _: _dissolve(chosen), blur)
    change(gain < 256, _darken, gain)
    change(grain > 0, lambda chosen, shift: _roughen(chosen, stores.grain, shift), grain)


def _soften(pictures: Int16[Tensor, "B 3 H W"]) -> Int16[Tensor, "B 3 H W"]:
    """The pictures slightly out of focus: weights 1 2 1 along both axes, twice."""
    for axis in (2, 3, 2, 3):
        size = pictures.shape[axis]
        first, last = pictures.narrow(axis, 0, 1), pictures.narrow(axis, size - 1, 1)
        wide = torch.cat([first, pictures, last], axis)
        sides = wide.narrow(axis, 0, size) + wide.narrow(axis, 2, size)
        pictures = sides.add_(pictures, alpha=2).add_(2).bitwise_right_shift_(2)
    return pictures


def _dissolve(pictures: Int16[Tensor, "B 3 H W"]) -> Int16[Tensor, "B 3 H W"]:
    """Hardly more than a fog: means over 4 x 4 large blocks, blended into each other, three quarters mean of all."""
    batch, channels, height, _ = pictures.shape
    block = height // 4
    means = pictures.view(batch, channels, 4, block, 4, block).sum((3, 5), dtype=torch.int32) // (block * block)
    means = ((means + 3 * (means.sum((2, 3), keepdim=True, dtype=torch.int32) // 16)) // 4).to(torch.int16)
    place = torch.arange(height, device=pictures.device) - block // 2
    node = place.div(block, rounding_mode="floor")
    weight = ((place - node * block) * 64 // block).to(torch.int16)  # of the next block, in 64ths
    for axis in (2, 3):
        low = means.index_select(axis, node.clamp(0, 3))
        high = means.index_select(axis, (node + 1).clamp(0, 3))
        means = ((high - low) * (weight[:, None] if axis == 2 else weight)).bitwise_right_shift_(6).add_(low)
    return means


def _darken(pictures: Int16[Tensor, "B 3 H W"], gain: Int32[Tensor, " B"]) -> Int16[Tensor, "B 3 H W"]:
    """The pictures times gain / 256, for gains below 128 (so that the product fits into int16)."""
    return (pictures * gain.to(torch.int16)[:, None, None, None]).bitwise_right_shift_(8)


def _roughen(
    pictures: Int16[Tensor, "B 3 H W"], grain: Int16[Tensor, " P"], shift: Int32[Tensor, " B"]
) -> Int16[Tensor, "B 3 H W"]:
    """The pictures under coarse noise, each with its own shift of it."""
    noise = grain.unfold(0, _PIXELS, 1)[shift].view(-1, 1, PICTURE, PICTURE)
    return (pictures + noise).clamp_(0, 255)
