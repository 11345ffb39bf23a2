"""Pruning methods, one file each; `base` holds the interfaces. Called, `diffprune.methods()`, it gives their names."""

import sys
from types import ModuleType


class _Methods(ModuleType):
    def __call__(self) -> list[str]:
        """Names of every pruning method."""
        from diffprune.registry import METHODS

        return METHODS.names()


# The public name `diffprune.methods` is both this package and a function, whichever was asked for first.
sys.modules[__name__].__class__ = _Methods
