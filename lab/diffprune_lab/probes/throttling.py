"""A classifier whose tokens are weakened by a method, as in a scorer's training, and the moments of such a training."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffprune.config import TauConfig
from diffprune.methods.base import Restricted, TrainablePruner
from diffprune.ops import take_tokens
from diffprune.schedules import resolve_steps, tau_at
from diffprune.types import Budget
from diffprune_lab.deit import Encoded

Reader = Callable[[Tensor, Tensor], Tensor]  # class logits from the prefix and the patch tokens


class Snapshot(NamedTuple):
    """A scorer at one moment of its training: share of it that has passed, temperature, weights."""

    moment: float
    tau: float
    state: dict[str, Tensor]


def take_snapshot(method: TrainablePruner, moment: float, falling: TauConfig) -> Snapshot:
    """The method's weights, throttler included, and the temperature its training has at this moment."""
    steps = 10_000
    tau = tau_at(
        round(moment * steps),
        start=falling.start,
        end=falling.end,
        anneal_steps=resolve_steps(falling.anneal_steps, steps),
    )
    return Snapshot(moment, tau, {name: value.detach().clone() for name, value in method.state_dict().items()})


def draw_budgets(
    count: int, num_tokens: int, between: tuple[float, float], generator: torch.Generator
) -> Int[Tensor, " B"]:
    """One number of tokens per picture, evenly spread on a logarithmic scale between two shares."""
    low, high = (math.log(max(1.0, share * num_tokens)) for share in between)
    drawn = torch.rand(count, generator=generator, device=generator.device)
    return (low + (high - low) * drawn).exp().round().long().clamp(1, num_tokens)


def budget_counts(encoded: Encoded, keep: float) -> Int[Tensor, " B"]:
    """Tokens to keep of each picture; all pictures have equally many."""
    num_images, num_tokens, _ = encoded.tokens.x.shape
    return torch.full((num_images,), Budget(keep).count(num_tokens), device=encoded.tokens.x.device)


def run_throttled(
    read: Reader,
    method: TrainablePruner,
    encoded: Encoded,
    k: Int[Tensor, " B"],
    tau: float,
    generator: torch.Generator,
    remove_below: float = 0.0,
) -> tuple[Float[Tensor, "B classes"], Restricted]:
    """Class logits by `read(prefix, tokens)` with every token weakened by its weight, and what weakened them.

    Args:
        remove_below: Tokens with a smaller weight are taken out, as many of each picture as can be of all.
    """
    restricted = method.restrict(encoded.tokens, k, tau=tau, generator=generator)
    x, weight = restricted.x, restricted.alpha.detach()
    needed = int((weight >= remove_below).sum(-1).max()) if remove_below else x.shape[1]
    if needed < x.shape[1]:
        x = take_tokens(x, weight.topk(needed, -1).indices.sort(-1).values)
    return read(encoded.prefix, x), restricted
