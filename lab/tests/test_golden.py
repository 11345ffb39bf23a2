"""The golden training run on a reference model; `python -m tools.golden check` compares all of them, bit for bit."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

from tools.golden import commands

TOLERANCE = 1e-3  # with other vector instructions, 20 steps end 1e-5 apart


def test_twenty_training_steps_lose_what_they_lost(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = commands.write_config(tmp_path / "small.yaml", commands.recipe_of("small"))
    arguments = ["diffprune", "train", "--config", str(config), "--out", str(tmp_path / "run"), "--json"]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as end:
        runpy.run_module("diffprune", run_name="__main__")
    assert end.value.code == 0
    rows = json.loads((root / "results/golden/train.json").read_text())["rows"]
    was = [row for row in rows if row["run"] == "small" and row["kind"] != "weights"]
    now = commands.metrics(tmp_path / "run")
    assert [(row["kind"], row["step"]) for row in now] == [(row["kind"], row["step"]) for row in was]
    for old, new in zip(was, now, strict=True):
        # `random` draws from the pictures' pixels, which another processor may draw a last bit apart
        for name in new.keys() & {"loss", "tau", "entropy", "throttled", "hard"}:
            values = [float.fromhex(row[name]) for row in (new, old)]
            assert values[0] == pytest.approx(values[1], rel=TOLERANCE), (old["kind"], old["step"], name)
