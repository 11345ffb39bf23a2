"""A few attention rows of a decoder layer, recomputed from its own projections: the layer itself runs SDPA as ever.

Methods inside the language model ask how one or a few query tokens attend. Those rows cost R x T, never T x T, and the
softmax is taken in float32 whatever the model's precision.
"""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffprune.ops import hard_topk, rotate, take_tokens

Tables = tuple[Float[Tensor, "B T E"], Float[Tensor, "B T E"]]  # cosines and sines of every position


@runtime_checkable
class Reader(Protocol):
    """What a method can learn of the decoder layers beside a cut."""

    def attention(self, rows: Int[Tensor, "B R"], layer: int) -> Float[Tensor, "B H R T"]:
        """Attention of the query columns `rows` (-1: a row of zeros) to every column, in that layer."""
        ...

    def mean_logits(self, rows: Int[Tensor, "B R"], layer: int) -> Float[Tensor, "B T"]:
        """Scaled products of the query columns `rows` (-1: none) with every key, mean over rows and heads."""
        ...

    def keys(self, layer: int) -> Float[Tensor, "B H T E"]:
        """Rotated keys of that layer, one set per key-value head."""
        ...

    def rope_bias(self, rows: Int[Tensor, "B R"]) -> Float[Tensor, "B R T"]:
        """What queries and keys of all ones would score: the part of a logit that comes from distance alone."""
        ...

    def final_norm(self, hidden: Float[Tensor, "B T L"]) -> Float[Tensor, "B T L"]:
        """Hidden states as the head would be given them."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionReader:
    """A `Reader` of the layer that just ran (`layer - 1`) and the one about to run (`layer`).

    Args:
        decoder: The stack of decoder layers.
        entered: What entered the layer that just ran; None before the first.
        hidden: What is about to enter the next.
        tables: Rotary cosines and sines of the columns.
        valid: True where a column is real.
        two_way: True at columns that see each other in both directions.
        cache: Keys and values of the layers that ran; None in training, where they are made again.
    """

    decoder: Any
    layer: int
    entered: Float[Tensor, "B T L"] | None
    hidden: Float[Tensor, "B T L"]
    tables: Tables
    valid: Bool[Tensor, "B T"]
    two_way: Bool[Tensor, "B T"] | None
    cache: Any

    def attention(self, rows: Int[Tensor, "B R"], layer: int) -> Float[Tensor, "B H R T"]:
        logits = self._logits(self._query(rows, layer), layer)  # [B, H, R, T]
        weights = logits.masked_fill(~self._seen(rows)[:, None], -torch.inf).softmax(-1)
        return weights.masked_fill((rows < 0)[:, None, :, None], 0.0)

    def mean_logits(self, rows: Int[Tensor, "B R"], layer: int) -> Float[Tensor, "B T"]:
        asked = (rows >= 0)[:, None, :, None]
        query = self._query(rows, layer).masked_fill(~asked, 0.0).sum(2, keepdim=True) / asked.sum(2, True).clamp_min(1)
        return self._logits(query, layer).mean(1)[:, 0]  # the mean of products is the product with the mean query

    def _query(self, rows: Int[Tensor, "B R"], layer: int) -> Float[Tensor, "B H R E"]:
        hidden = take_tokens(self._entering(layer), rows)  # [B, R, L]
        tables = tuple(take_tokens(table, rows) for table in self.tables)
        return rotate(project(self.decoder.layers[layer], hidden, "q"), *tables).float()

    def _logits(self, query: Float[Tensor, "B H R E"], layer: int) -> Float[Tensor, "B H R T"]:
        key = self.keys(layer).float()
        grouped = query.unflatten(1, (key.shape[1], -1))  # query heads beside the key head they share
        scale = self.decoder.layers[layer].self_attn.scaling
        return (grouped @ key[:, :, None].transpose(-1, -2)).flatten(1, 2) * scale

    def keys(self, layer: int) -> Float[Tensor, "B H T E"]:
        if layer < self.layer and self.cache is not None:  # they lie there already
            return self.cache.layers[layer].keys
        return rotate(project(self.decoder.layers[layer], self._entering(layer), "k"), *self.tables)

    def rope_bias(self, rows: Int[Tensor, "B R"]) -> Float[Tensor, "B R T"]:
        cos, sin = (table.float()[:, None] for table in self.tables)
        ones = rotate(torch.ones_like(cos), cos[:, 0], sin[:, 0])[:, 0]  # [B, T, E]
        return take_tokens(ones, rows) @ ones.transpose(-1, -2) * ones.shape[-1] ** -0.5

    def final_norm(self, hidden: Float[Tensor, "B T L"]) -> Float[Tensor, "B T L"]:
        return self.decoder.norm(hidden)

    def _entering(self, layer: int) -> Float[Tensor, "B T L"]:
        assert layer in (self.layer - 1, self.layer), f"layer {layer} is not beside the cut before {self.layer}"
        hidden = self.hidden if layer == self.layer else self.entered
        assert hidden is not None, "no layer ran before the first"
        return hidden

    def _seen(self, rows: Int[Tensor, "B R"]) -> Bool[Tensor, "B R T"]:
        columns = torch.arange(self.valid.shape[1], device=rows.device)
        seen = columns <= rows.clamp_min(0)[..., None]
        if self.two_way is not None:
            seen = seen | (self.two_way.gather(1, rows.clamp_min(0))[..., None] & self.two_way[:, None])
        return seen & self.valid[:, None]


def project(block: Any, hidden: Float[Tensor, "B T L"], which: str) -> Float[Tensor, "B H T E"]:
    """Queries ("q") or keys ("k") of a decoder layer for what enters it, before rotation."""
    attention = block.self_attn
    heads = getattr(attention, f"{which}_proj")(block.input_layernorm(hidden)).unflatten(-1, (-1, attention.head_dim))
    norm = getattr(attention, f"{which}_norm", None)  # some families normalise each head
    return (heads if norm is None else norm(heads)).transpose(1, 2)


def columns_of(mask: Bool[Tensor, "B T"]) -> Int[Tensor, "B M"]:
    """Where each row is True, ascending, -1 at the end of rows with fewer."""
    return hard_topk(mask.float(), mask.sum(-1))


def at_columns(values: Float[Tensor, "*B T"], columns: Int[Tensor, "*B M"]) -> Float[Tensor, "*B M"]:
    """Values at some columns of each row, 0 where the column is -1."""
    return values.gather(-1, columns.clamp_min(0)).masked_fill(columns < 0, 0.0)
