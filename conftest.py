"""What every test shares: no network, one thread, and the repository's root."""

import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before huggingface_hub is imported, which reads it once
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
import torch

try:
    from tests.searching import load_profile
except ImportError:  # a GPU machine without hypothesis runs the tests that do not need it
    pass
else:
    load_profile()
torch.set_num_threads(1)  # several test workers share few cores

try:
    import diffprune_lab
except ImportError:  # the library's tests run without the lab
    pass
else:
    diffprune_lab.join()


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout the tests run in."""
    return Path(__file__).resolve().parent
