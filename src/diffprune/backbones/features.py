"""What a processor gave for prompts and pictures, as a user hands it over, made a batch."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from diffprune.backbones.processors import move_features
from diffprune.backbones.prompts import Batch
from diffprune.types import Grid

# What processors give, over all families.
FEATURES = frozenset(
    {
        "input_ids",
        "attention_mask",
        "token_type_ids",
        "mm_token_type_ids",
        "pixel_values",
        "pixel_attention_mask",
        "image_sizes",
        "image_grid_thw",
        "batch_num_images",
    }
)
VIDEOS = ("pixel_values_videos", "video_grid_thw")


@dataclass(frozen=True, slots=True)
class Layout:
    """The pictures of a processor's output, in their order.

    Args:
        placeholders: How many each has in the prompts.
        sizes: (width, height) of each, as far as the output tells.
        tile_grids: (rows, columns) of each one's tiles, in families that cut pictures by a rule of their size.
    """

    placeholders: list[int]
    sizes: list[tuple[int, int]]
    tile_grids: list[Grid] | None = None


def read_features(backbone: Any, given: Mapping[str, Any]) -> Batch:
    """A processor's output as a batch; see `Asking.read`."""
    for key in VIDEOS:
        if given.get(key) is not None:
            raise ValueError(f"{key} is given, and videos are not pruned here; give pictures")
    device, dtype = backbone.model.get_input_embeddings().weight.device, backbone.model.dtype
    features = move_features({key: given[key] for key in FEATURES & given.keys()}, device, dtype)
    ids = features.get("input_ids")
    if ids is None or ids.ndim != 2:
        raise ValueError('input_ids is no tensor of [prompts, tokens]; call the processor with return_tensors="pt"')
    mask = features.setdefault("attention_mask", torch.ones_like(ids))
    if mask.shape != ids.shape or not bool(mask[:, -1].all()):
        raise ValueError('padding stands behind the prompts; call the processor with padding_side="left"')
    for key in backbone.sequence_features:  # what a prompt has there: nothing of it is an answer
        features.setdefault(key, torch.zeros_like(ids))
    if "pixel_values" not in features:
        return Batch(features=features)
    layout = backbone.picture_layout(features)
    batch = Batch(
        features=features,
        row_of_image=rows_of(((ids == backbone.image_token_id) & mask.bool()).sum(-1).tolist(), layout.placeholders),
        sizes=tuple(layout.sizes),
        seeds=(0,) * len(layout.sizes),
        tile_grids=None if layout.tile_grids is None else tuple(layout.tile_grids),
    )
    parts = [backbone.pictures_of(batch, [image]).features["pixel_values"] for image in range(batch.num_images)]
    return replace(batch, seeds=tuple(seed_of(part) for part in parts))


def rows_of(in_prompt: list[int], of_picture: list[int]) -> tuple[int, ...]:
    """The prompt of each picture, from the placeholders of both."""
    remaining, rows = list(of_picture), []
    for row, count in enumerate(in_prompt):
        while count > 0 and remaining:
            count -= remaining.pop(0)
            rows.append(row)
        if count != 0:
            break
    if remaining or len(rows) != len(of_picture) or sum(in_prompt) != sum(of_picture):
        raise ValueError(
            f"the prompts hold {sum(in_prompt)} image placeholders but the pictures fill {sum(of_picture)}; "
            "process text and images in one call"
        )
    return tuple(rows)


def seed_of(pixels: Tensor) -> int:
    """A number made from a picture's processed pixels, the tiles that pad it to the batch aside."""
    if pixels.ndim == 5:
        tiles = pixels.flatten(0, 1)
        pixels = tiles[tiles.flatten(1).any(-1)]
    digest = hashlib.blake2b(pixels.float().cpu().contiguous().numpy().tobytes(), digest_size=7)
    return int.from_bytes(digest.digest(), "big")
