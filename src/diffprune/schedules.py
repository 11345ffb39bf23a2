"""Temperature and learning rate as pure functions of the optimiser step.

`step` counts optimiser steps from 0, so a resumed run needs nothing but its step to go on exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


def resolve_steps(amount: int | float, total_steps: int) -> int:
    """A number of steps from an int (steps) or a float (share of the run, rounded half up)."""
    if isinstance(amount, int):
        return amount
    return math.floor(amount * total_steps + 0.5)


def tau_at(step: int, *, start: float, end: float, anneal_steps: int) -> float:
    """The Soft Top-K temperature: a half cosine from `start` to `end`, then constant (paper, appendix).

    tau_t = end + (start - end) / 2 * (1 + cos(pi * min(t, T) / T)) with T = anneal_steps.
    """
    if anneal_steps < 1:
        return end
    progress = min(step, anneal_steps) / anneal_steps
    return end + (start - end) / 2 * (1 + math.cos(math.pi * progress))


def learning_rate_scale(step: int, *, total_steps: int, warmup_steps: int) -> float:
    """The factor on the peak learning rate: linear up over the warm-up, then a half cosine that reaches 0 at the end.

    Step 0 already learns (1 / warmup_steps, not 0), and the first step after the warm-up has the full rate.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    decay_steps = max(1, total_steps - warmup_steps)
    progress = min(1.0, (step - warmup_steps) / decay_steps)
    return (1 + math.cos(math.pi * progress)) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Both schedules of a training of `steps` steps; `anneal_steps` and `warmup_steps` are optimiser steps."""

    steps: int
    peak_lr: float
    warmup_steps: int
    tau_start: float
    tau_end: float
    anneal_steps: int

    def tau(self, step: int) -> float:
        """The temperature of a step."""
        return tau_at(step, start=self.tau_start, end=self.tau_end, anneal_steps=self.anneal_steps)

    def lr(self, step: int) -> float:
        """The learning rate of a step."""
        return self.peak_lr * learning_rate_scale(step, total_steps=self.steps, warmup_steps=self.warmup_steps)
