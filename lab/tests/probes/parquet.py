"""Parquet files with the columns the probes read, made of drawn pictures."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from diffprune_lab.probes.data import Photos, draw_photos


def write_photos(path: Path, count: int, *, seed: int = 0, side: int = 32, **columns: Any) -> Photos:
    """Write drawn pictures as PNG, boxes in inclusive pixels; returns what was drawn."""
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    photos = draw_photos(count, side=side, seed=seed)
    images = []
    for number, pixels in enumerate(photos.pixels.numpy()):
        file = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(pixels.transpose(1, 2, 0))).save(file, "PNG")
        images.append({"bytes": file.getvalue(), "path": f"{number}.png"})
    corners = (photos.boxes.numpy() * side).round().astype(np.int32) - np.array([0, 0, 1, 1], dtype=np.int32)
    table = {"image": images, "label": photos.labels.tolist(), "box": corners.tolist(), **columns}
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(arrow.table({name: value for name, value in table.items() if value is not None}), path)
    return photos
