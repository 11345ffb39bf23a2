"""Runs in step with each other: what each learns is what it learns alone."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from diffprune.config import load_config
from diffprune.train import loop, trainer
from diffprune.train.run import train_pruner
from diffprune.train.watch import read_metrics
from diffprune_lab.studies import in_step
from diffprune_lab.studies.in_step import InStep, main, train_in_step

CONFIG = Path(__file__).parents[2] / "configs" / "scenes_nano" / "diffprune_any.yaml"
SHORT = (
    *("optim.steps=2", "optim.batch_size=2", "data.validation=2", "validation.every=1.0", "saving.tensorboard=false"),
    "backbone.dtype=float32",
)


@pytest.fixture
def norms(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The norm of the gradient at every step of every run, as it comes."""
    found: list[float] = []

    def noted(*given: Any, **more: Any) -> torch.Tensor:
        norm = loop.descend(*given, **more)
        found.append(float(norm))
        return norm

    for module in (in_step, trainer):
        monkeypatch.setattr(module, "descend", noted)
    return found


@pytest.mark.parametrize(
    "kind",
    [
        ("method.name=diffprune", "recipe=bridge"),
        ("method.name=diffprune", "recipe=bridge", "tau.start=0.1", "remove_below=0.05"),  # tokens leave the sequence
        ("method.name=gumbel_ste",),
    ],
    ids=" ".join,
)
def test_each_run_learns_what_it_would_alone(tmp_path: Path, norms: list[float], kind: tuple[str, ...]) -> None:
    configs = {seed: load_config(CONFIG, [*SHORT, *kind, f"seed={seed}"]) for seed in (42, 123)}
    train_in_step([(config, tmp_path / f"beside-{seed}") for seed, config in configs.items()])
    together = {seed: norms[place :: len(configs)] for place, seed in enumerate(configs)}
    for seed, config in configs.items():
        norms.clear()
        train_pruner(config, tmp_path / f"alone-{seed}", quiet=True)
        assert len(norms) == 2 and together[seed] == pytest.approx(norms, rel=1e-4)
        # Not weight by weight: Adam makes a whole step of a gradient that is nothing but rounding.
        alone, beside = (
            [
                (record["step"], record[key])
                for record in read_metrics(tmp_path / f"{way}-{seed}")
                for key in ("entropy", "throttled", "hard")
                if key in record
            ]
            for way in ("alone", "beside")
        )
        assert len(alone) == 4  # two steps, and one validation by both losses
        for one, other in zip(alone, beside, strict=True):
            assert one == pytest.approx(other, rel=1e-4)


def test_runs_that_are_there_are_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def command(seeds: str) -> None:
        words = [*SHORT, "--config", str(CONFIG), "--seeds", seeds, "--out", str(tmp_path / "{seed}")]
        monkeypatch.setattr("sys.argv", ["in_step", *words])
        main()

    command("42")
    written = (tmp_path / "42" / "model.safetensors").stat().st_mtime_ns
    command("42,7")
    assert (tmp_path / "42" / "model.safetensors").stat().st_mtime_ns == written
    assert (tmp_path / "7" / "model.safetensors").is_file()


def test_runs_cut_off_between_two_saves_go_on_from_a_step_that_all_have(tmp_path: Path) -> None:
    configs = [load_config(CONFIG, [*SHORT, "validation.every=1", f"seed={seed}"]) for seed in (42, 7)]
    runs = [(config, tmp_path / str(config.seed)) for config in configs]
    whole = train_in_step(runs)
    for _, folder in runs:  # as if killed after the first of two had saved its last step
        for name in ("config.json", "model.safetensors"):
            (folder / name).unlink()
    shutil.rmtree(tmp_path / "7" / "checkpoint-000002")
    again = train_in_step(runs)
    assert [one["step"] for one in again] == [2, 2]
    for one, other in zip(whole, again, strict=True):
        assert one["best"] == other["best"]
    new = (load_config(CONFIG, [*SHORT, "validation.every=1", "seed=5"]), tmp_path / "5")
    with pytest.raises(ValueError, match="no checkpoint of one step"):  # and none of the others' is lost
        train_in_step([*runs, new])
    assert (tmp_path / "42" / "checkpoint-000002").is_dir()


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (("optim.lr=1e-3",), ("optim.lr=1e-4",), "differ by more than their seed"),
        (("optim.accumulate=2",), ("optim.accumulate=2",), "optim.accumulate is 2"),
        (("method.name=dynamicvit",), ("method.name=dynamicvit",), "one by one"),
        (("method.noise=matched",), ("method.noise=matched",), "has 'throttle_noise.mean', .* one by one"),
        (("method.name=visionselector",), ("method.name=visionselector",), "has 'throttle_passes', .* one by one"),
        (
            ("method.name=gumbel_ste", "method.choice=token"),
            ("method.name=gumbel_ste", "method.choice=token"),
            "has a penalty, .* one by one",
        ),
    ],
)
def test_runs_that_cannot_share_a_pass_are_refused(
    tmp_path: Path, first: tuple[str, ...], second: tuple[str, ...], said: str
) -> None:
    runs = [(load_config(CONFIG, [*SHORT, *one]), tmp_path / str(number)) for number, one in enumerate((first, second))]
    with pytest.raises(ValueError, match=said):
        train_in_step(runs)


def test_a_row_that_cannot_be_used_is_named_and_no_run_learns_from_another_s(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    lines = []
    for number in range(8):
        Image.new("RGB", (192, 192), (number, 0, 0)).save(data / f"{number}.png")
        lines.append(json.dumps({"image": f"{number}.png", "caption": "a red star"}))
    (data / "metadata.jsonl").write_text("\n".join(lines))
    (data / "5.png").write_bytes(b"")
    given = [*SHORT, f"data.name={data}", "data.validation=0", "data.max_broken=1.0", "optim.steps=4", "recipe=paper"]
    runs = [(load_config(CONFIG, [*given, f"seed={seed}"]), tmp_path / str(seed)) for seed in (42, 7)]
    with pytest.raises(ValueError, match=r"row 5 cannot be used \(.*5.png is empty\), and runs in step .* one by one"):
        train_in_step(runs)


def test_runs_in_step_are_repeatable_where_asked_and_may_be_made_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, take_step = [], InStep.take_step

    def noted(self: Any, parts: Any) -> Any:
        seen.append(torch.are_deterministic_algorithms_enabled())
        return take_step(self, parts)

    monkeypatch.setattr(InStep, "take_step", noted)
    for steps in (1, 2):
        given = [*SHORT, "deterministic=true", "validation.every=1", f"optim.steps={steps}"]
        (tmp_path / "42" / "config.json").unlink(missing_ok=True)
        train_in_step([(load_config(CONFIG, given), tmp_path / "42")])
        assert load_config(tmp_path / "42" / "run.yaml").optim.steps == steps
    assert seen == [True, True] and not torch.are_deterministic_algorithms_enabled()
