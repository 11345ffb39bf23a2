"""diffprune: keep the visual tokens that matter, drop the rest, and get the first token sooner."""

from typing import TYPE_CHECKING, Any

from diffprune import ops
from diffprune.types import Budget, ImageSelection, Selection, VisualTokens

if TYPE_CHECKING:
    from diffprune.model import PrunedVLM

__version__ = "0.1.0"

__all__ = [
    "Budget",
    "ImageSelection",
    "PrunedVLM",
    "Selection",
    "VisualTokens",
    "backbones",
    "methods",
    "ops",
]


def methods() -> list[str]:
    """Names of every pruning method."""
    from diffprune.registry import METHODS

    return METHODS.names()


def backbones() -> list[str]:
    """Names of every model family that can be wrapped."""
    from diffprune.registry import BACKBONES

    return BACKBONES.names()


def __getattr__(name: str) -> Any:
    # PrunedVLM brings transformers along, which takes seconds to import; the operators do without.
    if name == "PrunedVLM":
        from diffprune.model import PrunedVLM

        return PrunedVLM
    raise AttributeError(f"module 'diffprune' has no attribute {name!r}")
