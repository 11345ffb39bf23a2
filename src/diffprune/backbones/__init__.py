"""Model families, one file each, named by their Hugging Face `model_type`. Called, it gives their names."""

import sys
from types import ModuleType


class _Backbones(ModuleType):
    def __call__(self) -> list[str]:
        """Names of every model family that can be wrapped."""
        from diffprune.registry import BACKBONES

        return BACKBONES.names()


# The public name `diffprune.backbones` is both this package and a function, whichever was asked for first.
sys.modules[__name__].__class__ = _Backbones
