"""Which samples a step has, and what is drawn for each: pure functions of (seed, step, sample).

A step's global batch is a range of positions, dealt out in micro-batches over forward passes and processes. Whoever
gets a sample draws the same noise and the same K for it.
"""

import math

import torch

from diffprune.config import BudgetConfig, TauConfig
from diffprune.rng import Rng, hash_key


def global_batch(step: int, size: int) -> range:
    """Positions in the run of the samples of one optimiser step."""
    return range(step * size, (step + 1) * size)


def micro_batches(positions: range, *, batch_size: int, rank: int = 0, world: int = 1) -> list[range]:
    """The part of a global batch that one process runs, one range for each forward pass."""
    assert len(positions) % (batch_size * world) == 0, "a global batch is batch_size * accumulate * processes"
    pieces = [positions[start : start + batch_size] for start in range(0, len(positions), batch_size)]
    return pieces[rank::world]


def noise_generator(device: torch.device, seed: int, step: int | str, sample: int) -> torch.Generator:
    """The generator of one sample's noise; `step` is a word where the noise shall be the same at every step."""
    return torch.Generator(device).manual_seed(hash_key(seed, "noise", step, sample))


def draw_keep(budget: BudgetConfig, seed: int, step: int | str, sample: int) -> int | float:
    """The budget of one sample: the fixed one, or one of the range, evenly on a log scale."""
    if budget.range is None:
        assert budget.keep is not None
        return budget.keep
    return between(*budget.range, _share(seed, "budget", step, sample))


def draw_tau(tau: TauConfig, annealed: float, seed: int, step: int | str, sample: int) -> float:
    """The temperature of one sample: the annealed one, or one between it and the last, evenly on a log scale."""
    if not tau.drawn or annealed <= tau.end:
        return annealed
    return float(between(float(tau.end), annealed, _share(seed, "tau", step, sample)))


def between(low: int | float, high: int | float, share: float) -> int | float:
    """What lies a share of the way from low to high on a log scale; a whole number between whole numbers."""
    value = min(high, max(low, low * math.exp(share * math.log(high / low))))
    return round(value) if isinstance(low, int) else value


def _share(seed: int, name: str, step: int | str, sample: int) -> float:
    """A number from 0 to 1 for this sample at this step, whatever batch it is in."""
    return Rng(seed, name, step, sample).below(1 << 32) / ((1 << 32) - 1)
