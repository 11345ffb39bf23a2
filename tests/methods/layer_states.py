"""States of a language model before a layer, made by hand: methods read from them what a running model would give."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from diffprune.inside.state import LayerState, Prompt


@dataclass(frozen=True, kw_only=True)
class HandMade:
    """A reader of given tensors: attention and logits [B, H, T, T] by layer, keys [B, H, T, E], bias [B, T, T]."""

    maps: dict[int, Tensor] = field(default_factory=dict)
    products: dict[int, Tensor] = field(default_factory=dict)
    cached: Tensor | None = None
    bias: Tensor | None = None

    def attention(self, rows: Tensor, layer: int) -> Tensor:
        weights = self.maps[layer]
        index = rows.clamp_min(0)[:, None, :, None].expand(-1, weights.shape[1], -1, weights.shape[-1])
        return weights.gather(2, index).masked_fill((rows < 0)[:, None, :, None], 0.0)

    def mean_logits(self, rows: Tensor, layer: int) -> Tensor:
        own = [(row[row >= 0], logits) for row, logits in zip(rows, self.products[layer], strict=True)]
        return torch.stack([logits[:, row].mean((0, 1)) for row, logits in own])

    def keys(self, layer: int) -> Tensor:
        assert self.cached is not None
        return self.cached

    def rope_bias(self, rows: Tensor) -> Tensor:
        assert self.bias is not None
        return self.bias.gather(1, rows.clamp_min(0)[..., None].expand(-1, -1, self.bias.shape[-1]))

    def final_norm(self, hidden: Tensor) -> Tensor:
        return hidden


def make_state(
    hidden: Tensor,
    visual: list[list[int]],
    instruction: list[list[int]],
    reader: HandMade,
    *,
    layer: int = 2,
    lengths: list[int] | None = None,
    embeds: Tensor | None = None,
) -> LayerState:
    """A state before any cut: columns are the prompt's own."""
    batch, width = hidden.shape[:2]
    lengths = [width] * batch if lengths is None else lengths
    most = max(len(row) for row in visual)
    masks = torch.zeros(2, batch, width, dtype=torch.bool)
    for mask, columns in zip(masks, (visual, instruction), strict=True):
        for row, own in enumerate(columns):
            mask[row, own] = True
    return LayerState(
        layer=layer,
        hidden=hidden,
        attention_mask=torch.arange(width) < torch.tensor(lengths)[:, None],
        visual=torch.tensor([row + [-1] * (most - len(row)) for row in visual]),
        source=torch.arange(width).expand(batch, width),
        prompt=Prompt(embeds=hidden if embeds is None else embeds, visual=masks[0], instruction=masks[1]),
        reader=reader,
    )


def one_row(values: dict[int, list[float]], *, width: int, heads: int = 1) -> Tensor:
    """Attention [1, H, T, T] that is zero but for the query rows given."""
    weights = torch.zeros(1, heads, width, width)
    for row, own in values.items():
        weights[0, :, row, : len(own)] = torch.tensor(own)
    return weights
