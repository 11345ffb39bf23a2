"""p-MoD: in every decoder layer a router sends some visual tokens through; the others skip it and come back behind it.

    w_i = 1 + 0.2 tanh(router_l(x_i))       the n_l largest go through layer l, n_l falls along a half cosine
    through: x' = x + attention(x), then x' + w MLP(x')          past: w x          text: as ever

Training runs the same, and the gradient comes through w. The base is frozen here.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Int
from torch import Tensor, nn

from diffprune.inside.state import LayerState, Route
from diffprune.methods.base import Card, TrainableLayerPruner
from diffprune.nn import BlockSpec
from diffprune.nn.language import LanguageSpec
from diffprune.nn.scorer import exact_linear
from diffprune.ops import hard_topk
from diffprune.ops.noise import Generators
from diffprune.registry import METHODS

ROUTED_BELOW, LEAST_SHARE = 0.85, 0.15  # of the release


@dataclass(frozen=True, slots=True, kw_only=True)
class PModOptions:
    """Args:
    reach: How far a weight may go from 1.
    native: As released: shares of the plain cosine where that is 0.85 or less, never below 0.15, whatever K is (but all
        where K is all); the mean over 32 layers is 54 % of the tokens.
    """

    reach: float = 0.2
    native: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.reach < 1:
            raise ValueError(f"reach={self.reach} is none; a weight of 1 +- reach stays above 0: give 0.0 to 1.0")


@METHODS.register("p_mod")
class PMod(TrainableLayerPruner):
    """No token is ever gone: K is what a layer computes with and caches, in the mean over all layers, exactly."""

    card = Card(
        idea="routers send falling shares of the visual tokens through each decoder layer; the others skip it",
        paper="p-MoD: Building Mixture-of-Depths MLLMs via Progressive Ratio Decay",
        year=2024,
        licence="Apache-2.0",
        certainty="release read",
        budget="exact K as the mean over layers; frozen-base variant",
    )
    Options: ClassVar[type] = PModOptions

    def __init__(
        self, options: Any = None, *, block: BlockSpec | None = None, language: LanguageSpec | None = None
    ) -> None:
        super().__init__(options, block=block, language=language)
        # Nothing reads a visual token behind the last layer, so a router there would never learn: it shares the one
        # before.
        self.routers = nn.ModuleList(nn.Linear(self.language.width, 1) for _ in range(max(1, self.language.layers - 1)))
        for router in self.routers:
            assert isinstance(router, nn.Linear)
            nn.init.normal_(router.weight, std=1e-3)  # zero, as released, would make the first ranking one great tie
            nn.init.zeros_(router.bias)

    def stages(self, num_layers: int, num_visual: int, keep: int) -> dict[int, int]:
        if keep >= num_visual:
            counts = [num_visual] * num_layers
        elif self.options.native:
            counts = [_released(share, num_visual) for share in cosine_shares(num_layers)]
        else:
            counts = spread(cosine_shares(num_layers), num_visual, keep)
        return dict(enumerate(counts))

    def select_at(self, state: LayerState, k: Int[Tensor, " B"]) -> Route:
        valid = state.visual >= 0
        router = self.routers[min(state.layer, len(self.routers) - 1)]
        assert isinstance(router, nn.Linear)
        logits = exact_linear(state.tokens, router).squeeze(-1)  # ranked before the tanh and in float32, where few tie
        weight = 1 + self.options.reach * logits.tanh()
        skips = (k < valid.sum(-1))[:, None]  # where all go through, the layer is as ever
        return Route(hard_topk(logits.detach(), k, valid), torch.where(skips, weight, 1.0))

    def decide(
        self, state: LayerState, k: Int[Tensor, " B"], *, tau: float | Tensor, generator: Generators = None
    ) -> Route:
        return self.select_at(state, k)


def cosine_shares(num_layers: int) -> list[float]:
    """1 in the first layer, 0 in the last, a half cosine between."""
    return [0.5 + math.cos(math.pi * layer / max(1, num_layers - 1)) / 2 for layer in range(num_layers)]


def spread(shares: list[float], num_visual: int, keep: int) -> list[int]:
    """Whole numbers from 1 to `num_visual` in proportion to the shares, with a mean of exactly `keep`."""
    total = keep * len(shares)

    def scaled(factor: float) -> list[float]:
        return [min(float(num_visual), max(1.0, factor * num_visual * share)) for share in shares]

    low, high = 0.0, 1.0
    while sum(scaled(high)) < total and high < 1e9:  # layers of a small share are the last to be filled
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(scaled(middle)) < total else (low, middle)
    exact = scaled(high)
    counts = [math.floor(value) for value in exact]
    by_rest = sorted(range(len(shares)), key=lambda layer: (counts[layer] - exact[layer], layer))
    for layer in [layer for layer in by_rest if counts[layer] < num_visual][: total - sum(counts)]:
        counts[layer] += 1
    if sum(counts) < total:  # a share of nothing, where all others are full
        counts[-1] += total - sum(counts)
    assert sum(counts) == total
    return counts


def _released(share: float, num_visual: int) -> int:
    return num_visual if share > ROUTED_BELOW else max(1, int(num_visual * max(share, LEAST_SHARE)))
