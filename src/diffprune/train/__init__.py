"""Training a pruner: `run` goes through a run, the other files are what it needs.

Called, `diffprune.train(config, folder)`, it trains and saves: see `run.train_pruner`.
"""

import sys
from types import ModuleType
from typing import Any


class _Train(ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Train as a config says and save the pruner into a folder; the arguments of `run.train_pruner`."""
        from diffprune.train.run import train_pruner

        return train_pruner(*args, **kwargs)


# The public name `diffprune.train` is both this package and a function, whichever was asked for first.
sys.modules[__name__].__class__ = _Train
