"""Pictures of a scene at other sizes than the one it is drawn at, the same to the bit on every device.

There are three ways to size what a model is shown: `fixed` as drawn (192 x 192), `384` twice as large, and `varying`,
where each scene has a height and a width of its own. A model's folder may say which is its own, in `scenes.json`.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import UInt8
from torch import Tensor

from diffprune.backbones.processors import resize
from diffprune.rng import Rng
from diffprune_lab.scenes.draw import PICTURE, pack, render
from diffprune_lab.scenes.world import Scene

SIZES = ("fixed", "384", "varying")
SIDES = tuple(range(160, 272 + 1, 16))  # heights and widths of `varying`
SIZES_FILE = "scenes.json"
STREAM = "picture size"  # key of the random numbers drawn here, so that no other part of the world shares them


# Which size ----------------------------------------------------------------------------------------------------------


def require_sizes(sizes: str) -> str:
    """The given way of sizes; a `ValueError` where there is none of that name."""
    if sizes not in SIZES:
        raise ValueError(f"sizes={sizes!r} is no way to size pictures; choose from {', '.join(SIZES)}")
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
    side = PICTURE if sizes == "fixed" else int(require_sizes(sizes))
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
                return require_sizes(str(json.loads(path.read_text(encoding="utf-8"))["sizes"]))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f'{path} does not say which sizes ({error}); write {{"sizes": "varying"}}') from error
    return "fixed"


# Pixels --------------------------------------------------------------------------------------------------------------


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
