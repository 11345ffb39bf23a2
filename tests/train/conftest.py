"""What the tests of runs share."""

from pathlib import Path

import pytest

from tests.train import runs


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and pictures with captions."""
    folder = tmp_path_factory.mktemp("run")
    runs.save_model(folder / "model")
    runs.save_pictures(folder / "data")
    return folder
