"""Who runs which sample, and what is drawn for it."""

import pytest
import torch

from diffprune.config import BudgetConfig, TauConfig
from diffprune.train.sampler import draw_keep, draw_tau, global_batch, micro_batches, noise_generator

CPU = torch.device("cpu")


@pytest.mark.parametrize(("batch_size", "world"), [(4, 1), (2, 2), (1, 4), (8, 1)])
def test_every_sample_of_a_step_is_run_once_whoever_runs_it(batch_size: int, world: int) -> None:
    parts = [
        part
        for rank in range(world)
        for part in micro_batches(global_batch(3, 8), batch_size=batch_size, rank=rank, world=world)
    ]
    assert all(len(part) == batch_size for part in parts)
    assert sorted(position for part in parts for position in part) == list(range(24, 32))


def test_noise_is_named_by_seed_step_and_sample() -> None:
    def draw(*key: int | str) -> float:
        return torch.rand((), generator=noise_generator(CPU, *key)).item()  # type: ignore[arg-type]

    values = [draw(*key) for key in ((1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4), (1, "validation", 3))]
    assert len(set(values)) == 5 and draw(1, 2, 3) == values[0]


def test_a_budget_is_fixed_or_drawn_from_all_of_its_range_evenly_by_octave() -> None:
    assert draw_keep(BudgetConfig(keep=64), 1, 2, 3) == 64
    drawn = [draw_keep(BudgetConfig(range=(8, 32)), 42, step, 0) for step in range(2000)]
    assert set(drawn) == set(range(8, 33))
    assert sum(keep < 16 for keep in drawn) / 2000 == pytest.approx(0.47, abs=0.04)  # below 15.5, one octave of two
    shares = [draw_keep(BudgetConfig(range=(0.05, 0.8)), 42, step, 0) for step in range(500)]
    assert all(isinstance(share, float) and 0.05 <= share <= 0.8 for share in shares) and len(set(shares)) > 400
    assert draw_keep(BudgetConfig(range=(8, 8)), 42, 0, 0) == 8


def test_a_temperature_is_drawn_for_each_sample_between_the_last_and_the_annealed_one() -> None:
    tau = TauConfig(start=2.0, end=0.1, drawn=True)
    drawn = [draw_tau(tau, 1.6, 42, 3, sample) for sample in range(2000)]
    assert 0.1 <= min(drawn) < 0.11 and 1.5 < max(drawn) <= 1.6
    assert sum(value < 0.4 for value in drawn) / 2000 == pytest.approx(0.5, abs=0.04)  # two octaves of four
    assert draw_tau(tau, 1.6, 42, 3, 7) == drawn[7] != draw_tau(tau, 1.6, 42, 4, 7)
    assert draw_tau(tau, 0.1, 42, 3, 7) == 0.1  # validation, and the end of a run
    assert draw_tau(TauConfig(start=2.0, end=0.1), 1.6, 42, 3, 7) == 1.6
