"""Coherence, landscape and alignment of scorers that `diffprune train` made on a vision-language model."""

import json
from pathlib import Path

import pytest

from diffprune.cli.main import _run
from diffprune.results import read_results
from diffprune_lab.probes import scorers
from lab.tests.probes.test_temperature import short_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    made = (("ours", "diffprune", "bridge"), ("paper", "diffprune", "paper"), ("gumbel", "gumbel_ste", "default"))
    return [short_run(folder / name, method={"name": method}, recipe=recipe) for name, method, recipe in made]


def asked(*arguments: object) -> int:
    return _run(["probe", *map(str, arguments), "--size", "tiny", "--device", "cpu"])


def test_three_probes_of_three_scorers_and_nothing_is_measured_twice(runs, tmp_path, capsys, monkeypatch) -> None:
    told = ("all", "--backbone", "scenes-nano", "--weights", ",".join(map(str, runs)), "--out", tmp_path)
    assert asked(*told, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    methods = {"diffprune", "diffprune_plain", "gumbel_ste"}
    for name, rows in found.items():
        assert {row["method"] for row in rows} == methods and {row["n_seeds"] for row in rows} == {1}
        assert read_results(tmp_path / f"scenes_{name}.json").rows == rows
    assert {(row["moment"], row["keep"]) for row in found["coherence"]} == {(0, 0.1111), (0, 0.2222), (1, 0.1111)}
    assert all(-1 <= row["cosine"] <= 1 for row in found["coherence"])
    ours = [row for row in found["landscape"] if row["method"] != "gumbel_ste" and row["moment"] == 0]
    assert all(row["variation"] > 0 and row["ratio"] > 0 for row in ours)
    for row in found["alignment"]:
        assert row["gap_loss"] == pytest.approx(row["throttled_loss"] - row["hard_loss"], abs=1e-4)
        assert 0 < row["weight"] <= 1 and 0 <= row["hard_top1"] <= 100
    monkeypatch.setattr(scorers.ScorerBench, "captions", lambda *_: pytest.fail("measured again"))
    assert asked(*told) == 0


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--backbone", "scarce-llava"], "no run on scarce-llava was named"),
        (["--backbone", "scarce-llava", "--weights", "RUN"], "is no run of `diffprune train` on scarce-llava"),
        (["--backbone", "scenes-nano", "--weights", "nothing"], "is no run of `diffprune train` on scenes-nano"),
        (["--backbone", "scenes-nano", "--weights", "RUN", "--seeds", "7"], "no run has a seed of 7"),
        (["--backbone", "scenes-qwen-s"], "choose from deit-tiny, deit-small, deit-base, scenes-llava"),
    ],
)
def test_runs_of_another_model_or_none_are_refused(runs, tmp_path, capsys, arguments, words) -> None:
    told = [str(runs[0]) if word == "RUN" else word for word in arguments]
    assert asked("coherence", "--out", tmp_path, *told) == 2
    assert words in capsys.readouterr().err


def test_a_run_without_its_checkpoint_has_no_throttler(runs, tmp_path, capsys) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("run.yaml", "config.json", "model.safetensors"):
        (bare / name).write_bytes((runs[0] / name).read_bytes())
    assert asked("alignment", "--backbone", "scenes-nano", "--weights", bare, "--out", tmp_path) == 2
    assert "holds no training checkpoint" in capsys.readouterr().err
