"""diffprune: keep the visual tokens that matter, drop the rest, and get the first token sooner."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diffprune import backbones, methods, ops, train
    from diffprune.api import load
    from diffprune.config import RunConfig as Config
    from diffprune.methods.base import Pruner
    from diffprune.model import PrunedVLM
    from diffprune.registry import register
    from diffprune.types import Budget, ImageSelection, Selection, VisualTokens

__version__ = "0.1.0"

__all__ = [
    "Budget",
    "Config",
    "ImageSelection",
    "PrunedVLM",
    "Pruner",
    "Selection",
    "VisualTokens",
    "backbones",
    "load",
    "methods",
    "ops",
    "register",
    "train",
]

# torch and transformers take seconds to import; a name brings in what it needs when it is first asked for.
_HOME = {
    "Budget": "diffprune.types:Budget",
    "Config": "diffprune.config:RunConfig",
    "ImageSelection": "diffprune.types:ImageSelection",
    "PrunedVLM": "diffprune.model:PrunedVLM",
    "Pruner": "diffprune.methods.base:Pruner",
    "Selection": "diffprune.types:Selection",
    "VisualTokens": "diffprune.types:VisualTokens",
    "load": "diffprune.api:load",
    "register": "diffprune.registry:register",
}
_PACKAGES = ("backbones", "methods", "ops", "train")  # all but `ops` can be called: methods(), backbones(), train(...)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        module, _, attribute = _HOME[name].partition(":")
        return getattr(importlib.import_module(module), attribute)
    if name in _PACKAGES:
        return importlib.import_module(f"diffprune.{name}")
    if name in _MOVED:
        return _moved_name(name)
    raise AttributeError(f"module 'diffprune' has no attribute {name!r}")


# Public names that moved to another package, which brings them back by the entry-point group `diffprune.moved`; for one
# release.
_MOVED = ("PrunedClassifier",)


def _moved_name(name: str) -> Any:
    import warnings

    from diffprune import doors

    found = doors.load(doors.MOVED, name)
    if found is None:
        raise AttributeError(f"{name} has moved to the lab, which is not installed here: pip install -e . -e lab")
    warnings.warn(f"diffprune.{name} has moved to {found.__module__}", DeprecationWarning, stacklevel=3)
    return found


def __dir__() -> list[str]:
    return sorted(__all__)
