"""What a model's processor makes of pictures it need not resize, made where the pictures are: the same, but quickly.

A processor takes pictures one by one on the CPU, ten milliseconds each. Pictures of scenes are drawn on the device, and
for models made for their sizes nothing is left to do but to cut and to normalise.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor
from transformers.image_processing_utils import select_best_resolution
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from diffprune.backbones.base import Backbone
from diffprune_lab.scenes.sizes import possible_sizes, resize

Size = tuple[int, int]  # (height, width)
Picture = UInt8[Tensor, "3 _ _"]
Features = dict[str, Tensor]


def takes_pixels(backbone: Backbone, sizes: str) -> bool:
    """Whether the processor leaves pictures as large as they are; False too in a family that is not known here.

    Args:
        sizes: How the pictures are sized (`scenes.sizes.WAYS`).
    """
    if backbone.family not in WAYS:
        return False
    fits = WAYS[backbone.family][0]
    return all(fits(backbone.processor.image_processor, size) for size in possible_sizes(sizes))


def make_features(backbone: Backbone, pictures: Sequence[Picture]) -> Features:
    """What the processor would give for the pictures beside the ids of a prompt, on their device."""
    return WAYS[backbone.family][1](backbone.processor.image_processor, pictures)


def normalise(processor: Any, pixels: UInt8[Tensor, "*B 3 H W"]) -> Float[Tensor, "*B 3 H W"]:
    """Pixels as the image processor scales them."""
    mean, std = (
        torch.tensor(value, device=pixels.device)[:, None, None]
        for value in (processor.image_mean, processor.image_std)
    )
    return (pixels * processor.rescale_factor - mean) / std


# A picture whole (LLaVA) ---------------------------------------------------------------------------------------------


def _is_whole(processor: Any, size: Size) -> bool:
    lengths = {*dict(processor.size or {}).values(), *dict(getattr(processor, "crop_size", None) or {}).values()}
    return lengths == set(size) and len(lengths) == 1


def _whole(processor: Any, pictures: Sequence[Picture]) -> Features:
    return {"pixel_values": normalise(processor, torch.stack(list(pictures)))}


# An overview and tiles (LLaVA-NeXT) ----------------------------------------------------------------------------------


def _is_tiled(processor: Any, size: Size) -> bool:
    """Whether a picture is cut into whole tiles as it is; the overview is always made smaller."""
    tile: int = dict(processor.crop_size)["height"]
    lengths = {*dict(processor.size).values(), *dict(processor.crop_size).values()}
    if lengths != {tile} or processor.resample != Image.Resampling.BICUBIC:
        return False
    best = select_best_resolution(size, [list(point) for point in processor.image_grid_pinpoints])
    return tuple(best) == size and size[0] % tile == size[1] % tile == 0


def _tiles(processor: Any, pictures: Sequence[Picture]) -> Features:
    tile = dict(processor.crop_size)["height"]

    def cut(pixels: UInt8[Tensor, "B 3 H W"]) -> Float[Tensor, "B X 3 tile tile"]:
        overview = resize(pixels, tile, tile, "bicubic")
        tiles = pixels.unfold(2, tile, tile).unfold(3, tile, tile)  # [B, 3, rows, columns, tile, tile]
        return normalise(processor, torch.cat([overview[:, None], tiles.flatten(2, 3).transpose(1, 2)], dim=1))

    values = by_size(pictures, cut)
    most = max(len(value) for value in values)
    padded = [torch.cat([value, value.new_zeros(most - len(value), *value.shape[1:])]) for value in values]
    sizes = [list(picture.shape[-2:]) for picture in pictures]
    return {"pixel_values": torch.stack(padded), "image_sizes": torch.tensor(sizes, device=pictures[0].device)}


# Patches, group after group (Qwen) -----------------------------------------------------------------------------------


def _is_native(processor: Any, size: Size) -> bool:
    limits = dict(processor.size)
    factor = processor.patch_size * processor.merge_size
    pixels = {"min_pixels": limits["shortest_edge"], "max_pixels": limits["longest_edge"]}
    return tuple(smart_resize(*size, factor=factor, **pixels)) == size


def _patches(processor: Any, pictures: Sequence[Picture]) -> Features:
    patch, merge, frames = processor.patch_size, processor.merge_size, processor.temporal_patch_size

    def cut(pixels: UInt8[Tensor, "B 3 H W"]) -> Float[Tensor, "B P E"]:
        values = normalise(processor, pixels)
        split = values.unflatten(3, (-1, merge, patch)).unflatten(2, (-1, merge, patch))
        groups = split.permute(0, 2, 5, 3, 6, 1, 4, 7)  # [B, rows, columns, merge, merge, 3, patch, patch]
        still = groups[:, :, :, :, :, :, None].expand(*groups.shape[:6], frames, *groups.shape[6:])
        return still.flatten(5).flatten(1, 4)

    grid = [[1, picture.shape[-2] // patch, picture.shape[-1] // patch] for picture in pictures]
    return {
        "pixel_values": torch.cat(by_size(pictures, cut)),
        "image_grid_thw": torch.tensor(grid, device=pictures[0].device),
    }


# ---------------------------------------------------------------------------------------------------------------------


def by_size(pictures: Sequence[Picture], cut: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The function's row for each picture; those of one size go through it together."""
    rows: dict[torch.Size, list[int]] = {}
    for row, picture in enumerate(pictures):
        rows.setdefault(picture.shape, []).append(row)
    found: dict[int, Tensor] = {}
    for some in rows.values():
        found.update(zip(some, cut(torch.stack([pictures[row] for row in some])), strict=True))
    return [found[row] for row in range(len(pictures))]


# By family: whether pictures of a size are left as large as they are, and what becomes of them.
WAYS: dict[str, tuple[Callable[[Any, Size], bool], Callable[[Any, Sequence[Picture]], Features]]] = {
    "llava": (_is_whole, _whole),
    "llava_next": (_is_tiled, _tiles),
    "qwen2_vl": (_is_native, _patches),
    "qwen2_5_vl": (_is_native, _patches),
    "qwen3_vl": (_is_native, _patches),
}
