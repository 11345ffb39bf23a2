"""Where a GPU does what plain torch would do: kernels in Triton, products of half precision on tensor cores."""

import contextlib
import contextvars
import functools
import logging
from collections.abc import Generator
from types import ModuleType

import torch
from jaxtyping import Float
from torch import Tensor

HALVES = (torch.float16, torch.bfloat16)

_wanted = contextvars.ContextVar("wanted", default=True)


@contextlib.contextmanager
def reference() -> Generator[None]:
    """Inside, choices and products are made by plain torch on every device: for comparisons."""
    token = _wanted.set(False)
    try:
        yield
    finally:
        _wanted.reset(token)


@functools.cache
def load_kernels() -> ModuleType | None:
    """The Triton kernels; None, said once, where Triton is not installed or cannot compile."""
    try:
        from diffprune.ops import greedy_kernels
    except ImportError as error:
        _say_slow(f"Triton cannot be imported ({error}); pip install triton")
        return None
    try:
        greedy_kernels.try_out()
    except Exception as error:  # of Triton, the C compiler it calls, or a folder that it cannot write to
        if isinstance(error, torch.OutOfMemoryError):
            raise
        reason = " ".join(str(error).split())[:200]
        _say_slow(f"Triton cannot compile here ({reason}); it needs a C compiler, Python's headers and a cache folder")
        return None
    return greedy_kernels


def _say_slow(reason: str) -> None:
    logging.getLogger("diffprune").warning(f"greedy choices run step by step on this GPU: {reason}")


def kernels_for(values: Tensor, num_tokens: int, *types: torch.dtype) -> ModuleType | None:
    """The kernels, if they run where these values are, take their type, and hold rows of so many tokens."""
    possible = values.device.type == "cuda" and values.dtype in types and values.numel() > 0
    if not possible or not _wanted.get() or torch.compiler.is_compiling():
        return None
    kernels = load_kernels()
    return None if kernels is None or num_tokens > kernels.LONGEST_ROW else kernels


def multiplies_halves(x: Tensor) -> bool:
    """Whether tensor cores multiply this, whose products are exact in float32."""
    return x.dtype in HALVES and x.device.type == "cuda" and _wanted.get()


def products(x: Float[Tensor, "B N D"]) -> Float[Tensor, "B N N"]:
    """x @ x^T, in float32 at least; halves on a GPU by tensor cores."""
    if multiplies_halves(x):
        return torch.bmm(x, x.transpose(1, 2), out_dtype=torch.float32)
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x @ x.transpose(1, 2)
