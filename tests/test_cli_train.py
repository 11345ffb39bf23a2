"""`diffprune train` as a user calls it."""

import json
from pathlib import Path

import pytest

from diffprune.cli.main import _run
from diffprune.cli.train import describe
from diffprune.model import PrunedVLM
from tests.train import runs


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    model, data = runs.save_model(folder / "model"), runs.save_pictures(folder / "data")
    return runs.write_config(folder / "run.yaml", runs.values(model, data, optim={"steps": 2}))


def test_a_run_is_trained_told_and_loaded(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", "--config", str(config), "--out", str(tmp_path / "run"), "optim.lr=1e-4", "budget.keep=3"]
    assert _run(arguments) == 0
    shown = capsys.readouterr()
    assert "2 of 2 steps" in shown.out and f"the pruner: {tmp_path / 'run'}" in shown.out
    assert "step 2/2: throttled" in shown.err and "hard top-K" in shown.err and "gap" in shown.err
    assert PrunedVLM.from_pretrained(tmp_path / "run").budget.keep == 3
    assert _run([*arguments, "--resume", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ended"] == "finished"
    assert _run([*arguments[:-1], "--resume"]) == 2
    assert "another config (budget.keep: 3 -> 4)" in capsys.readouterr().err


def test_what_went_wrong_in_a_run_is_told_at_its_end() -> None:
    best = {"step": 4, "hard": 0.7, "gap": 0.0}
    summary = {"step": 4, "steps": 4, "samples_s": 1.0, "ended": "finished", "best": best, "out": "runs/a"}
    summary |= {"skipped": 0}
    assert "no better than random choice, whose loss is 0.5000" in describe(summary | {"random": 0.5})
    assert "random choice" not in describe(summary | {"random": 0.8})
    assert "the pruner: runs/a" in describe(summary | {"best": None, "random": None})  # nothing was held out
    assert "best at step 4" in describe(summary | {"random": None})  # ended before it was measured
    assert "4 of 4 steps, 1.0 samples/s, 2 steps not taken (gradient not finite)" in describe(
        summary | {"random": 0.8, "skipped": 2}
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("optim.lrr=1", "did you mean optim.lr"),
        ("data.name=nowhere", "data.name='nowhere' is not there"),
        ("data.caption=text", "no column 'text' with captions"),
        ("backbone.name=qwen2_5_vl", "the config is for qwen2_5_vl"),
    ],
)
def test_a_bad_value_is_one_sentence(
    change: str, message: str, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(["train", "--config", str(config), "--out", str(tmp_path), change]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("diffprune: ") and message in error


def test_a_missing_config_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["train", "--config", str(tmp_path / "no.yaml"), "--out", str(tmp_path)]) == 2
    assert "cannot read config" in capsys.readouterr().err
    assert _run(["train", "--out", str(tmp_path)]) == 2
