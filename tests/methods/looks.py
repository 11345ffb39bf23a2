"""On a CPU, what a GPU would have to be waited for."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

# A value that is read, a shape that hangs on values, a decomposition that checks itself.
LOOKS = frozenset(
    {
        "_linalg_eigh",
        "_linalg_svd",
        "_local_scalar_dense",
        "_unique2",
        "equal",
        "is_nonzero",
        "masked_select",
        "nonzero",
        "unique_dim",
    }
)


class LooksRefused(TorchDispatchMode):
    """Inside, a look at what the device has come to is a `RuntimeError`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        index = args[1] if name == "index" else ()
        if name in LOOKS or any(place is not None and place.dtype == torch.bool for place in index):
            raise RuntimeError(f"{name} waits for the device")
        return func(*args, **(kwargs or {}))


@contextmanager
def never_looking(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As while a CUDA graph is captured."""

    def never(device: torch.device) -> bool:
        return False

    with monkeypatch.context() as patched, LooksRefused():
        patched.setattr("diffprune.methods.prunesid.may_wait", never)
        patched.setattr("diffprune.ops.similarity.may_wait", never)
        patched.setattr(torch.compiler, "is_compiling", lambda: True)  # input is checked on a CPU alone
        yield
