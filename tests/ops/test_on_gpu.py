"""Kernels that cannot be had: one sentence, and plain torch. The kernels are made up; a GPU is not needed."""

import logging
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import diffprune.ops
from diffprune.ops.on_gpu import load_kernels


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Kernels whose first launch ends as `error` says, and how often it was tried."""
    found = SimpleNamespace(error=None, launches=0)

    def try_out() -> None:
        found.launches += 1
        if found.error is not None:
            raise found.error

    kernels: Any = ModuleType("greedy_kernels")
    kernels.try_out = try_out
    monkeypatch.setitem(sys.modules, "diffprune.ops.greedy_kernels", kernels)
    monkeypatch.setattr(diffprune.ops, "greedy_kernels", kernels, raising=False)
    load_kernels.cache_clear()
    yield found
    load_kernels.cache_clear()


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Failed to find C compiler. Please specify via CC environment variable."),
        OSError("[Errno 30] Read-only file system"),
    ],
)
def test_triton_that_cannot_compile_is_said_once_and_not_tried_again(
    error: Exception, tried: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    tried.error = error
    with caplog.at_level(logging.WARNING, logger="diffprune"):
        assert load_kernels() is None and load_kernels() is None
    (said,) = [record.message for record in caplog.records]
    assert (
        said.startswith("greedy choices run step by step on this GPU: Triton cannot compile here (")
        and "\n" not in said
    )
    assert str(error)[:20] in said and tried.launches == 1


def test_kernels_that_launch_are_taken_and_a_full_device_is_no_reason_to_give_them_up(tried: SimpleNamespace) -> None:
    tried.error = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        load_kernels()
    tried.error = None
    assert load_kernels() is diffprune.ops.greedy_kernels and tried.launches == 2
