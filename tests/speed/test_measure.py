"""One row: what is timed, and the floor below it."""

import pytest

from diffprune.speed import measure, stages, timing
from diffprune.speed.stages import EagerRequest
from tests.clock import FakeClock
from tests.speed.sample import batch_of


def test_every_length_that_is_timed_was_seen_before(monkeypatch):
    clock, lengths = FakeClock(), []
    monkeypatch.setattr(timing, "time", clock)

    class Growing(stages.TimedRequest):
        length = 0

        def start(self) -> None:
            self.length = 0

        def step(self) -> None:
            clock.advance(0.001 if self.length in lengths else 0.02)  # what a kernel prepares for a new shape
            lengths.append(self.length)
            self.length += 1

    assert measure.decode_ms(Growing(), "cpu") == pytest.approx((20.0, 1.0))
    assert lengths == 2 * list(range(measure.DECODE_WARM_UP + measure.DECODE_STEPS))


def test_kernels_of_a_prefill_are_listed(subject):
    request = EagerRequest(subject, batch_of(subject))
    listed = measure.slowest_kernels(request.stages["prefill"], 3, "cpu")
    assert len(listed) == 3 and " ms, " in listed[0]


def test_the_floor_is_the_longer_of_reading_and_computing():
    hardware = measure.Hardware(bandwidth=1e12, rate=1e14)
    assert hardware.floor_ms(2e9, 1e10) == pytest.approx(2.0)
    assert hardware.floor_ms(2e9, 1e12) == pytest.approx(10.0)
