"""Training that gives the same weights twice: operations whose sums have one order, where torch has them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS adds up in one order only with a workspace of its own


@contextmanager
def repeatable(enabled: bool) -> Iterator[None]:
    """Within it torch takes repeatable operations and warns of each that has none; afterwards all is as it was.

    Samples, noise and budgets follow from the seed anyway, so on a CPU this changes nothing but the flags. On a GPU
    sums may otherwise come in another order each time. SDPA's memory-efficient kernel is not repeatable backwards and
    is left out. cuBLAS reads its setting when it is first used: enter this before the process touches the GPU.
    """
    if not enabled:
        yield
        return
    name, value = WORKSPACE
    workspace, benchmark = os.environ.get(name), torch.backends.cudnn.benchmark
    strict, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    efficient = torch.backends.cuda.mem_efficient_sdp_enabled()
    os.environ.setdefault(name, value)
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = False
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        yield
    finally:
        torch.use_deterministic_algorithms(strict, warn_only=warns)
        torch.backends.cudnn.benchmark = benchmark
        torch.backends.cuda.enable_mem_efficient_sdp(efficient)
        if workspace is None:
            os.environ.pop(name, None)
