"""What the lab's tests of training share with the library's."""

from pathlib import Path

import pytest

from tests.train import runs


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and pictures with captions."""
    return runs.save_both(tmp_path_factory.mktemp("run"))
