"""The training loop for one process: AdamW, warm-up, cosine learning rate, falling temperature."""

import time
from collections.abc import Callable, Iterable
from itertools import count

import torch
from jaxtyping import Float
from torch import Tensor, nn

from diffprune.config import OptimConfig, TauConfig
from diffprune.schedules import learning_rate_scale, resolve_steps, tau_at


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
    warmup_steps, anneal_steps = resolve_steps(optim.warmup, steps), resolve_steps(tau.anneal_steps, steps)
    optimizer = torch.optim.AdamW(trained, lr=optim.lr, weight_decay=optim.weight_decay)
    losses: list[float] = []
    start = time.perf_counter()
    for step in count():
        spent = 0.0 if seconds is None else (time.perf_counter() - start) / seconds
        place = max(step, int(spent * steps))
        if place >= steps and (losses or steps == 0):
            break
        for group in optimizer.param_groups:
            group["lr"] = optim.lr * learning_rate_scale(place, total_steps=steps, warmup_steps=warmup_steps)
        value = loss(step, tau_at(place, start=tau.start, end=tau.end, anneal_steps=anneal_steps))
        if not value.isfinite():
            raise ValueError(f"the loss is {value.item()} at step {step}; lower optim.lr={optim.lr} or check the data")
        optimizer.zero_grad()
        value.backward()
        if optim.clip is not None:
            nn.utils.clip_grad_norm_(trained, optim.clip)
        optimizer.step()
        losses.append(value.item())
        if on_step is not None:
            on_step(step, losses[-1])
    return losses
