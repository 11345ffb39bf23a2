"""diffprune: keep the visual tokens that matter, drop the rest, and get the first token sooner."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diffprune import backbones, methods, ops
    from diffprune.loading import load
    from diffprune.methods.base import Pruner
    from diffprune.model import PrunedVLM
    from diffprune.types import Budget, ImageSelection, Selection, VisualTokens

__version__ = "0.1.0"

__all__ = [
    "Budget",
    "ImageSelection",
    "PrunedVLM",
    "Pruner",
    "Selection",
    "VisualTokens",
    "backbones",
    "load",
    "methods",
    "ops",
]

# torch and transformers take seconds to import; a name brings in what it needs when it is first asked for.
_HOME = {
    "Budget": "diffprune.types",
    "ImageSelection": "diffprune.types",
    "PrunedVLM": "diffprune.model",
    "Pruner": "diffprune.methods.base",
    "Selection": "diffprune.types",
    "VisualTokens": "diffprune.types",
    "load": "diffprune.loading",
}
_PACKAGES = ("backbones", "methods", "ops")


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in _PACKAGES:
        return importlib.import_module(f"diffprune.{name}")
    raise AttributeError(f"module 'diffprune' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
