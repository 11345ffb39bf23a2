"""Labelled photographs with one object box each, as tensors on the device: from parquet files, or drawn for a trial."""

import hashlib
import io
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from PIL import Image
from torch import Tensor

from diffprune.backbones.processors import readable_formats

COLUMNS = ("image", "label", "box")
SIDE = 64  # pixels; pictures of another size are resized to it


@dataclass(frozen=True, slots=True, kw_only=True)
class Photos:
    """M pictures of one size.

    Args:
        pixels: As they were stored.
        labels: Class of each.
        boxes: The object's x0 y0 x1 y1 as shares of width and height.
        seeds: One number per picture, made from its pixels.
        names: Class names, where the folder has them.
    """

    pixels: UInt8[Tensor, "M 3 side side"]
    labels: Int[Tensor, " M"]
    boxes: Float[Tensor, "M 4"]
    seeds: tuple[int, ...]
    names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def num_classes(self) -> int:
        return len(self.names) or int(self.labels.max()) + 1

    @property
    def box_shares(self) -> Float[Tensor, " M"]:
        """How much of each picture its box covers."""
        return (self.boxes[:, 2] - self.boxes[:, 0]) * (self.boxes[:, 3] - self.boxes[:, 1])


def inside_box(boxes: Float[Tensor, "M 4"], side: int) -> Bool[Tensor, "M N"]:
    """Which cells of a side x side grid, in raster order, have their centre inside each box."""
    centres = (torch.arange(side, device=boxes.device) + 0.5) / side
    return inside_at(boxes, torch.cartesian_prod(centres, centres).flip(-1))  # x runs fastest


def inside_at(boxes: Float[Tensor, "M 4"], places: Float[Tensor, "... N 2"]) -> Bool[Tensor, "M N"]:
    """Which of the places, x and y as shares, lie inside each box; they may be each picture's own."""
    return ((places >= boxes[:, None, :2]) & (places < boxes[:, None, 2:])).all(-1)


def draw_rows(photos: Photos, count: int, *, seed: int, step: int) -> tuple[Int[Tensor, " B"], torch.Generator]:
    """The pictures of one training step, and a generator for whatever else the step draws."""
    device = photos.pixels.device
    generator = torch.Generator(device).manual_seed(seed * 1_000_003 + step)
    return torch.randint(len(photos), (count,), generator=generator, device=device), generator


# --- parquet ----------------------------------------------------------------------------------------------------------


def find_files(source: str | Path) -> tuple[list[Path], list[Path]]:
    """Parquet files to train on (their names start with `train`) and to measure on (all others)."""
    source = Path(source)
    if not source.exists():
        raise ValueError(f"{source} is not there; give a parquet file, or the folder that holds them, with --data")
    files = [source] if source.is_file() else sorted(source.rglob("*.parquet"))
    if not files:
        raise ValueError(f"{source} holds no parquet file; give a folder with files such as train-00-of-01.parquet")
    train = [file for file in files if file.stem.startswith("train")]
    return train, [file for file in files if file not in train]


def fingerprint(files: Sequence[Path]) -> str:
    """A hash of the files' bytes, without decoding the pictures."""
    digest = hashlib.blake2b(digest_size=10)
    for file in files:
        digest.update(hashlib.blake2b(file.read_bytes()).digest())
    return digest.hexdigest()


def read_photos(files: Sequence[Path], *, side: int = SIDE, device: str | torch.device = "cpu") -> Photos:
    """The pictures of all files in order; class names come from a `classes.json` beside the first."""
    try:
        import pyarrow.parquet as parquet  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ValueError(
            "pyarrow, which reads parquet files, is not installed: run pip install 'diffprune[train]'"
        ) from None
    pixels, boxes, labels = [], [], []
    for path in files:
        try:
            table = parquet.ParquetFile(path)
        except (OSError, ValueError) as error:  # pyarrow's own errors are kinds of these
            raise ValueError(f"{path} is damaged or no parquet file: {str(error).splitlines()[0]}") from error
        columns = table.schema_arrow.names
        if missing := [name for name in COLUMNS if name not in columns]:
            raise ValueError(
                f"{path} has the columns {', '.join(columns)} and lacks {', '.join(missing)}; "
                "needed are image (bytes, path), label and box (x0, y0, x1, y1)"
            )
        rows = table.read(columns=list(COLUMNS)).to_pydict()
        with ThreadPoolExecutor() as pool:
            places = [f"{path.name} row {row}" for row in range(len(rows["label"]))]
            decoded = list(pool.map(_decode, rows["image"], rows["box"], places, [side] * len(places)))
        pixels += [picture for picture, _ in decoded]
        boxes += [box for _, box in decoded]
        labels += [_class_number(label, place) for label, place in zip(rows["label"], places, strict=True)]
    if not labels:
        raise ValueError(f"{files[0].parent} has parquet files without a single row; give pictures with --data")
    return _photos(np.stack(pixels), np.stack(boxes), np.array(labels), _class_names(files[0]), device)


def _decode(image: Any, box: Any, place: str, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Pixels [3, side, side] and the box as shares; the box's last row and column belong to it."""
    data = image.get("bytes") if isinstance(image, dict) else None
    if not isinstance(data, bytes):
        raise ValueError(f"{place}: image has no bytes; it must be a struct with the picture file under `bytes`")
    try:
        picture = Image.open(io.BytesIO(data), formats=readable_formats()).convert("RGB")
    except OSError as error:
        raise ValueError(f"{place}: the picture cannot be read ({error}); leave the row out") from error
    corners = np.array(box, dtype=np.float64) if isinstance(box, list) and None not in box else np.empty(0)
    if corners.shape != (4,) or not np.isfinite(corners).all() or (corners[2:] < corners[:2]).any():
        raise ValueError(f"{place}: box is {box}; it must hold x0, y0, x1, y1 in pixels, x0 <= x1 and y0 <= y1")
    x0, y0, x1, y1 = corners
    width, height = picture.size
    shares = np.clip([x0 / width, y0 / height, (x1 + 1) / width, (y1 + 1) / height], 0, 1).astype(np.float32)
    if picture.size != (side, side):
        picture = picture.resize((side, side), Image.Resampling.BICUBIC)
    return np.asarray(picture).transpose(2, 0, 1), shares


def _class_number(label: Any, place: str) -> int:
    if isinstance(label, bool) or not isinstance(label, int) or label < 0:
        raise ValueError(f"{place}: label is {label!r}; it must be the number of a class, from 0 on")
    return label


def _class_names(file: Path) -> tuple[str, ...]:
    path = file.parent / "classes.json"
    return tuple(json.loads(path.read_text(encoding="utf-8"))["names"]) if path.is_file() else ()


def _photos(
    pixels: np.ndarray, boxes: np.ndarray, labels: np.ndarray, names: tuple[str, ...], device: str | torch.device
) -> Photos:
    seeds = [int.from_bytes(hashlib.blake2b(picture.tobytes(), digest_size=7).digest(), "big") for picture in pixels]
    return Photos(
        pixels=torch.from_numpy(pixels).to(device),
        labels=torch.from_numpy(labels.astype(np.int64)).to(device),
        boxes=torch.from_numpy(boxes).to(device),
        seeds=tuple(seeds),
        names=names,
    )


# --- drawn ------------------------------------------------------------------------------------------------------------


def draw_photos(
    count: int, *, num_classes: int = 4, side: int = 32, seed: int = 0, device: str | torch.device = "cpu"
) -> Photos:
    """Blocks of a class's colour on noise, for trials without any data; a block covers 8 to 30 % of its picture."""
    random = np.random.default_rng(seed)
    palette = np.random.default_rng(7).integers(0, 256, (num_classes, 3))
    labels = random.integers(0, num_classes, count)
    pixels = random.integers(90, 166, (count, 3, side, side)).astype(np.uint8)
    boxes = np.zeros((count, 4), dtype=np.float32)
    for picture, (label, frame) in enumerate(zip(labels, boxes, strict=True)):
        width, height = random.integers(round(side * 0.3), round(side * 0.55), 2)
        x, y = random.integers(0, side - width), random.integers(0, side - height)
        pixels[picture, :, y : y + height, x : x + width] = palette[label][:, None, None]
        frame[:] = np.array([x, y, x + width, y + height]) / side
    return _photos(pixels, boxes, labels, tuple(f"colour {name}" for name in range(num_classes)), device)
