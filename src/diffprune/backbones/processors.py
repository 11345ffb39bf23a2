"""Pictures in, checked: whatever a user hands over becomes an 8-bit RGB image, or one clear sentence."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

MAX_PIXELS = 200_000_000


def open_image(source: Any) -> Image.Image:
    """An RGB picture from a path, a PIL image or an array [height, width, 3] of bytes.

    Grey, palette, transparent and CMYK pictures are converted; 16-bit ones are scaled to 8 bits (a plain conversion
    would clip them to white).
    """
    if isinstance(source, str | os.PathLike):
        return _read(Path(source))
    if isinstance(source, Image.Image):
        return _checked(source)
    if isinstance(source, np.ndarray):
        if source.dtype != np.uint8 or source.ndim != 3 or source.shape[-1] != 3:
            raise ValueError(
                f"an image array of shape {source.shape} and type {source.dtype}; give bytes [height, width, 3]"
            )
        return _checked(Image.fromarray(source))
    raise ValueError(f"{type(source).__name__} is no image; give a path, a PIL image or an array of bytes")


def open_by_prompt(images: Any, *, num_prompts: int, single: bool) -> list[list[Image.Image]]:
    """The pictures of each prompt.

    Args:
        images: None, for one prompt its images, or one entry for each prompt: an image, a list of them, or None.
        single: Whether `images` are those of one prompt.
    """
    if images is None:
        return [[] for _ in range(num_prompts)]
    if not isinstance(images, (list, tuple)):
        raise ValueError(f"images is a {type(images).__name__}; give a list of images, even for one")
    if single:
        return [[open_image(image) for image in images]]
    if len(images) != num_prompts:
        raise ValueError(
            f"{len(images)} entries in images for {num_prompts} prompts; give one each (None for text only)"
        )
    rows = [[] if row is None else list(row) if isinstance(row, (list, tuple)) else [row] for row in images]
    return [[open_image(image) for image in row] for row in rows]


def _read(path: Path) -> Image.Image:
    if not path.is_file():
        raise ValueError(f"there is no image file {path}")
    if path.stat().st_size == 0:
        raise ValueError(f"the image file {path} is empty")
    with path.open("rb") as file:
        try:
            image = Image.open(file)
        except Image.DecompressionBombError as error:
            raise ValueError(f"the image {path} is too large to open ({error}); scale it down first") from error
        except (UnidentifiedImageError, OSError, SyntaxError) as error:
            raise ValueError(f"{path} is no image that can be read ({error})") from error
        return _checked(image)


def _checked(image: Image.Image) -> Image.Image:
    if min(image.size) < 1:
        raise ValueError(
            f"the image is empty ({image.width} x {image.height} pixels); give one with at least one pixel"
        )
    if image.width * image.height > MAX_PIXELS:
        raise ValueError(f"the image has {image.width} x {image.height} pixels; scale it below {MAX_PIXELS:,} first")
    frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)  # MPO: a photograph and its preview
    if frames > 1:
        raise ValueError(f"the image is animated ({frames} frames); choose one with image.seek(i), image.copy()")
    try:
        return _to_rgb(image)
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"the image cannot be decoded ({error}); it may be cut short, save it anew") from error


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode in ("I", "I;16", "I;16B", "I;16L"):
        return Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ValueError("a picture of floats has no fixed range; convert it to bytes first")
    return image.convert("RGB")


def pixel_seed(image: Image.Image | np.ndarray) -> int:
    """A number made from a picture's pixels alone, so that what is drawn at random for it is the same in any batch.

    Args:
        image: A picture, or its bytes [height, width, 3].
    """
    width, height = image.size if isinstance(image, Image.Image) else image.shape[1::-1]
    digest = hashlib.blake2b(image.tobytes(), digest_size=7, salt=f"{width}x{height}".encode()[:16])
    return int.from_bytes(digest.digest(), "big")


def move_features(features: Mapping[str, Any], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of a processor's output on a device, those of floats in the model's type."""
    return {
        key: value.to(device=device, dtype=dtype if value.is_floating_point() else value.dtype)
        for key, value in features.items()
        if isinstance(value, Tensor)
    }
