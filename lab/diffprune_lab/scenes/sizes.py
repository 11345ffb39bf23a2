"""Pictures of a scene at other sizes than the one it is drawn at, the same to the bit on every device.

There are three ways to size what a model is shown: `fixed` as drawn (192 x 192), `384` twice as large, and `varying`,
where each scene has a height and a width of its own. A model's folder may say which is its own, in `scenes.json`.
"""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from diffprune.rng import Rng
from diffprune_lab.scenes.draw import PICTURE, pack, render
from diffprune_lab.scenes.world import Scene

WAYS = ("fixed", "384", "varying")
SIDES = tuple(range(160, 272 + 1, 16))  # heights and widths of `varying`
SIZES_FILE = "scenes.json"
STREAM = "picture size"  # key of the random numbers drawn here, so that no other part of the world shares them

_BITS = 22  # of a weight behind the point: a weight times a byte, summed over sources, fits into int32
_HALF = 1 << (_BITS - 1)  # so that the shift rounds to the nearest


# Which size ----------------------------------------------------------------------------------------------------------


def require_way(sizes: str) -> str:
    """The same, where it is a way of sizes; else a `ValueError`."""
    if sizes not in WAYS:
        raise ValueError(f"sizes={sizes!r} is no way to size pictures; choose from {', '.join(WAYS)}")
    return sizes


def picture_size(scene: Scene, sizes: str) -> tuple[int, int]:
    """(height, width) of the picture of a scene; with `varying` it follows from the scene's split and number alone."""
    if sizes == "varying":
        rng = Rng(STREAM, scene.split, scene.index)
        return rng.choice(SIDES), rng.choice(SIDES)
    (size,) = possible_sizes(sizes)
    return size


def possible_sizes(sizes: str) -> list[tuple[int, int]]:
    """Every (height, width) a picture may have."""
    if sizes == "varying":
        return [(height, width) for height in SIDES for width in SIDES]
    side = PICTURE if sizes == "fixed" else int(require_way(sizes))
    return [(side, side)]


def model_sizes(name: str | Path) -> str:
    """The way of sizes that a model was made for: what `scenes.json` in its folder says, else `fixed`.

    Args:
        name: A folder, or the name of a model that comes with the package.
    """
    from diffprune_lab.scenes.reference import ASSETS

    for folder in (ASSETS / name, Path(name)):
        path = folder / SIZES_FILE
        if str(name) and path.is_file():
            try:
                return require_way(str(json.loads(path.read_text(encoding="utf-8"))["sizes"]))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f'{path} does not say which sizes ({error}); write {{"sizes": "varying"}}') from error
    return "fixed"


# Pixels --------------------------------------------------------------------------------------------------------------


def _bilinear(x: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    return np.maximum(0.0, 1.0 - x)


def _bicubic(x: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """Keys' cubic with a = -0.5."""
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


KERNELS = {"bilinear": (_bilinear, 1.0), "bicubic": (_bicubic, 2.0)}  # weight by distance, and the largest distance


def draw_sized(scenes: Sequence[Scene], sizes: str, device: torch.device | str = "cpu") -> list[UInt8[Tensor, "3 _ _"]]:
    """The picture of each scene at its size."""
    drawn = render(pack(scenes), device)
    assert isinstance(drawn, Tensor)  # its second form, with owners, was not asked for
    rows: dict[tuple[int, int], list[int]] = {}
    for row, scene in enumerate(scenes):
        rows.setdefault(picture_size(scene, sizes), []).append(row)
    pictures: dict[int, Tensor] = {}
    for size, some in rows.items():  # all pictures of one size at once
        pictures.update(zip(some, resize(drawn[some], *size), strict=True))
    return [pictures[row] for row in range(len(scenes))]


def resize(
    pixels: UInt8[Tensor, "B 3 H W"], height: int, width: int, kernel: str = "bilinear"
) -> UInt8[Tensor, "B 3 {height} {width}"]:
    """The pictures at another size, antialiased where they become smaller: first the width, then the height.

    Both as Pillow does it, to the bit, in integers and rounded to bytes after each.

    Args:
        kernel: "bilinear" or "bicubic".
    """
    if height < 1 or width < 1:
        raise ValueError(f"a picture of {height} x {width} pixels is empty; give at least one pixel each way")
    for axis, length in ((3, width), (2, height)):
        if pixels.shape[axis] != length:
            pixels = _stretch(pixels, axis, length, kernel)
    return pixels


def _stretch(pixels: UInt8[Tensor, "B 3 _ _"], axis: int, length: int, kernel: str) -> UInt8[Tensor, "B 3 _ _"]:
    """The pictures with another length along one axis."""
    sources, weights = _taps(pixels.shape[axis], length, kernel, pixels.device)
    shape = (-1, 1) if axis == 2 else (-1,)
    total: Tensor | None = None
    for source, weight in zip(sources, weights, strict=True):
        part = pixels.index_select(axis, source).to(torch.int32).mul_(weight.view(shape))
        total = part.add_(_HALF) if total is None else total.add_(part)
    assert total is not None
    return total.bitwise_right_shift_(_BITS).clamp_(0, 255).to(torch.uint8)


@cache
def _taps(length: int, target: int, kernel: str, device: torch.device) -> tuple[tuple[Tensor, ...], ...]:
    """For each new pixel its sources, and their weights in fixed point; one vector of each for every source."""
    shape, radius = KERNELS[kernel]
    scale = length / target
    spread = max(1.0, scale)
    centre = (np.arange(target) + 0.5) * scale
    first = np.maximum(0, (centre - radius * spread + 0.5).astype(np.int64))
    last = np.minimum(length, (centre + radius * spread + 0.5).astype(np.int64))
    places = first[:, None] + np.arange((last - first).max())  # [target, sources]
    share = shape(np.abs(places - centre[:, None] + 0.5) / spread)
    share[places >= last[:, None]] = 0.0
    exact = share / share.sum(1, keepdims=True) * 2.0**_BITS
    weights = np.trunc(exact + np.copysign(0.5, exact)).astype(np.int32)
    places = places.clip(0, length - 1)
    return tuple(
        tuple(torch.from_numpy(np.ascontiguousarray(column)).to(device) for column in table.T)
        for table in (places, weights)
    )
