"""The reference models and pruners of the lab, as the library's loader finds them.

Whatever model is loaded, this file is asked whether it is its own; so a world is imported where one of its models is.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from diffprune_lab.scarce import NAME as SCARCE
from diffprune_lab.scenes.reference import ASSETS, SPECS, load_reference
from diffprune_lab.scenes.sizes import SIZES_FILE


def _load_scarce() -> tuple[Any, Any]:
    from diffprune_lab.scarce.reference import load_frozen

    return load_frozen()


SHIPPED: Mapping[str, Callable[[], tuple[Any, Any]]] = {
    **{name: partial(load_reference, name) for name in SPECS},
    SCARCE: _load_scarce,
}


class LabModels:
    """The models whose weights come with the lab, of both worlds, and folders of scenes-qwen."""

    models: Mapping[str, str] = {name: "llava" for name in SHIPPED}
    restore = "it comes with the lab, restore it with `git checkout -- {path}` or install the lab again"

    @property
    def pruners(self) -> Mapping[str, Path]:
        folders = {f"{name}-diffprune": ASSETS / f"{name}-diffprune" for name in SHIPPED}
        return {name: folder for name, folder in folders.items() if folder.is_dir()}

    def holds(self, name: str) -> bool:
        if name in SHIPPED:
            return True
        if not Path(name, SIZES_FILE).is_file():
            return False
        from diffprune_lab.scenes import qwen

        return qwen.named_in(name) is not None

    def load(self, name: str, **kwargs: Any) -> tuple[nn.Module, Any]:
        if name not in SHIPPED:
            from diffprune_lab.scenes import qwen

            return qwen.load_model(name, **{"dtype": torch.float32, "attn_implementation": "sdpa", **kwargs})
        dtype = kwargs.pop("dtype", torch.float32)
        if isinstance(dtype, str):
            dtype = torch.float32 if dtype == "auto" else getattr(torch, dtype)
        if not set(kwargs) <= {"device_map", "attn_implementation"}:
            raise ValueError(f"{name} comes with the lab and takes a dtype and a device_map, not {', '.join(kwargs)}")
        model, processor = SHIPPED[name]()
        model, device = model.to(dtype=dtype), kwargs.get("device_map")
        return model if device in (None, "auto") else model.to(device), processor

    def describe(self, name: str) -> tuple[Any, Any]:
        model, processor = self.load(name)
        return model.config, processor

    def folder(self, name: str) -> Path:
        return ASSETS / name if name in SHIPPED else Path(name)


SCENES = LabModels()
