"""What every test shares: no network, one thread, seeded generators, and the repository's root."""

import gc
import os
import random
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported, which reads it once
os.environ.setdefault("MPLBACKEND", "Agg")

import numpy as np
import pytest
import torch

try:
    from tests.searching import load_profile
except ImportError:  # a GPU machine without hypothesis runs the tests that do not need it
    pass
else:
    load_profile()
torch.set_num_threads(1)  # several test workers share few cores
gc.disable()  # until all tests are imported and collected: nothing of it dies, and it is much to visit

try:
    import diffprune_lab
except ImportError:  # the library's tests run without the lab
    pass
else:
    diffprune_lab.join()


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def pytest_collection_finish() -> None:
    """Python's collector visits what tests make, not torch, transformers and thousands of tests, at every call."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup() -> None:
    """A fixture draws the same numbers whichever test asks for it first."""
    _seed(1)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    """A test draws the same numbers alone, in any order and in any worker."""
    _seed(0)


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout the tests run in."""
    return Path(__file__).resolve().parent
