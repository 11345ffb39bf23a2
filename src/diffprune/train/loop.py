"""The optimiser step of every training, and a loop of them for one process.

AdamW, clipping, and both schedules: warm-up with a cosine learning rate, and the falling temperature. `dp.train` takes
the same steps in `train.trainer`, with checkpoints, validation and several processes; the loop here is for a study.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from diffprune.config import OptimConfig, TauConfig
from diffprune.schedules import Schedule, resolve_steps

MOST_SKIPPED = 10  # steps in a row without a usable gradient; then it is no accident


@dataclass(slots=True)
class Progress:
    """How far a training is.

    Args:
        step: Optimiser steps behind it.
        skipped: Those of them that were not taken, for their gradient was not finite.
        skipped_last: How many of these were the last ones, in a row.
    """

    step: int = 0
    skipped: int = 0
    skipped_last: int = 0


def make_optimizer(trained: Sequence[nn.Parameter], optim: OptimConfig) -> torch.optim.AdamW:
    """AdamW for these parameters, on a GPU as one kernel; `descend` sets its learning rate."""
    fused = all(parameter.is_cuda for parameter in trained)
    return torch.optim.AdamW(trained, lr=optim.lr, weight_decay=optim.weight_decay, fused=fused)


def make_schedule(optim: OptimConfig, tau: TauConfig, steps: int) -> Schedule:
    """The schedules of a run of so many steps."""
    return Schedule(
        steps=steps,
        peak_lr=optim.lr,
        warmup_steps=resolve_steps(optim.warmup, steps),
        tau_start=tau.start,
        tau_end=tau.end,
        anneal_steps=resolve_steps(tau.anneal_steps, steps),
    )


def descend(
    optimizer: Any,
    trained: Sequence[nn.Parameter],
    optim: OptimConfig,
    progress: Progress,
    *,
    lr: float,
    clip: Callable[..., Any] = nn.utils.clip_grad_norm_,
) -> Float[Tensor, ""]:
    """The norm of the gradients that are there, once a step was taken along them.

    A gradient may be infinite or NaN where the loss is a number, and a step along it would make every weight NaN: none
    is taken then. An optimiser that is one kernel looks for itself, on the device; `account` says later what it did.

    Args:
        optimizer: From `make_optimizer`, as it is or wrapped.
        lr: The learning rate of this step.
        clip: Called with the parameters and the largest norm.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    norm = clip(trained, math.inf if optim.clip is None else optim.clip)
    own = getattr(optimizer, "optimizer", optimizer)  # Accelerate's stands around it
    if own.defaults["fused"]:
        own.found_inf = (~norm.isfinite()).float()
    if own.defaults["fused"] or math.isfinite(norm):
        optimizer.step()
    progress.step += 1
    return norm


def account(progress: Progress, optim: OptimConfig, *, step: int, loss: float, norm: float, lr: float) -> float:
    """The learning rate that a step was taken with, 0 where it was not; an error where too many were not.

    Args:
        step: That is accounted for; by then others may have been taken.
        loss: What its gradients were of, in full; one that is no number stops the training.
        norm: Of its gradients.
    """
    if not math.isfinite(loss):
        raise ValueError(f"the loss is {loss} at step {step}; lower optim.lr={optim.lr} or check the data")
    if math.isfinite(norm):
        progress.skipped_last = 0
        return lr
    if progress.skipped_last + 1 >= MOST_SKIPPED:
        raise ValueError(
            f"the gradient is {norm} at step {step}, as at the {progress.skipped_last} steps before it; start anew "
            f"with a lower optim.lr than {optim.lr}, or check the data"
        )
    progress.skipped += 1
    progress.skipped_last += 1
    return 0.0


def train(
    parameters: Iterable[nn.Parameter],
    loss: Callable[[int, float], Float[Tensor, ""]],
    *,
    steps: int,
    seconds: float | None = None,
    optim: OptimConfig | None = None,
    tau: TauConfig | None = None,
    on_step: Callable[[int, float], None] | None = None,
) -> list[float]:
    """The loss of every step, after all of them were taken.

    Args:
        parameters: Of a trainable pruner; frozen ones are passed over.
        loss: `loss(step, tau)`; it draws its own data and noise from the step, so that a run can be repeated.
        steps: Optimiser steps; with `seconds`, at most so many.
        seconds: Time to spend: the schedules then follow the share of it that has passed, so that a run ends annealed
            and in time however quick the machine is.
        optim: Learning rate, warm-up, weight decay and clipping; batches are the business of `loss`.
        tau: The temperature's start, end and way down.
        on_step: Called with (step, loss) after each step, for progress.
    """
    optim = optim or OptimConfig()
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        raise ValueError(
            "no parameter requires a gradient, so there is nothing to train; give those of a learned method"
        )
    schedule = make_schedule(optim, tau or TauConfig(), steps)
    optimizer = make_optimizer(trained, optim)
    losses: list[float] = []
    progress = Progress()
    start = time.perf_counter()
    while True:
        step = progress.step
        spent = 0.0 if seconds is None else (time.perf_counter() - start) / seconds
        place = max(step, int(spent * steps))  # in the schedules
        if place >= steps and (losses or steps == 0):
            return losses
        value = loss(step, schedule.tau(place))
        optimizer.zero_grad()
        value.backward()
        losses.append(value.item())
        lr = schedule.lr(place)
        norm = descend(optimizer, trained, optim, progress, lr=lr)
        account(progress, optim, step=step, loss=losses[-1], norm=float(norm), lr=lr)
        if on_step is not None:
            on_step(step, losses[-1])
