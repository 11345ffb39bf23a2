"""DynamicViT's selector: a small predictor decides for each token, by itself, whether the language model attends to it.

TRAINING    D_i in {0, 1} drawn with Gumbel noise   attention counts token j D_j times   loss + 2 (mean D - K / N)^2
INFERENCE   keep the K tokens most likely to be kept
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from diffprune.methods._keep_or_drop import KeepHead, draw_keep, log_odds, ratio_penalty
from diffprune.methods.base import Card, Distillation, Restricted, TrainablePruner, require_block
from diffprune.nn import BlockSpec
from diffprune.nn.blocks import zero_padding
from diffprune.ops.noise import Generators
from diffprune.registry import METHODS
from diffprune.types import VisualTokens

TEMPERATURE = 1.0  # never annealed


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicViTOptions:
    """Args:
    ratio_weight: Of the penalty on the share that is kept (2, and 5 for DeiT-B).
    answer_weight: Of the divergence of the answers from those of the unpruned model.
    token_weight: Of the distance of the kept tokens' last hidden states from those of the unpruned model: 0.5 in the
        release, whose tower can follow. Of a frozen model it would prefer tokens that depend on no other.
    """

    ratio_weight: float = 2.0
    answer_weight: float = 0.5
    token_weight: float = 0.0

    def __post_init__(self) -> None:
        for name in ("ratio_weight", "answer_weight", "token_weight"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} would reward what it is to hold back; give 0 or more")


@METHODS.register("dynamicvit")
class DynamicViT(TrainablePruner):
    """One stage, between the encoder and the language model, which stays frozen."""

    card = Card(
        idea="a small network decides for each token by itself, drawn at random in training and hidden from attention",
        paper="DynamicViT: Efficient Vision Transformers with Dynamic Token Sparsification",
        year=2021,
        licence="MIT",
        certainty="release read",
    )
    Options: ClassVar[type] = DynamicViTOptions
    exact_in_training = False
    hides_tokens = True

    def __init__(self, options: Any = None, *, block: BlockSpec | None = None) -> None:
        super().__init__(options, block=block)
        self.scorer = Predictor(require_block("dynamicvit", block).width)

    def score(self, tokens: VisualTokens) -> Float[Tensor, "B N"]:
        return log_odds(self.scorer(tokens.x, tokens.mask)).masked_fill(~tokens.mask, 0.0)

    def restrict(
        self, tokens: VisualTokens, k: Int[Tensor, " B"], *, tau: float | Tensor, generator: Generators = None
    ) -> Restricted:
        options, mask = self.options, tokens.mask
        log_probs = self.scorer(tokens.x, mask)
        chosen = draw_keep(log_probs, mask, tau=TEMPERATURE, generator=generator)
        held = options.answer_weight > 0 or options.token_weight > 0
        return Restricted(
            x=zero_padding(tokens.x, mask),
            alpha=chosen,
            logits=log_odds(log_probs),
            penalty=options.ratio_weight * ratio_penalty(chosen, k, mask),
            soft_mask=chosen,
            distillation=Distillation(options.answer_weight, options.token_weight) if held else None,
        )


class Predictor(nn.Module):
    """LayerNorm, a linear map and GELU, then the head; a token made of several patches stands for their mean."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.enter = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
        self.head = KeepHead(width)

    def forward(self, x: Float[Tensor, "B N D"], mask: Bool[Tensor, "B N"]) -> Float[Tensor, "B N 2"]:
        units = zero_padding(x.float(), mask).unflatten(-1, (-1, self.width)).mean(-2)
        return self.head(self.enter(units.to(self.head.dtype)), mask)
