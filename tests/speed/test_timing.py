"""How calls are timed, by a clock that moves only when told to."""

import pytest
import torch

from diffprune.speed import timing
from tests.clock import FakeClock


@pytest.fixture
def clock(monkeypatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(timing, "time", clock)
    return clock


def test_times_are_of_the_runs_after_the_warm_up_in_milliseconds(clock):
    waits = iter([0.05, 0.05] + [0.002] * 7)  # the warm-up is slow
    times = timing.times_ms(lambda: clock.advance(next(waits)), "cpu", runs=7, warm_up=2)
    assert times == pytest.approx([2.0] * 7)
    assert next(waits, None) is None


def test_too_little_time_leaves_the_fewest_runs(clock):
    assert len(timing.times_ms(lambda: None, "cpu", runs=30, warm_up=0, seconds=0.0)) == timing.FEWEST
    assert len(timing.times_ms(lambda: None, "cpu", runs=2, warm_up=0, seconds=0.0)) == 2
    assert len(timing.times_ms(lambda: clock.advance(0.1), "cpu", runs=30, warm_up=0, seconds=1.95)) == 20


def test_a_long_call_is_warm_after_one(clock):
    calls: list[int] = []

    def call() -> None:
        calls.append(1)
        clock.advance(timing.WARM_UP_SECONDS + 0.1)

    assert len(timing.times_ms(call, "cpu", runs=2, warm_up=3)) == 2 and len(calls) == 3


def test_bandwidth_and_rate_are_bytes_and_operations_in_the_time_of_a_call(monkeypatch):
    monkeypatch.setattr(timing, "median_ms", lambda call, device, *, runs: call() is None or 2.0)
    assert timing.copy_bandwidth("cpu", size=2**20) == pytest.approx(2 * 2**20 / 2e-3)
    assert timing.matrix_rate("cpu", torch.float32, side=64) == pytest.approx(2 * 64**3 / 2e-3)
