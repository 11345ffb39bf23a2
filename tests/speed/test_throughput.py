"""The closed loop of requests."""

import re
from pathlib import Path

import pytest

from diffprune.backbones.prompts import Batch
from diffprune.cli.main import main
from diffprune.results import check_rows, read_results
from diffprune.speed import profile, throughput
from tests.clock import FakeClock
from tests.speed.sample import OPTIONS


def test_the_loop_compares_with_the_full_model():
    settings = profile.ProfileSettings(**{**OPTIONS, "batches": [1, 2]}, methods=["full", "diffprune"], paths=["fast"])
    measured = throughput.throughput(settings)
    check_rows(measured)
    assert len(measured) == 4 and not any("error" in row for row in measured), measured
    for row in measured:
        assert row["requests"] == row["batch"] * throughput.FEWEST_ROUNDS
        assert row["ttft_ms"] <= row["ttft_p99_ms"]
        assert row["requests_s"] > 0 and ("speedup" in row)


def test_the_page_has_the_command_that_measured_the_loop(root: Path):
    recorded = re.sub(r"--commit \S+|--out \S+", "", read_results(root / "results" / "throughput.json").command)
    (shown,) = (line for line in (root / "docs" / "profile.md").read_text().splitlines() if " --throughput " in line)
    assert sorted(re.sub(r"--out \S+", "", shown).split()) == sorted(recorded.split())


def test_a_percentile_is_a_measured_value():
    assert throughput.percentile([1.0, 2.0, 3.0], 0.99) == 3.0
    assert throughput.percentile([float(i) for i in range(1, 201)], 0.99) == 198.0
    assert throughput.percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.0 and throughput.percentile([1.0, 2.0], 0.0) == 1.0


def test_every_round_of_the_loop_waits_for_its_answer(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(throughput, "time", clock)
    monkeypatch.setattr(throughput, "ROUNDS", 5)
    monkeypatch.setattr(throughput, "FEWEST_ROUNDS", 5)
    rounds = throughput.closed_loop(lambda batch: clock.advance(0.002), [Batch(features={})] * 2, "cpu")
    assert rounds == pytest.approx([2.0] * 5)


def test_a_long_loop_ends_when_its_time_is_over(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(throughput, "time", clock)
    monkeypatch.setattr(throughput, "LOOP_SECONDS", 4.0)
    rounds = throughput.closed_loop(lambda batch: clock.advance(0.5), [Batch(features={})], "cpu")
    assert len(rounds) == 8


def test_a_loop_in_8_bits_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["profile", "--backbone", "llava-1.5-7b", "--random-weights", "--size", "tiny", "--throughput"]
    with pytest.raises(SystemExit, match="2"), pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["diffprune", *words, "--precision", "fp8"])
        main()
    assert "--throughput measures the model's own precision; leave --precision out" in capsys.readouterr().err
