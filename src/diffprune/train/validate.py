"""The losses of held-out samples, and what they decide: which weights are the best, and when a run has had enough."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import Accelerator

from diffprune.train.feed import Sample
from diffprune.train.folder import RunState
from diffprune.train.frozen import not_recomputing
from diffprune.train.objective import LossKind, Objective

FIXED = "validation"  # in place of the step: noise and budgets of validation are the same each time


@torch.no_grad()
def held_out_losses(
    objective: Objective,
    samples: Sequence[Sample],
    kinds: Sequence[LossKind],
    *,
    tau: float,
    num_targets: int,
    accelerator: Accelerator,
    total: Callable[..., list[float]],
) -> list[float]:
    """The loss of all samples, once of each kind, shared out over the processes.

    Args:
        tau: The run's final temperature.
        num_targets: Answer tokens of all samples.
        total: Sums values over the processes.
    """
    mine, size = samples[accelerator.process_index :: accelerator.num_processes], objective.config.optim.batch_size
    divisor = torch.tensor(num_targets, dtype=torch.float32).to(accelerator.device)
    sums = {kind: torch.zeros((), dtype=torch.float64, device=accelerator.device) for kind in kinds}
    most = -(-len(samples) // accelerator.num_processes)  # as many passes in each process
    objective.eval()  # a method may count its training passes
    try:
        with not_recomputing(objective.backbone):
            for start, kind in itertools.product(range(0, most, size), kinds):
                with accelerator.autocast():
                    part = mine[start : start + size]
                    loss, _ = objective(part, FIXED, tau, divisor, num_prompts=len(samples), kind=kind)
                    sums[kind] += loss.double()
    finally:
        objective.train()
    losses = total(*sums.values())
    for kind, loss in zip(sums, losses, strict=True):
        if not math.isfinite(loss):
            raise ValueError(
                f"the loss of the held-out samples is {loss} ({kind}); lower optim.lr, check the data, or set "
                "backbone.dtype=bfloat16 where it is float16"
            )
    return losses


def judge(state: RunState, record: dict[str, Any], *, choose_by: str, patience: int | None, settled: bool) -> None:
    """Note in both whether this validation is the best so far, and whether patience has run out.

    Args:
        settled: Whether the temperature has reached its end.
    """
    record["best"] = state.best is None or record[choose_by] < state.best[choose_by]
    if record["best"]:
        state.best, state.waited = dict(record), 0
    elif settled:
        state.waited += 1
        state.early = patience is not None and state.waited >= patience
