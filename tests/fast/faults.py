"""What can go wrong with a compiler, made to go wrong."""

from contextlib import nullcontext
from typing import Any

import torch


class Miscompiler:
    """Stands for a compiler that gets one function of the fast path wrong."""

    wrong = ""
    enabled = True

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, function: Any) -> Any:
        if function.__name__ != self.wrong:
            return lambda *arguments: function(*arguments)  # another object, as a compiler's is

        def mistaken(*arguments: Any) -> Any:
            result = function(*arguments)
            return 1.5 * result if isinstance(result, torch.Tensor) else tuple(1.5 * part for part in result)

        return mistaken

    def unlimited_recompiles(self) -> Any:
        return nullcontext()
