"""Which ranking the throttled loss asks for: the probe on a real run of the smallest reference model."""

import json
from pathlib import Path

import pytest
import torch

from diffprune.cli.main import _run
from diffprune.config import make_config
from diffprune.train.run import train_pruner
from diffprune_lab.probes import evidence, findings, temperature


def short_run(folder: Path, **changes: object) -> Path:
    values = {
        "backbone": {"name": "scenes-nano", "dtype": "float32"},
        "budget": {"keep": 8},
        "optim": {"steps": 1, "batch_size": 2, "accumulate": 1, "precision": "float32"},
        "data": {"name": "scenes", "validation": 0},
        "saving": {"tensorboard": False},
        **changes,
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("diffprune.train.trainer.CALIBRATION", 16)  # pictures; more would take seconds
        train_pruner(make_config(values), folder, quiet=True)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return short_run(tmp_path_factory.mktemp("runs") / "nano", method={"name": "diffprune", "noise": "matched"})


@pytest.mark.slow
def test_nearly_hard_weights_ask_for_the_things_and_the_page_has_both(run, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(
        temperature.SIZES, "tiny", temperature.TemperatureSettings(captions=16, taus=(0.1,), keeps=(0.1,), rankings=6)
    )
    arguments = ["probe", "temperature", "--weights", str(run), "--out", str(tmp_path), "--size", "tiny"]
    assert _run([*arguments, "--device", "cpu", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["run"], row["throttler"], row["tau"]) for row in rows] == [
        ("nano", "new", 0.1),
        ("nano", "trained", 0.1),
    ]
    for row in rows:  # the reference model reads things and no background
        assert row["slope"] == pytest.approx(row["bottom"] - row["top"], rel=1e-4)
        assert row["slope"] > 0.3 and row["ci95"][0] > 0 and row["agreement"] > 0.5
    assert (tmp_path / "temperature.png").stat().st_size > 1000
    for row in rows:
        assert f"| nano | {row['throttler']} | 10 | {row['slope']:.3f} ± " in evidence.block("temperature", tmp_path)


def test_slopes_and_agreements_stand_by_temperature() -> None:
    rows = [
        {
            "run": "a",
            "throttler": "trained",
            "keep": 0.25,
            "tau": tau,
            "slope": slope,
            "ci95": [slope - 0.01, slope + 0.01],
            "agreement": slope / 2,
        }
        for tau, slope in ((2.0, -0.1), (1.0, -0.05), (0.5, 0.2))
    ]
    said = findings.about_temperature(rows)
    assert "| a | trained | 25 | -0.100 ± 0.010 | -0.050 ± 0.010 | 0.200 ± 0.010 |" in said
    assert "| a | trained | 25 | -0.05 | -0.03 | 0.10 |" in said


def test_a_new_throttler_shares_what_noise_was_calibrated_to_and_nothing_learned(run, monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(temperature.Captions, "loss", lambda self, vlm, *_: seen.append(vlm.method) or 0.0)
    temperature.measure(run, "cpu", temperature.TemperatureSettings(captions=16, taus=(1.0,), keeps=(0.1,)))
    new, trained = seen[0].state_dict(), seen[-1].state_dict()
    assert torch.equal(new["throttle_noise.std"], trained["throttle_noise.std"]) and new["throttle_noise.std"].any()
    blocks = [name for name in trained if name.startswith("throttle_block.")]
    assert blocks and not all(torch.equal(new[name], trained[name]) for name in blocks)


def test_what_is_no_such_run_is_refused(tmp_path, capsys) -> None:
    for weights, words in (
        ([], "no run was named"),
        (["--weights", str(tmp_path)], "is no run of `diffprune train` with diffprune on scenes"),
        (["--weights", "a/run,b/run"], "have the same name"),
        (["--size", "huge"], "size 'huge'"),
    ):
        assert _run(["probe", "temperature", "--out", str(tmp_path), "--device", "cpu", *weights]) == 2
        assert words in capsys.readouterr().err
    folder = short_run(tmp_path / "other", method={"name": "gumbel_ste"})
    assert _run(["probe", "temperature", "--out", str(tmp_path), "--device", "cpu", "--weights", str(folder)]) == 2
    assert "with diffprune on scenes" in capsys.readouterr().err
