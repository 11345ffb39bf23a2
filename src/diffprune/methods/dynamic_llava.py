"""Dynamic-LLaVA: before decoder layer 2 a small Transformer decides which visual tokens stay. The base is frozen here.

TRAINING    m_i in {0, 1} drawn with Gumbel noise   attention counts token j m_j times   loss + 100 (mean m - K / N)^2
INFERENCE   drop all but the K tokens most likely to be kept, before that layer
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from diffprune.inside.budget import average_stages, check_cut
from diffprune.inside.state import Decision, LayerState
from diffprune.methods._keep_or_drop import KeepHead, draw_keep, log_odds, ratio_penalty
from diffprune.methods.base import Card, TrainableLayerPruner, check_choices
from diffprune.nn import Block, BlockSpec
from diffprune.nn.language import LanguageSpec
from diffprune.ops import hard_topk
from diffprune.ops.noise import Generators
from diffprune.registry import METHODS

LEAST_WIDTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicLLaVAOptions:
    """Args:
    layer: The decoder layer (from 0) before which tokens are dropped.
    budget: "exact" leaves K tokens at the cut; "average" makes K the mean over all layers.
    width: Of the predictor; None is an eighth of the language model's (512 of 4,096), at least 64.
    depth: Its Transformer blocks.
    ratio_weight: Of the penalty on the share that is kept.
    native: As released: a share of N tokens is rounded down.
    """

    layer: int = 2
    budget: str = "exact"
    width: int | None = None
    depth: int = 2
    ratio_weight: float = 100.0
    native: bool = False

    def __post_init__(self) -> None:
        check_choices(self, budget=("exact", "average"))
        if self.width is not None and self.width < 4:
            raise ValueError(f"width={self.width} is too narrow for two halves that narrow further; give 4 or more")


@METHODS.register("dynamic_llava")
class DynamicLLaVA(TrainableLayerPruner):
    """The image-token predictor; the one for generated text and the tuning of the language model are not part of it."""

    card = Card(
        idea="a small Transformer over the hidden states before decoder layer 2 decides which visual tokens stay",
        paper="Dynamic-LLaVA: Efficient Multimodal Large Language Models via Dynamic Vision-language Context "
        "Sparsification",
        year=2024,
        licence="Apache-2.0",
        certainty="release read",
        budget="exact K after the cut, or K as the mean over layers; frozen-base variant",
    )
    native_rounding: ClassVar[str] = "down"
    Options: ClassVar[type] = DynamicLLaVAOptions

    def __init__(
        self, options: Any = None, *, block: BlockSpec | None = None, language: LanguageSpec | None = None
    ) -> None:
        super().__init__(options, block=block, language=language)
        width = self.options.width or max(LEAST_WIDTH, self.language.width // 8)
        self.predictor = Predictor(self.language.width, width, self.options.depth)

    def stages(self, num_layers: int, num_visual: int, keep: int) -> dict[int, int]:
        layer = check_cut(self.options.layer, num_layers, first=0)
        if self.options.budget == "average":
            return average_stages([layer], num_layers, num_visual, keep)
        return {layer: min(keep, num_visual)}

    def select_at(self, state: LayerState, k: Int[Tensor, " B"]) -> Int[Tensor, "B K"]:
        valid = state.visual >= 0
        return hard_topk(log_odds(self.predictor(state.tokens, valid)), k, valid)

    def decide(
        self, state: LayerState, k: Int[Tensor, " B"], *, tau: float | Tensor, generator: Generators = None
    ) -> Decision:
        valid = state.visual >= 0
        log_probs = self.predictor(state.tokens, valid)
        chosen = draw_keep(log_probs, valid, tau=tau, generator=generator)
        return Decision(chosen, log_odds(log_probs), self.options.ratio_weight * ratio_penalty(chosen, k, valid))


class Predictor(nn.Module):
    """LayerNorm, a linear map and GELU, pre-norm Transformer blocks without positions, then DynamicViT's head."""

    def __init__(self, features: int, width: int, depth: int) -> None:
        super().__init__()
        spec = BlockSpec(width=width, heads=math.gcd(8, width), mlp_width=4 * width)
        self.enter = nn.Sequential(nn.LayerNorm(features), nn.Linear(features, width), nn.GELU())
        self.blocks = nn.ModuleList(Block(spec) for _ in range(depth))
        self.head = KeepHead(width)

    def forward(self, x: Float[Tensor, "B M L"], mask: Bool[Tensor, "B M"]) -> Float[Tensor, "B M 2"]:
        x = self.enter(x.to(self.head.dtype))
        for block in self.blocks:
            x = block(x, mask=mask)
        return self.head(x, mask)
