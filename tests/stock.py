"""Folders of tiny models as users have them: the files that transformers' own classes and the hub's pages hold."""

import json
from pathlib import Path
from typing import Any

from diffprune.backbones.image_only import VIDEO, family_processor
from tests import tiny

FAMILIES = (
    "idefics3",
    "internvl",
    "llava",
    "llava_next",
    "llava_onevision",
    "paligemma",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_vl",
    "smolvlm",
)
VIDEOS = {  # as the stock processors of these families write them
    "internvl": "InternVLVideoProcessor",
    "llava_onevision": "LlavaOnevisionVideoProcessor",
    "qwen2_5_vl": "Qwen2VLVideoProcessor",
    "qwen2_vl": "Qwen2VLVideoProcessor",
    "qwen3_vl": "Qwen3VLVideoProcessor",
    "smolvlm": "SmolVLMVideoProcessor",
}


def save_stock(folder: Path, family: str, layout: str = "hub") -> Path:
    """The tiny model of a family with the files that its stock processor would write, a video half included.

    Args:
        layout: "hub", where each half has a file of its own, or "saved", one file as transformers 5 writes it.
    """
    model, processor = tiny.build(family)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    stock = family_processor(family)
    assert stock is not None and (VIDEO in stock.get_attributes()) == (family in VIDEOS)
    whole = _read(folder / "processor_config.json")
    assert whole["processor_class"] == stock.__name__
    video = {"video_processor_type": VIDEOS[family], "do_resize": True} if family in VIDEOS else None
    if layout == "saved":
        _write(folder / "processor_config.json", whole | ({VIDEO: video} if video else {}))
        return folder
    _write(folder / "preprocessor_config.json", whole.pop("image_processor") | {"processor_class": stock.__name__})
    _write(folder / "processor_config.json", whole)
    if video:
        _write(folder / "video_preprocessor_config.json", video | {"processor_class": stock.__name__})
    return folder


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def _write(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value))
