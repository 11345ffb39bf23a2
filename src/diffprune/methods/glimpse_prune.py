"""GlimpsePrune: a learned token behind the prompt takes one glimpse at the picture, and a small network reads it.

    glimpse token + a vector of its own in each layer -> its attention to the visual tokens in the layer before the cut
    -> predictor, conditioned on the encoder's features -> a logit per token
TRAINING    the answer's loss with the glimpse token + dice + 0.1 BCE against the boxes of what the text speaks of
INFERENCE   drop all but the K largest, in the caches of the layers before too, and the glimpse token with them
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from diffprune.inside.budget import check_cut, scale_layers
from diffprune.inside.reader import at_columns
from diffprune.inside.state import Decision, LayerState
from diffprune.methods.base import Card, TrainableLayerPruner, check_choices
from diffprune.nn import BlockSpec
from diffprune.nn.blocks import Mlp, make_norm, rotary_angles, rotate_patches
from diffprune.nn.language import LanguageSpec
from diffprune.nn.scorer import exact_linear
from diffprune.ops import gumbel_topk, hard_topk
from diffprune.ops.noise import Generators, draw_gumbel
from diffprune.ops.places import encoder_features, grid_places
from diffprune.registry import METHODS

AFTER = 21  # the layer of 32 whose attention is read, as released for LLaVA-1.5-7B
LEAST = 1e-9  # of an attention weight, before its logarithm
CODE_WIDTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class GlimpsePruneOptions:
    """Args:
    layer: The decoder layer (from 0) before which tokens are dropped; default: 22 of 32, at the same depth.
    budget: "exact" keeps the K largest logits; "adaptive", as released, those with a probability above a half, at
        least 1 and at most K. Default: "exact", and "adaptive" with `native`.
    supervision: "boxes", as released, needs data that holds the boxes of the things the text speaks of;
        "answer", ours, hides what a hard Gumbel top-k drops from the layers behind the cut, and learns by the answer.
    width: Of the predictor; None is a sixteenth of the language model's (256 of 4,096), at least 32.
    depth: Its layers.
    cross_weight: Of the binary cross-entropy beside the dice loss.
    min_tau: Floor of the temperature, for "answer".
    native: As released: the budget is adaptive.
    """

    layer: int | None = None
    budget: str | None = None
    supervision: str = "boxes"
    width: int | None = None
    depth: int = 4
    cross_weight: float = 0.1
    min_tau: float = 0.5
    native: bool = False

    def __post_init__(self) -> None:
        if self.budget is None:
            object.__setattr__(self, "budget", "adaptive" if self.native else "exact")
        check_choices(self, budget=("exact", "adaptive"), supervision=("boxes", "answer"))
        if self.width is not None and (self.width < 16 or self.width % 16):
            raise ValueError(f"width={self.width} does not split into 4 heads with places; give a multiple of 16")


@METHODS.register("glimpse_prune")
class GlimpsePrune(TrainableLayerPruner):
    """The layers before the cut run on all tokens, but no cache keeps what was dropped."""

    card = Card(
        idea="a learned token's attention in a late decoder layer, read by a small network, says what to keep",
        paper="A Glimpse to Compress: Dynamic Visual Token Pruning for Large Vision-Language Models",
        year=2025,
        licence="Apache-2.0",
        certainty="release read",
        budget="exact K after the cut, or adaptive up to K",
    )
    needs: ClassVar[frozenset[str]] = frozenset({"llm_attention"})
    Options: ClassVar[type] = GlimpsePruneOptions
    prunes_earlier: ClassVar[bool] = True

    def __init__(
        self, options: Any = None, *, block: BlockSpec | None = None, language: LanguageSpec | None = None
    ) -> None:
        super().__init__(options, block=block, language=language)
        assert self.block is not None
        options, size = self.options, self.language
        self.learns_from_regions = options.supervision == "boxes"
        self.token = nn.Parameter(torch.randn(size.width) * 0.02)
        self.codes = nn.Parameter(torch.randn(self.cut(size.layers), CODE_WIDTH))
        self.widen = nn.Linear(CODE_WIDTH, size.width)
        self.norm = nn.RMSNorm(size.width, eps=1e-6)
        nn.init.constant_(self.norm.weight, 0.02)  # as small as an embedding, as the frozen layers expect
        width = options.width or max(32, size.width // 16 // 16 * 16)
        self.predictor = Predictor(size.heads, self.block.width, width, options.depth)

    def cut(self, num_layers: int) -> int:
        """The layer before which tokens are dropped."""
        if self.options.layer is not None:
            return check_cut(self.options.layer, num_layers)
        return check_cut(min(num_layers - 1, max(1, scale_layers([AFTER + 1], num_layers)[0])), num_layers)

    def stages(self, num_layers: int, num_visual: int, keep: int) -> dict[int, int]:
        return {self.cut(num_layers): min(keep, num_visual)}

    def glimpse(self, layer: int) -> Float[Tensor, " L"] | None:
        if layer >= len(self.codes):
            return None
        own = self.norm(self.widen(self.codes[layer]))
        return self.token + own if layer == 0 else own

    def score(self, state: LayerState) -> Float[Tensor, "B M"]:
        """A logit for each visual token, from the glimpse token's attention in the layer that just ran."""
        assert self.block is not None
        row = state.attention(state.last[:, None])[:, :, 0]  # [B, H, T]
        columns = state.visual[:, None].expand(-1, row.shape[1], -1)
        received = at_columns(row, columns).clamp(min=LEAST).log().transpose(1, 2)  # [B, M, H]
        origin = state.origin
        features = encoder_features(origin, self.block.width)
        return self.predictor(received, features, grid_places(origin), state.visual >= 0)

    def select_at(self, state: LayerState, k: Int[Tensor, " B"]) -> Int[Tensor, "B K"]:
        valid, logits = state.visual >= 0, self.score(state)
        if self.options.budget == "adaptive":
            likely = ((logits > 0) & valid).sum(-1)
            k = torch.where(k < valid.sum(-1), likely.clamp(min=1).minimum(k), k)
        return hard_topk(logits, k, valid)

    def decide(
        self, state: LayerState, k: Int[Tensor, " B"], *, tau: float | Tensor, generator: Generators = None
    ) -> Decision:
        options, valid, logits = self.options, state.visual >= 0, self.score(state)
        if options.supervision == "answer":
            noise = draw_gumbel(logits, valid, generator)
            return Decision(gumbel_topk(logits, k, tau=tau, min_tau=options.min_tau, mask=valid, noise=noise), logits)
        origin = state.origin
        if origin.tokens.regions is None:
            raise ValueError(
                "glimpse_prune learns from the boxes of what a text speaks of, and this data has none; train it on "
                "data.name=scenes, or set method.supervision=answer"
            )
        wanted = origin.tokens.regions.flatten()[origin.index.clamp_min(0)] & valid
        everything = valid.to(logits.dtype)  # nothing is hidden while it learns
        return Decision(everything, logits, region_loss(logits, wanted, valid, options.cross_weight))


class Predictor(nn.Module):
    """Attention of the glimpse token, one number per head, to one logit per visual token.

    Args:
        heads: Of the language model.
        features: Width of the encoder's features.
        width: Of a token in here; its condition is twice as wide.
        depth: Layers, each with a condition of its own made of the same features.
    """

    def __init__(self, heads: int, features: int, width: int, depth: int) -> None:
        super().__init__()
        self.enter = nn.Linear(heads, width)
        self.conditions = nn.ModuleList(nn.Linear(features, 2 * width) for _ in range(depth))
        self.layers = nn.ModuleList(ConditionedBlock(width) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(
        self,
        received: Float[Tensor, "B M H"],
        features: Float[Tensor, "B M W"],
        places: Int[Tensor, "B M 2"],
        mask: Bool[Tensor, "B M"],
    ) -> Float[Tensor, "B M"]:
        dtype = self.enter.weight.dtype
        x, features = self.enter(received.to(dtype)), features.to(dtype)
        for layer, condition in zip(self.layers, self.conditions, strict=True):
            x = layer(x, condition(features), places, mask)
        return exact_linear(x, self.head).squeeze(-1)


class ConditionedBlock(nn.Module):
    """A Transformer block whose queries and keys also see a condition, with two-dimensional rotary places."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.spec = BlockSpec(
            width=width, heads=4, mlp_width=2 * width, activation="silu", norm="rms", gated=True, rotary=10_000.0
        )
        self.norm1, self.norm2 = make_norm(self.spec), make_norm(self.spec)
        self.condition_norm = nn.RMSNorm(2 * width, eps=self.spec.eps)
        self.query, self.key = nn.Linear(3 * width, width), nn.Linear(3 * width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.mlp = Mlp(self.spec)

    def forward(
        self,
        x: Float[Tensor, "B M W"],
        condition: Float[Tensor, "B M C"],
        places: Int[Tensor, "B M 2"],
        mask: Bool[Tensor, "B M"],
    ) -> Float[Tensor, "B M W"]:
        own = self.norm1(x)
        both = torch.cat([own, self.condition_norm(condition)], dim=-1)
        query, key, value = (
            part.unflatten(-1, (self.spec.heads, -1)).transpose(1, 2)
            for part in (self.query(both), self.key(both), self.value(own))
        )
        angles = rotary_angles(places, self.spec)
        attended = functional.scaled_dot_product_attention(
            rotate_patches(query, angles),
            rotate_patches(key, angles),
            value,
            attn_mask=(mask | ~mask.any(-1, keepdim=True))[:, None, None],  # a row without any key would come out NaN
            scale=1 / math.sqrt(self.spec.head_width),
        )
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm2(x))


def region_loss(
    logits: Float[Tensor, "B M"], wanted: Bool[Tensor, "B M"], mask: Bool[Tensor, "B M"], cross_weight: float
) -> Float[Tensor, " B"]:
    """Dice loss plus the weighted binary cross-entropy, mean over a row's tokens, of each row."""
    share, target = logits.sigmoid() * mask, wanted.to(logits.dtype)
    dice = 1 - (2 * (share * target).sum(-1) + 1) / (share.sum(-1) + target.sum(-1) + 1)
    cross = functional.binary_cross_entropy_with_logits(logits, target, reduction="none") * mask
    return dice + cross_weight * cross.sum(-1) / mask.sum(-1).clamp(min=1)
