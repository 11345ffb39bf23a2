"""Pictures before a model sees them: opened and checked, and for pictures on a device what an image processor does.

Whatever a user hands over becomes an 8-bit RGB image, or one clear sentence. A processor takes pictures one by one on
the CPU, ten milliseconds each; where nothing is to be resized, a family makes its features on the device
(`Backbone.pixel_features`) of the parts below.
"""

import hashlib
import io
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO, Any, TypeVar, cast

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from diffprune.ops.transfer import to_device

# What is read, told by content. None of these runs a program, as Pillow does for EPS.
FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "GIF", "BMP", "TIFF", "PPM", "MPO", "JPEG2000")

TELLING = ("JPEG", "MPO", "PNG", "WEBP", "BMP")  # whose first bytes say the size and how the picture is turned
LATE = (b"eXIf", b"iTXt", b"tEXt", b"zTXt")  # chunks that say in a PNG how it is turned; they may lie behind the pixels


@cache
def readable_formats() -> tuple[str, ...]:
    """Those of `FORMATS` that Pillow has a reader for: it stops at a name that it has none for, and tries none behind.

    MPO has none of its own: that of JPEG reads it.
    """
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _limit(name: str, default: int) -> int:
    """A limit from the environment."""
    text = os.environ.get(name, str(default))
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{name}={text} is no number of 1 or more; the default is {default}")
    return int(text)


@dataclass(slots=True)
class Limits:
    """What a picture may have before anything is made of it; set `limits` or the variables of the environment.

    Args:
        max_pixels: Width times height (DIFFPRUNE_MAX_PIXELS).
        max_aspect: The longer side by the shorter one (DIFFPRUNE_MAX_ASPECT). A processor that brings the shorter
            side to 336 pixels makes a gigapixel of a line of 1 x 10,000.
    """

    max_pixels: int = field(default_factory=lambda: _limit("DIFFPRUNE_MAX_PIXELS", 200_000_000))
    max_aspect: int = field(default_factory=lambda: _limit("DIFFPRUNE_MAX_ASPECT", 200))


limits = Limits()
Picture = UInt8[Tensor, "3 _ _"]
T = TypeVar("T")

_BITS = 22  # of a weight behind the point: a weight times a byte, summed over sources, fits into int32
_HALF = 1 << (_BITS - 1)  # so that the shift rounds to the nearest


def open_image(source: Any) -> Image.Image:
    """An RGB picture from a path, a file's bytes, a PIL image or an array [height, width, 3] of bytes.

    It is turned as its EXIF orientation says. Grey, palette, transparent and CMYK pictures are converted; 16-bit ones
    are scaled to 8 bits (a plain conversion would clip them to white).
    """
    if isinstance(source, str | os.PathLike):
        return _read(Path(source), _opened)
    if isinstance(source, bytes):
        return _opened(io.BytesIO(source), f"a file of {len(source)} bytes")
    if isinstance(source, Image.Image):
        return _checked(source)
    if isinstance(source, np.ndarray):
        if source.dtype != np.uint8 or source.ndim != 3 or source.shape[-1] != 3:
            raise ValueError(
                f"an image array of shape {source.shape} and type {source.dtype}; give bytes [height, width, 3]"
            )
        return _checked(Image.fromarray(source))
    raise ValueError(
        f"{type(source).__name__} is no image; give a path, a file's bytes, a PIL image or an array of bytes"
    )


def check_header(source: Path | bytes) -> None:
    """An error where a file, or its bytes, is no picture that `open_image` takes, as far as its first bytes tell."""
    if isinstance(source, bytes):
        _identified(io.BytesIO(source), f"a file of {len(source)} bytes")
    else:
        _read(source, _identified)


def image_size(source: Path | bytes) -> tuple[int, int]:
    """(width, height) of what `open_image` makes of a file or its bytes; nothing is decoded where the header tells."""
    if isinstance(source, bytes):
        return _size(io.BytesIO(source), f"a file of {len(source)} bytes")
    return _read(source, _size)


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


def _read(path: Path, reader: Callable[[io.BufferedIOBase, str], T]) -> T:
    try:
        if not path.is_file():
            raise ValueError(f"there is no image file {path}")
        if path.stat().st_size == 0:
            raise ValueError(f"the image file {path} is empty")
        with path.open("rb") as file:
            return reader(file, str(path))
    except OSError as error:  # a name too long, a folder that may not be looked into
        raise ValueError(f"the image file {str(path)[:200]} cannot be opened ({error.strerror})") from error


def _opened(file: io.BufferedIOBase, name: str) -> Image.Image:
    return _checked(_identified(file, name), f"the image {name}")


def _identified(file: io.BufferedIOBase, name: str) -> Image.Image:
    """The picture in an open file, not yet decoded; its kind is told by its content and is one of `FORMATS`."""
    try:
        image = Image.open(cast(IO[bytes], file), formats=readable_formats())
    except Image.DecompressionBombError as error:
        raise ValueError(f"the image {name} is too large to open ({error}); scale it down first") from error
    except Exception as error:  # damaged headers make Pillow's readers raise anything
        # Of a file of no format Pillow says where the file object lies in memory, which is nobody's business.
        reason = "" if isinstance(error, UnidentifiedImageError) else f" ({error})"
        raise ValueError(f"{name} is no image that can be read{reason}; known are {', '.join(FORMATS)}") from error
    _require_size(image, f"the image {name}")
    return image


def _size(file: io.BufferedIOBase, name: str) -> tuple[int, int]:
    image = _identified(file, name)
    file.seek(0)
    told = image.format in TELLING
    if image.format == "PNG":
        behind = file.read().partition(b"IDAT")[2]
        told = not any(chunk in behind for chunk in LATE)
        file.seek(0)
    if not told:
        return _opened(file, name).size
    try:
        turned = Image.Image.getexif(image).get(0x0112, 1) in (5, 6, 7, 8)  # that of a PNG would decode first
    except Exception:  # as in `_upright`
        turned = False
    width, height = image.size
    return (height, width) if turned else (width, height)


def _require_size(image: Image.Image, name: str) -> None:
    """An error where a picture is empty, or larger or longer than `limits` allows."""
    width, height = image.size
    if min(width, height) < 1:
        raise ValueError(f"{name} is empty ({width} x {height} pixels); give one with at least one pixel")
    if width * height > limits.max_pixels:
        raise ValueError(f"{name} has {width} x {height} pixels; scale it below {limits.max_pixels:,} first")
    if max(width, height) > limits.max_aspect * min(width, height):
        raise ValueError(
            f"{name} has {width} x {height} pixels, one side more than {limits.max_aspect} times the other; cut it"
        )


def _checked(image: Image.Image, name: str = "the image") -> Image.Image:
    _require_size(image, name)
    try:
        frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)  # MPO: a photograph and its preview
        if frames == 1:
            image.load()
    except Exception as error:  # damaged pixels make Pillow's readers raise anything
        raise ValueError(f"{name} cannot be decoded ({error}); it may be cut short, save it anew") from error
    if frames > 1:
        raise ValueError(f"{name} is animated ({frames} frames); choose one with image.seek(i), image.copy()")
    return _to_rgb(_upright(image), name)


def _upright(image: Image.Image) -> Image.Image:
    """The picture turned as its EXIF orientation says, which is how a phone stores what it holds upright."""
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # damaged metadata make Pillow raise anything, and the pixels may still be whole
        return image


def _to_rgb(image: Image.Image, name: str) -> Image.Image:
    if image.mode in ("I;16", "I;16B", "I;16L") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        return Image.fromarray((np.asarray(image).astype(np.uint32) >> 8).clip(0, 255).astype(np.uint8)).convert("RGB")
    if image.mode in ("F", "I"):
        kind = "floats" if image.mode == "F" else "32-bit integers"
        raise ValueError(f"{name} has pixels of {kind}, which have no fixed range; convert it to bytes first")
    try:
        return image.convert("RGB")
    except Exception as error:  # a mode that Pillow reads and cannot turn into colours
        raise ValueError(
            f"{name} is of mode {image.mode} and has no colours to show ({error}); save it as RGB"
        ) from error


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
        key: to_device(value, device, dtype if value.is_floating_point() else None)
        for key, value in features.items()
        if isinstance(value, Tensor)
    }


# Pictures on a device ------------------------------------------------------------------------------------------------


def normalise(processor: Any, pixels: UInt8[Tensor, "*B 3 H W"]) -> Float[Tensor, "*B 3 H W"]:
    """Pixels as the image processor scales them."""
    mean, std = (
        torch.tensor(value, device=pixels.device)[:, None, None]
        for value in (processor.image_mean, processor.image_std)
    )
    return (pixels * processor.rescale_factor - mean) / std


def by_size(pictures: Sequence[Picture], cut: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The function's row for each picture; those of one size go through it together."""
    rows: dict[torch.Size, list[int]] = {}
    for row, picture in enumerate(pictures):
        rows.setdefault(picture.shape, []).append(row)
    found: dict[int, Tensor] = {}
    for some in rows.values():
        found.update(zip(some, cut(torch.stack([pictures[row] for row in some])), strict=True))
    return [found[row] for row in range(len(pictures))]


def _bilinear(x: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    return np.maximum(0.0, 1.0 - x)


def _bicubic(x: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """Keys' cubic with a = -0.5."""
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


KERNELS = {"bilinear": (_bilinear, 1.0), "bicubic": (_bicubic, 2.0)}  # weight by distance, and the largest distance


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
