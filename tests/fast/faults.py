"""What can go wrong with a compiler, made to go wrong."""

from contextlib import nullcontext
from typing import Any

import torch
from torch._inductor.exc import InductorError

from diffprune.fast.graphs import Compiler


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


class NoCompiler(Compiler):
    """Stands for `torch.compile` where there is no C compiler: that shows when a function is called first."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__(True)

    def __call__(self, function: Any) -> Any:
        if not self.enabled:
            return function

        def refuse(*_: Any) -> Any:
            raise InductorError(RuntimeError("Failed to find C compiler. Please specify via CC.\nMore."), None)

        return refuse
