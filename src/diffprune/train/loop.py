"""The optimiser step of every training, and a loop of them for one process.

AdamW, warm-up, cosine learning rate, clipping; the loop has the falling temperature too.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from diffprune.config import OptimConfig, TauConfig
from diffprune.schedules import learning_rate_scale, resolve_steps, tau_at

MOST_SKIPPED = 10  # steps in a row without a usable gradient; then it is no accident


def make_optimizer(trained: Sequence[nn.Parameter], optim: OptimConfig) -> torch.optim.AdamW:
    """AdamW for these parameters; `descend` sets its learning rate."""
    return torch.optim.AdamW(trained, lr=optim.lr, weight_decay=optim.weight_decay)


def descend(
    optimizer: Any,
    trained: Sequence[nn.Parameter],
    optim: OptimConfig,
    *,
    loss: float,
    step: int,
    place: int,
    steps: int,
    skipped: int = 0,
    clip: Callable[..., Any] = nn.utils.clip_grad_norm_,
) -> float:
    """Take one step along the gradients that are there; the learning rate it was taken with.

    A gradient may be infinite or NaN where the loss is a number, and a step along it would make every weight NaN: none
    is taken then, and the rate is 0.

    Args:
        optimizer: From `make_optimizer`, as it is or wrapped.
        loss: What the gradients are of, in full; one that is no number stops the training.
        step: Steps taken before, for the message.
        place: In the schedule of `steps` steps.
        skipped: Steps just before that were not taken; too many in a row stop the training.
        clip: Called with the parameters and the largest norm.
    """
    if not math.isfinite(loss):
        raise ValueError(f"the loss is {loss} at step {step}; lower optim.lr={optim.lr} or check the data")
    warmup_steps = resolve_steps(optim.warmup, steps)
    lr = optim.lr * learning_rate_scale(place, total_steps=steps, warmup_steps=warmup_steps)
    for group in optimizer.param_groups:
        group["lr"] = lr
    norm = float(clip(trained, math.inf if optim.clip is None else optim.clip))
    if math.isfinite(norm):
        optimizer.step()
        return lr
    if skipped + 1 >= MOST_SKIPPED:
        raise ValueError(
            f"the gradient is {norm} at step {step}, as at the {skipped} steps before it; start anew with a lower "
            f"optim.lr than {optim.lr}, or check the data"
        )
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
    optim, tau = optim or OptimConfig(), tau or TauConfig()
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        raise ValueError(
            "no parameter requires a gradient, so there is nothing to train; give those of a learned method"
        )
    anneal_steps = resolve_steps(tau.anneal_steps, steps)
    optimizer = make_optimizer(trained, optim)
    losses: list[float] = []
    skipped = 0
    start = time.perf_counter()
    for step in count():
        spent = 0.0 if seconds is None else (time.perf_counter() - start) / seconds
        place = max(step, int(spent * steps))
        if place >= steps and (losses or steps == 0):
            break
        value = loss(step, tau_at(place, start=tau.given_start, end=tau.end, anneal_steps=anneal_steps))
        optimizer.zero_grad()
        value.backward()
        losses.append(value.item())
        lr = descend(optimizer, trained, optim, loss=losses[-1], step=step, place=place, steps=steps, skipped=skipped)
        skipped = 0 if lr else skipped + 1
        if on_step is not None:
            on_step(step, losses[-1])
    return losses
