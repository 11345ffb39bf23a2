import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffprune.schedules import Schedule, learning_rate_scale, resolve_steps, tau_at

PAPER = {"start": 2.0, "end": 0.1, "anneal_steps": 2000}


def test_tau_follows_the_printed_schedule():
    assert tau_at(0, **PAPER) == pytest.approx(2.0)
    assert tau_at(1000, **PAPER) == pytest.approx((2.0 + 0.1) / 2)
    assert tau_at(500, **PAPER) == pytest.approx(0.1 + 1.9 / 2 * (1 + math.sqrt(0.5)))
    assert tau_at(2000, **PAPER) == pytest.approx(0.1)


def test_tau_stays_at_its_end():
    assert tau_at(8000, **PAPER) == tau_at(2000, **PAPER)


@given(st.integers(0, 3000))
def test_tau_never_rises(step):
    assert tau_at(step + 1, **PAPER) <= tau_at(step, **PAPER)


def test_tau_without_annealing_is_its_end():
    assert tau_at(0, start=2.0, end=0.1, anneal_steps=0) == 0.1


@pytest.mark.parametrize(("amount", "steps"), [(2000, 2000), (0.8, 240), (0.005, 2), (0.0, 0), (1, 1), (1.0, 300)])
def test_steps_are_an_int_or_a_share_rounded_half_up(amount, steps):
    assert resolve_steps(amount, 300) == steps


def test_the_rate_rises_to_full_and_falls_to_nothing():
    scale = [learning_rate_scale(step, total_steps=100, warmup_steps=3) for step in range(101)]
    assert scale[:4] == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0])
    assert scale[100] == pytest.approx(0.0)
    assert all(later < earlier for earlier, later in itertools.pairwise(scale[3:]))


def test_the_paper_recipe_starts_at_the_full_rate():
    assert learning_rate_scale(0, total_steps=100, warmup_steps=0) == 1.0
    assert learning_rate_scale(50, total_steps=100, warmup_steps=0) == pytest.approx(0.5)


def test_the_rate_of_a_run_that_goes_on_too_long_is_not_negative():
    assert learning_rate_scale(500, total_steps=100, warmup_steps=3) == 0.0


def test_a_run_has_its_own_peak_rate_and_temperatures():
    run = Schedule(steps=100, peak_lr=3e-4, warmup_steps=0, tau_start=2.0, tau_end=0.1, anneal_steps=50)
    assert [run.lr(0), run.lr(50), run.lr(100)] == pytest.approx([3e-4, 1.5e-4, 0.0])
    assert [run.tau(0), run.tau(25), run.tau(50)] == pytest.approx([2.0, 1.05, 0.1])
