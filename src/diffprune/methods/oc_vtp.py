"""OC-VTP: slots compete for the tokens of a picture; each keeps the token it holds most. Trained by reconstruction.

TRAINING    slots = SlotAttention(X)   X^ = decoder(slots)   loss = mean_t weight_t |X^_t - X_t|^2
INFERENCE   slots = SlotAttention(X)   keep each slot's first token; the decoder is gone
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from diffprune.methods.base import Card, Counts, SelfSupervisedPruner, check_counts, require_block
from diffprune.nn import BlockSpec
from diffprune.nn.blocks import zero_padding
from diffprune.ops import hard_topk
from diffprune.ops.hard_topk import per_row, widest
from diffprune.ops.noise import Generators, draw_gumbel, draw_normal
from diffprune.registry import METHODS
from diffprune.types import VisualTokens

_SLOTS_PER_DRAW = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class OCVTPOptions:
    """Args:
    slot_width: Features of a slot; None is half of the tower's width (512 of 1,024, as released).
    iterations: Of slot attention.
    seed: Of the slots' start, the same for every image.
    decoder_depth: Layers of the decoder that rebuilds the picture in training.
    native: As released: [CLS] is counted in K, so that K - 1 tokens of the picture are kept; what the slots leave of
        them goes to the tokens that receive most attention in the encoder, else to those that come next in a slot's own
        attention, which needs nothing of the encoder; where the slots hold one too many, the last in raster order goes.
    """

    slot_width: int | None = None
    iterations: int = 3
    seed: int = 42
    decoder_depth: int = 4
    native: bool = False

    def __post_init__(self) -> None:
        check_counts(self, "slot_width", "iterations", "decoder_depth")


@METHODS.register("oc_vtp")
class OCVTP(SelfSupervisedPruner):
    """K slots of one learned Gaussian, so one pruner serves any budget. Learns from pictures alone."""

    card = Card(
        idea="K slots compete for the tokens, each keeps the one it holds most; trained to rebuild the picture",
        paper="OC-VTP: Object-Centric Vision Token Pruning for Vision Language Models",
        year=2025,
        licence="MIT",
        certainty="release read",
    )
    native_positions: ClassVar[str] = "packed"
    Options: ClassVar[type] = OCVTPOptions

    def __init__(self, options: Any = None, *, block: BlockSpec | None = None) -> None:
        super().__init__(options, block=block)
        width = require_block("oc_vtp", block).width
        self.slots = SlotAttention(width, self.options.slot_width or max(1, width // 2), self.options.iterations)
        self.throttle_decoder: ReconstructionDecoder | None = None
        if self.is_native:
            self.needs = frozenset({"cls_attention"})  # pyright: ignore[reportAttributeAccessIssue]

    def select(self, tokens: VisualTokens, k: Counts) -> Int[Tensor, "B K"]:
        if self.is_native:
            _require_room_for_cls(k)
        num_slots = widest(k)
        noise = slot_noise(num_slots, self.slots.width, self.options.seed, tokens.x.device)
        rows = per_row(k, tokens.mask, torch.int64).squeeze(-1)
        with torch.no_grad():
            _, attention = self.slots(_units(tokens), noise.expand(len(tokens), -1, -1), rows, tokens.mask)  # [B, K, N]
        first = attention.masked_fill(~tokens.mask.unsqueeze(1), -torch.inf).argmax(-1)  # [B, K]
        is_slot = _slots_in_use(rows, num_slots)
        chosen = torch.zeros_like(tokens.mask, dtype=torch.int64).scatter_add(1, first, is_slot.long()) > 0
        # Slots may agree on a token; the places that leaves go by the fill, which is 1 at most.
        fill = self._fill(tokens, attention)
        if not self.is_native:
            return hard_topk(fill + 2.0 * chosen, k, tokens.mask)
        # [CLS] stands before all patches, so where no two slots agree the last of theirs is cut off.
        from_behind = torch.arange(fill.shape[-1] + 1, 1, -1, device=fill.device, dtype=fill.dtype)
        return hard_topk(torch.where(chosen, from_behind, fill), k - 1, tokens.mask)

    def _fill(self, tokens: VisualTokens, attention: Float[Tensor, "B S N"]) -> Float[Tensor, "B N"]:
        if not self.is_native:
            return _shares(attention).amax(1)
        if tokens.cls_attention is None:
            raise ValueError(
                "oc_vtp with native=True fills up by VisualTokens.cls_attention, which is None; let the backbone give "
                "it, or say native=False"
            )
        return tokens.cls_attention.float().masked_fill(~tokens.mask, 0.0).clamp(max=1.0)

    def start_training(self) -> None:
        assert self.block is not None
        decoder = ReconstructionDecoder(self.block.width, self.slots.width, self.options.decoder_depth)
        self.throttle_decoder = decoder.to(self.slots.mean.device)

    def own_loss(
        self, tokens: VisualTokens, k: Int[Tensor, " B"], *, generator: Generators = None
    ) -> Float[Tensor, " B"]:
        if self.throttle_decoder is None:
            raise ValueError("there is no decoder to rebuild the picture with; call start_training() before own_loss()")
        return self.reconstruction_loss(tokens, self.throttle_decoder, k, generator)

    def reconstruction_loss(
        self,
        tokens: VisualTokens,
        decoder: "ReconstructionDecoder",
        k: Int[Tensor, " B"],
        generator: Generators = None,
    ) -> Float[Tensor, " B"]:
        """Squared error of the rebuilt tokens, what small slots hold counting for more; of each image."""
        x, mask = _units(tokens), tokens.mask
        is_slot = _slots_in_use(k, int(k.max()))
        noise = draw_normal(x.new_zeros(*is_slot.shape, self.slots.width), is_slot, generator)
        slots, attention = self.slots(x, noise, k, mask)
        order = draw_gumbel(x[..., 0], mask, generator).masked_fill(~mask, torch.inf).argsort(-1)  # padding last
        rebuilt = decoder(x, order, slots, is_slot)
        weights = area_weights(attention.detach(), k, mask)
        error = (rebuilt - x).square().mean(-1)  # [B, N]
        return (weights * error).sum(-1) / weights.sum(-1).clamp(min=1e-8)  # no image weighs by its neighbours


class SlotAttention(nn.Module):
    """Slots that compete for tokens: each token spreads its attention over the slots, each slot follows its tokens.

    The start of the slots is drawn from one learned Gaussian. The gradient runs through the last iteration and from
    there straight to the start (bi-level), so the earlier ones need no memory of theirs.
    """

    def __init__(self, features: int, width: int, iterations: int) -> None:
        super().__init__()
        self.width = width
        self.iterations = iterations
        self.encode = nn.Sequential(
            nn.LayerNorm(features), nn.Linear(features, 2 * features), nn.GELU(), nn.Linear(2 * features, width)
        )
        self.mean = nn.Parameter(torch.randn(width) * width**-0.5)
        self.log_deviation = nn.Parameter(torch.zeros(width))
        self.input_norm, self.slot_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.update = nn.GRUCell(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(
        self,
        x: Float[Tensor, "B N D"],
        noise: Float[Tensor, "B S W"],
        k: Int[Tensor, " B"],
        mask: Bool[Tensor, "B N"],
    ) -> tuple[Float[Tensor, "B S W"], Float[Tensor, "B S N"]]:
        """The slots, and what each token gives each of them: over a row's first k slots it sums to 1, 0 at padding."""
        dtype = self.mean.dtype
        inputs = self.input_norm(self.encode(x.to(dtype)))
        key, value = self.key(inputs), self.value(inputs)  # [B, N, W]
        start = self.mean + self.log_deviation.exp() * noise.to(dtype)
        slots, attention = start, torch.zeros(*noise.shape[:2], x.shape[1], device=x.device)
        unused = ~_slots_in_use(k, noise.shape[1]).unsqueeze(-1)  # [B, S, 1]
        lowest = torch.finfo(torch.float32).min  # not -inf: a row may have no slot at all
        for iteration in range(self.iterations):
            if iteration == self.iterations - 1:
                slots = slots.detach() + (start - start.detach())
            query = self.query(self.slot_norm(slots))
            logits = (query @ key.transpose(1, 2)).float() / math.sqrt(self.width)  # shares of tokens are small
            attention = logits.masked_fill(unused, lowest).softmax(1).masked_fill(unused | ~mask.unsqueeze(1), 0.0)
            updates = _shares(attention).to(dtype) @ value
            slots = self.update(updates.flatten(0, 1), slots.flatten(0, 1)).view_as(slots)
            slots = slots + self.mlp(slots)
        return slots, attention


class ReconstructionDecoder(nn.Module):
    """Rebuilds tokens from slots one after another in a given order, each from the slots and the tokens before it."""

    def __init__(self, features: int, slot_width: int, depth: int) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.zeros(features))
        self.previous, self.memory = nn.Linear(features, features), nn.Linear(slot_width, features)
        layer = nn.TransformerDecoderLayer(
            features,
            nhead=math.gcd(features, 4),
            dim_feedforward=4 * features,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.layers = nn.TransformerDecoder(layer, depth, norm=nn.LayerNorm(features))
        self.out = nn.Linear(features, features)

    def forward(
        self,
        x: Float[Tensor, "B N D"],
        order: Int[Tensor, "B N"],
        slots: Float[Tensor, "B S W"],
        is_slot: Bool[Tensor, "B S"],
    ) -> Float[Tensor, "B N D"]:
        """The tokens as rebuilt, in their own places."""
        index = order.unsqueeze(-1).expand_as(x)
        previous = self.previous(x).gather(1, index)[:, :-1]
        seen = torch.cat([self.start.expand(len(x), 1, -1), previous], dim=1)  # what stood before each token
        places = position_codes(x.shape[1], x.shape[2], x.device).expand_as(x).gather(1, index)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        rebuilt = self.out(
            self.layers(seen + places, self.memory(slots), tgt_mask=later, memory_key_padding_mask=~is_slot)
        )
        return torch.zeros_like(rebuilt).scatter(1, index, rebuilt)


def area_weights(
    attention: Float[Tensor, "B S N"], k: Int[Tensor, " B"], mask: Bool[Tensor, "B N"]
) -> Float[Tensor, "B N"]:
    """How much each token's error counts: (area / N)^-1/2 of the slots that hold it, mean 1 over slots, 10 at most."""
    is_slot = _slots_in_use(k, attention.shape[1])
    area = attention.sum(-1) / mask.sum(-1, keepdim=True).clamp(min=1)  # [B, S]
    weight = area.clamp(min=1e-8).rsqrt().where(is_slot, 0.0)
    mean = weight.sum(-1, keepdim=True) / k.clamp(min=1).unsqueeze(-1)
    weight = (weight / mean.clamp(min=1e-8)).clamp(max=10.0)
    return (attention * weight.unsqueeze(-1)).sum(1)


@lru_cache(maxsize=16)
def slot_noise(num_slots: int, width: int, seed: int, device: torch.device | None = None) -> Float[Tensor, "S W"]:
    """Standard normal noise for the start of the slots; slot i gets the same however many there are."""
    draws = [
        torch.randn(_SLOTS_PER_DRAW, width, generator=torch.Generator().manual_seed(seed * 1_000_003 + draw))
        for draw in range(math.ceil(num_slots / _SLOTS_PER_DRAW))
    ]
    return torch.cat([torch.zeros(0, width), *draws])[:num_slots].to(device or "cpu")


def position_codes(num_tokens: int, width: int, device: torch.device) -> Float[Tensor, "N D"]:
    """Sines and cosines of each token's place."""
    rates = torch.exp(torch.arange(0, width, 2, device=device) * (-math.log(10_000.0) / width))
    angles = torch.arange(num_tokens, device=device).unsqueeze(-1) * rates
    return torch.cat([angles.sin(), angles.cos()], dim=-1)[:, :width]


def _units(tokens: VisualTokens) -> Float[Tensor, "B N D"]:
    """Features of each token, float32, padding 0; a token made of several patches stands for their mean."""
    return zero_padding(tokens.x.float(), tokens.mask).unflatten(-1, (tokens.group, -1)).mean(-2)


def _require_room_for_cls(k: Counts) -> None:
    """A `ValueError` where [CLS] would be all that is kept."""
    smallest = k if isinstance(k, int) else min(k.tolist(), default=2)
    if smallest < 2:
        raise ValueError(f"keep={smallest} leaves native OC-VTP no token beside [CLS]; keep at least 2")


def _slots_in_use(k: Int[Tensor, " B"], num_slots: int) -> Bool[Tensor, "B S"]:
    return torch.arange(num_slots, device=k.device) < k.unsqueeze(-1)


def _shares(attention: Float[Tensor, "B S N"]) -> Float[Tensor, "B S N"]:
    """Each slot's attention as shares of its own total."""
    return attention / attention.sum(-1, keepdim=True).clamp(min=1e-8)
