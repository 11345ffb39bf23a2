"""`diffprune train` as a user calls it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from diffprune.cli.main import _run
from diffprune.cli.train import describe
from diffprune.model import PrunedVLM
from diffprune.schedules import Schedule
from diffprune.train.folder import RunState
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


def test_a_run_goes_on_and_is_made_longer_without_retyping_anything(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert _run(["train", "--config", str(config), "--out", str(folder), "optim.lr=1e-4", "tau.anneal_steps=9"]) == 0
    said = capsys.readouterr().err
    assert "warning: tau.anneal_steps is 9 and the run has 2 steps: it ends at tau" in said
    assert "llava" in said and "parameters, float32 on cpu, diffprune, keep 4" in said  # the header
    assert _run(["train", "--resume", str(folder), "optim.steps=1"]) == 2
    assert "the run is at step 2 and would have 1 steps" in capsys.readouterr().err
    assert _run(["train", "--resume", str(folder), "optim.lr=1e-3"]) == 2
    assert "another config (optim.lr: 0.0001 -> 0.001)" in capsys.readouterr().err
    assert "steps: 2\n" in (folder / "run.yaml").read_text()  # what was refused left nothing
    assert _run(["train", "--resume", str(folder), "optim.steps=4", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["step"], summary["steps"], summary["ended"]) == (4, 4, "finished")
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [record["step"] for record in records if record["kind"] == "train"]
    rates = [record["lr"] for record in records if record["kind"] == "train"]
    assert steps == [1, 2, 3, 4] and rates[2] > 0
    assert _run(["train", "--resume", str(folder)]) == 0
    assert "4 of 4 steps" in capsys.readouterr().out


def test_a_longer_run_keeps_the_lengths_that_were_planned_first() -> None:
    state = RunState(step=8, early=True, waited=3)
    first = Schedule(steps=8, peak_lr=1.0, warmup_steps=2, tau_start=2.0, tau_end=0.1, anneal_steps=4)
    state.plan(first)
    assert state.early and state.waited == 3
    longer = replace(first, steps=80, warmup_steps=20, anneal_steps=40)  # shares of the longer run
    state.plan(state.planned(longer))
    made = state.planned(longer)
    assert (made.steps, made.warmup_steps, made.anneal_steps) == (80, 2, 4) and made.tau(8) == 0.1
    assert not state.early and state.waited == 0 and 0 < made.lr(8) < 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume"], "--resume FOLDER"),
        (["--config", "a.yaml"], "--config FILE and --out FOLDER"),
        (["--resume", "nowhere"], "nowhere holds no run"),
        (["--config", "a.yaml", "--out", "runs/a", "lr"], "'lr' is no KEY=VALUE"),
        (["--resume", "a", "b"], "'b' is no KEY=VALUE"),
    ],
)
def test_what_a_run_lacks_is_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["train", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_your_captions_are_trained_by_the_config_of_ten_lines(
    config: Path, tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = root / "configs" / "your_captions.yaml"
    assert len(file.read_text().splitlines()) <= 10
    model, data = config.parent / "model", config.parent / "data"
    small = ["backbone.name=llava", f"backbone.weights={model}", "backbone.dtype=float32", f"data.name={data}"]
    small += ["data.validation=4", "optim.accumulate=1", "optim.steps=2", "optim.precision=float32"]
    assert _run(["train", "--config", str(file), "--out", str(tmp_path / "mine"), *small, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 2
    vlm = PrunedVLM.from_pretrained(tmp_path / "mine")
    assert vlm.budget.keep == 0.25 and vlm.method.name == "diffprune"


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
