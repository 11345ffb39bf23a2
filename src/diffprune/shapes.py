"""Models of the real sizes with random weights, which are enough where speed and memory are measured.

`SHAPES["llava-1.5-7b"](False)` is the configuration and processor that the hub's files describe, `True` those of the
same kind of model small enough for a CPU.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from diffprune.registry import BACKBONES

CPU_PARAMETERS = 2_000_000_000  # more than that a CPU neither trains nor measures in any time worth waiting for

# Of every preset that its family describes (`Preset.describe`).
SHAPES: dict[str, Callable[[bool], tuple[Any, Any]]] = {
    name: preset.describe
    for family in BACKBONES.names()
    for name, preset in BACKBONES.get(family).presets.items()
    if preset.describe is not None
}


def is_preset(name: str) -> bool:
    """Whether `diffprune backbones` lists the name, with or without a shape here."""
    return any(name in BACKBONES.get(family).presets for family in BACKBONES.names())


def build(config: Any, device: str, dtype: torch.dtype, seed: int = 0) -> nn.Module:
    """A model of that configuration with the random weights it starts with."""
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(seed)
    with torch.device(device):
        return AutoModelForImageTextToText.from_config(config, dtype=dtype)


def require_gpu(
    name: str, config: Any, dtype: torch.dtype, device: str | torch.device, *, what: str, way_out: str
) -> None:
    """Raise, before anything is built or loaded, where a CPU would have to run a model of billions of parameters.

    Args:
        what: What the model is wanted for.
        way_out: The end of the sentence.
    """
    if torch.device(device).type != "cpu":
        return
    parameters = sum(parameter.numel() for parameter in build(config, "meta", dtype).parameters())
    if parameters > CPU_PARAMETERS:
        size = parameters * dtype.itemsize / 2**30
        raise ValueError(
            f"{name} has {parameters / 1e9:.1f} billion parameters and there is no GPU to run it on: {what} needs one "
            f"with {size:.0f} GiB for the weights in {str(dtype).removeprefix('torch.')}{way_out}"
        )
