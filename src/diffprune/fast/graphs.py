"""Stages: functions on static tensors, replayed as one CUDA graph each; on other devices called as they are."""

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from threading import RLock
from typing import Any

import torch
from torch import Tensor

# What the runtime, cuBLAS, cuDNN and Triton say where torch's own allocator was not the one to be refused.
NO_ROOM = ("out of memory", "status_alloc_failed", "cudaerrormemoryallocation")
SYNC_MODE = RLock()  # held by who has changed torch's one setting for waiting
WARM_UPS = 2  # the first call compiles, the second finds every lazily made workspace in place


def on_device(device: torch.device) -> Any:
    """A context in which streams, events and graphs are that GPU's: torch takes the current one's, 0 from the start."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def capturing(pool: Any = None) -> Iterator[Any]:
    """The CUDA graph of what is launched inside.

    Python's collector runs before the capture and not during it: a dead model's graph or kernel that is finalised in
    the middle makes the capture invalid. The current stream is put back too, which torch does not do where a capture
    fails.
    """
    collects, stream = gc.isenabled(), torch.cuda.current_stream()
    gc.collect()
    gc.disable()
    try:
        graph = torch.cuda.CUDAGraph()
        # Shapes are also captured between requests, when other threads may ask the device for memory.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            yield graph
    finally:
        torch.cuda.set_stream(stream)
        if collects:
            gc.enable()


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Inside, Python's collector visits only what was made since: there is one collection before every capture.

    With a model, its processor and a compiler imported, visiting everything takes tenths of a second each time.
    """
    if gc.get_freeze_count():  # the caller's own, which unfreezing would undo
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the device had no room, by the error or by one that it came from (a capture that ends badly hides it)."""
    while error is not None:
        text = str(error).lower()
        if isinstance(error, torch.cuda.OutOfMemoryError):
            return True
        if isinstance(error, RuntimeError) and any(words in text for words in NO_ROOM):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def waiting_refused() -> Iterator[None]:
    """Inside, whatever makes this thread wait for the GPU is a `RuntimeError` that speaks of "synchronizing".

    The mode is the process's, so other threads of the caller's that wait for the GPU meanwhile get that error too.
    Those in here take turns, and the mode that was set before is set again.
    """
    with SYNC_MODE:
        torch.cuda.synchronize()
        before = torch.cuda.get_sync_debug_mode()
        try:
            _set_sync_mode("error")
            yield
        finally:
            _set_sync_mode(before)


def _set_sync_mode(mode: str | int) -> None:
    with warnings.catch_warnings():  # the call itself warns that it is a prototype
        warnings.filterwarnings("ignore", message="Synchronization debug mode")
        torch.cuda.set_sync_debug_mode(mode)


def waits_for_device(call: Callable[[], object]) -> bool:
    """Whether the call stops until the GPU has come to something; such a call cannot be captured."""
    try:
        with waiting_refused():
            call()
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return True
    return False


class Stage:
    """A function without arguments that reads and writes tensors whose addresses never change.

    Args:
        function: What the stage does.
        capture: Keep it as a CUDA graph after `warm_up`.
    """

    def __init__(self, function: Callable[[], None], *, capture: bool) -> None:
        self.function = function
        self.graph: Any = None
        self._capture = capture

    def warm_up(self, pool: Any = None) -> None:
        """Run the function until nothing is compiled or allocated any more, then capture it into the memory pool."""
        if not self._capture:
            self.function()
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self.function()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        with capturing(pool) as graph:
            self.function()
        self.graph = graph

    def __call__(self) -> None:
        if self.graph is not None:
            self.graph.replay()
            return
        # As it was warmed up: what torch compiled is not compiled again for tensors of inference mode.
        with torch.inference_mode(False), torch.no_grad():
            self.function()


class Compiler:
    """`torch.compile` for the functions of the fast path, or nothing at all.

    One function serves all layers (weights are arguments), so a model of 32 layers compiles one.
    """

    def __init__(self, enabled: bool, *, autotune: bool = False) -> None:
        self.enabled = enabled
        # Padded strides give wrong values in torch 2.11 where keys are written into a cache and attended to in one
        # function (float32, two keys for four queries of 16 channels, 69 columns; docs/log.md).
        self.options: dict[str, Any] = {"comprehensive_padding": False}
        if autotune:  # as the mode max-autotune-no-cudagraphs, which cannot be given beside options
            self.options |= {"max_autotune": True, "coordinate_descent_tuning": True}

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if not self.enabled:
            return function
        return torch.compile(function, fullgraph=True, dynamic=False, options=self.options)

    def unlimited_recompiles(self) -> Any:
        """A context in which every new bucket may compile the same function again: each has its own static shapes."""
        import torch._dynamo

        return torch._dynamo.config.patch(recompile_limit=512, accumulated_recompile_limit=4096)  # type: ignore[attr-defined]


def num_bytes(*tensors: Tensor | None) -> int:
    """Bytes of the tensors' storage, each storage once."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if tensor is not None
    }
    return sum(storages.values())
