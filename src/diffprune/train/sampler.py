"""Which samples a step has, and what is drawn for each: pure functions of (seed, step, sample).

A step's global batch is a range of positions, dealt out in micro-batches over forward passes and processes. Whoever
gets a sample draws the same noise and the same K for it.
"""

import math

import torch

from diffprune.config import BudgetConfig
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
    share = Rng(seed, "budget", step, sample).below(1 << 32) / ((1 << 32) - 1)
    return between(*budget.range, share)


def between(low: int | float, high: int | float, share: float) -> int | float:
    """The budget that lies a share of the way from low to high on a log scale; a whole number between whole numbers."""
    keep = min(high, max(low, low * math.exp(share * math.log(high / low))))
    return round(keep) if isinstance(low, int) else keep
