"""The quick part of the golden runs; `python -m tools.golden check` compares all of them, bit for bit.

Another processor rounds differently: losses may differ by `TOLERANCE`, kept indices may not, for only choices that
float64 makes as well are compared.
"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from tools.golden import commands, models
from tools.golden.__main__ import differences

TOLERANCE = 1e-3  # with other vector instructions
METHODS = ("diffprune", "visionselector", "divprune", "visionzip", "pyramiddrop")


@pytest.fixture(scope="module")
def rows(root: Path) -> Any:
    return lambda part: json.loads((root / f"results/golden/{part}.json").read_text())["rows"]


@pytest.mark.parametrize("family", models.FAMILIES)
@pytest.mark.parametrize("method", METHODS)
def test_what_is_kept_and_what_it_costs_is_as_recorded(family: str, method: str, rows: Any) -> None:
    keep = models.BUDGETS[0]
    [was] = [row for row in rows("kept") if models.is_about(row, family=family, method=method, keep=keep)]
    vlm = models.make_vlm(family, method)
    kept = models.select(vlm, keep)
    assert (kept is None) == (method == "pyramiddrop")
    if kept is not None:
        assert was["clear"]
        assert (kept[0][:8], models.digest(kept)) == (was["kept"], was["digest"])
    now = models.losses(vlm, keep)
    assert now.keys() == was.keys() & {"dropped", "loss", "gradient", "value"}
    for name in now.keys() - {"value"}:
        assert float.fromhex(now[name]) == pytest.approx(float.fromhex(was[name]), rel=TOLERANCE), name


def test_every_difference_is_told(rows: Any) -> None:
    was = rows("kept")
    now = copy.deepcopy(was)
    assert differences("kept", was, now) == []
    now[1]["kept"][0] += 1
    missing = now.pop()
    lines = differences("kept", was, now)
    assert len(lines) == 2 and any("kept was [" in line for line in lines)
    assert any(missing["method"] in line and "no longer there" in line for line in lines)
    marks = differences("answers", [{"method": "a", "marks": "00ff10"}], [{"method": "a", "marks": "00fe10"}])
    assert marks == ["answers: a: marks of 1 of 3 answers changed"]


def test_the_recorded_recipe_is_the_one_that_is_run(root: Path) -> None:
    for part in ("train", "resume"):
        recorded = json.loads((root / f"results/golden/{part}.json").read_text())["recipes"]
        assert recorded == {run: commands.recipe_of(run) for run in commands.RUNS}


def test_the_killed_run_ended_as_the_unbroken_one(rows: Any) -> None:
    unbroken, killed = rows("resume")
    assert {**unbroken, "run": ""} == {**killed, "run": ""}
