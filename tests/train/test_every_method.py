"""What the pages promise of a run holds for every method that learns, not for DiffPrune alone."""

from pathlib import Path
from typing import Any

import pytest

from tests.train import runs
from tests.train.runs import train
from tests.train.test_learned import INSIDE, OPTIONS
from tests.train.test_run import records


def named(name: str, **options: Any) -> dict[str, Any]:
    return {"name": name, **OPTIONS.get(name, {}), **options}


@pytest.mark.parametrize("name", [*INSIDE, "gumbel_ste-masked"])
def test_running_layers_again_changes_neither_losses_nor_validations(name: str, disk: Path, tmp_path: Path) -> None:
    """What drops inside the language model is validated over caches, and a layer that runs again fills none."""
    for again in ("False", "True"):
        train(disk, tmp_path / again, method=named(name), optim={"gradient_checkpointing": again == "True", "steps": 2})
    assert runs.losses(tmp_path / "True") == pytest.approx(runs.losses(tmp_path / "False"), rel=1e-6)
    (again, once) = (records(tmp_path / folder, "validation")[-1] for folder in ("True", "False"))
    assert [again[key] for key in ("throttled", "hard")] == pytest.approx(
        [once[key] for key in ("throttled", "hard")], rel=1e-6
    )
