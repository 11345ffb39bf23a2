"""What LLaVA-NeXT and LLaVA-OneVision share: which tiles a picture becomes, and where they look in it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers.image_processing_utils import get_patch_output_size, select_best_resolution
from transformers.image_utils import ChannelDimension

from diffprune.backbones._clip import grid_boxes


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The tiles of a picture joined to one large view, after its padding was cut away.

    Args:
        rows, columns: Tokens of the view.
        x, y: Borders of the view in pixels of the original picture, (first, last).
    """

    rows: int
    columns: int
    x: tuple[float, float]
    y: tuple[float, float]


def num_tiles_of(size: tuple[int, int], pinpoints: Sequence[Sequence[int]], tile: int) -> int:
    """Tiles of a picture of (width, height), the overview included."""
    rows, columns = tile_grid(size, pinpoints, tile)
    return rows * columns + 1


def unpadded(size: tuple[int, int], pinpoints: Sequence[Sequence[int]], tile: int, side: int) -> View:
    """The large view of a picture: scaled to fit the best resolution, centred, padded, cut into tiles, unpadded.

    Args:
        size: (width, height) of the picture.
        pinpoints: Resolutions (height, width) the processor may choose.
        tile: Pixels along one side of a tile.
        side: Patches along it.
    """
    width, height = size
    best_height, best_width = select_best_resolution((height, width), [list(point) for point in pinpoints])
    scaled_height, scaled_width = get_patch_output_size(
        torch.empty(1, height, width, device="meta"), (best_height, best_width), ChannelDimension.FIRST
    )
    rows, columns = best_height // tile * side, best_width // tile * side
    # The model cuts whole rows or columns of patches, and fewer rather than more.
    cut_rows = cut_columns = 0
    if width / height > columns / rows:
        cut_rows = (rows - int(round(height * (columns / width), 7))) // 2
    else:
        cut_columns = (columns - int(round(width * (rows / height), 7))) // 2
    patch = tile / side

    def original(first: int, last: int, padding: int, scale: float) -> tuple[float, float]:
        return (first * patch - padding) * scale, (last * patch - padding) * scale

    return View(
        rows=rows - 2 * cut_rows,
        columns=columns - 2 * cut_columns,
        x=original(cut_columns, columns - cut_columns, (best_width - scaled_width) // 2, width / scaled_width),
        y=original(cut_rows, rows - cut_rows, (best_height - scaled_height) // 2, height / scaled_height),
    )


def joined_boxes(size: tuple[int, int], view: View | None, side: int) -> Float[Tensor, "N 4"]:
    """Where the overview's side x side tokens look, then those of the large view; clipped to the picture."""
    width, height = size
    parts = [grid_boxes(torch.linspace(0, width, side + 1), torch.linspace(0, height, side + 1))]
    if view is not None:
        parts.append(view_boxes(size, view))
    return torch.cat(parts)


def view_boxes(size: tuple[int, int], view: View) -> Float[Tensor, "N 4"]:
    """Where each token of a view looks, clipped to the picture."""
    width, height = size
    x = torch.linspace(*view.x, view.columns + 1).clamp(0, width)
    y = torch.linspace(*view.y, view.rows + 1).clamp(0, height)
    return grid_boxes(x, y)


def sizes_of(features: Mapping[str, Tensor]) -> list[tuple[int, int]]:
    """(width, height) of the original pictures."""
    return [(int(width), int(height)) for height, width in features["image_sizes"].tolist()]


def real_tiles(
    features: Mapping[str, Tensor], config: Any, whole: Sequence[bool] | None = None
) -> tuple[Float[Tensor, "tiles C H W"], list[int]]:
    """The tiles of all pictures in one row, less those that only pad the batch, and how many each picture has.

    Args:
        features: `pixel_values` [I, tiles, C, H, W] and `image_sizes` (height, width).
        config: The model's.
        whole: True for pictures that were not cut at all.
    """
    sizes = sizes_of(features)
    tile = config.vision_config.image_size
    counts = [
        1 if whole is not None and whole[index] else num_tiles_of(size, config.image_grid_pinpoints, tile)
        for index, size in enumerate(sizes)
    ]
    pixels = [image[:count] for image, count in zip(features["pixel_values"], counts, strict=True)]
    return torch.cat(pixels), counts


def tile_grid(size: tuple[int, int], pinpoints: Sequence[Sequence[int]], tile: int) -> tuple[int, int]:
    """Tiles down and across of a picture of (width, height), the overview not among them."""
    height, width = select_best_resolution((size[1], size[0]), [list(point) for point in pinpoints])
    return height // tile, width // tile
