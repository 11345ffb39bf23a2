"""The clock."""

import time

import pytest
import torch

from diffprune.speed import timing


def test_times_are_of_the_runs_after_the_warm_up():
    calls: list[int] = []
    waits = iter([0.05, 0.05] + [0.0] * 7)  # the warm-up is slow

    def call() -> None:
        calls.append(1)
        time.sleep(next(waits))

    times = timing.times_ms(call, "cpu", runs=7, warm_up=2)
    assert len(times) == 7 and len(calls) == 9
    assert sorted(times)[3] < 25


def test_too_little_time_leaves_the_fewest_runs():
    assert len(timing.times_ms(lambda: None, "cpu", runs=30, warm_up=0, seconds=0.0)) == timing.FEWEST
    assert len(timing.times_ms(lambda: None, "cpu", runs=2, warm_up=0, seconds=0.0)) == 2


def test_a_long_call_is_warm_after_one():
    calls: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "WARM_UP_SECONDS", 0.0)
        times = timing.times_ms(lambda: calls.append(time.sleep(0.001) or 0.0), "cpu", runs=2, warm_up=3)
    assert len(times) == 2 and len(calls) == 3


def test_bandwidth_and_rate_are_of_this_machine():
    assert timing.copy_bandwidth("cpu", size=2**20) > 1e7
    assert timing.matrix_rate("cpu", torch.float32, side=64) > 1e6


def test_times_are_in_milliseconds():
    assert timing.time_ms(lambda: time.sleep(0.02), "cpu") == pytest.approx(20, rel=0.9)
