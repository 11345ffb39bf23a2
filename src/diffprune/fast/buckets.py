"""Static buffers of one prefill size, and the cache that all sizes share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffprune.fast.choice import keep_largest, take
from diffprune.fast.cuts import Cuts, columns_after_cut
from diffprune.fast.decoder import Cache, Decoder
from diffprune.fast.graphs import Stage
from diffprune.inside.reader import AttentionReader
from diffprune.inside.state import LayerState
from diffprune.types import LMInputs

ALIGN = 8  # columns of a cache come in eights, as attention kernels with a mask want them


class CacheStore:
    """One memory for the caches of all buckets: one request runs at a time, so they may lie on top of each other."""

    def __init__(self, decoder: Decoder, device: torch.device, dtype: torch.dtype) -> None:
        self.shape, self.num_layers = decoder.weights.shape, len(decoder.weights.layers)
        self.device, self.dtype = device, dtype
        self.flat: list[tuple[Tensor, Tensor]] = []

    def numel(self, batch: int, columns: int) -> int:
        """Numbers in the keys of one layer."""
        return batch * self.shape.key_heads * columns * self.shape.head_width

    def num_bytes(self, batch: int, columns: Sequence[int]) -> int:
        """Bytes of keys and values with so many columns in each layer."""
        size = torch.empty((), dtype=self.dtype).element_size()
        return sum(2 * self.numel(batch, count) * size for count in columns)

    def reserve(self, most: int) -> None:
        """Room for the largest bucket: `most` numbers in the keys of a layer."""
        self.flat = [
            (
                torch.zeros(most, device=self.device, dtype=self.dtype),
                torch.zeros(most, device=self.device, dtype=self.dtype),
            )
            for _ in range(self.num_layers)
        ]

    def num_columns(self) -> int:
        """Columns that the cache of one prompt has room for."""
        return len(self.flat[0][0]) // self.numel(1, 1)

    def view(self, batch: int, columns: Sequence[int]) -> list[Cache]:
        """Every layer's cache for so many rows, with its own number of columns."""
        caches = []
        for (keys, values), count in zip(self.flat, columns, strict=True):
            size = (batch, self.shape.key_heads, count, self.shape.head_width)
            used = self.numel(batch, count)
            caches.append(Cache(keys[:used].view(size), values[:used].view(size)))
        return caches


@dataclass(kw_only=True)
class Bucket:
    """Prefill and decode for up to `batch` prompts of up to `length` columns, visual tokens included.

    Args:
        columns: Of each layer's cache.
        cuts: Of a method inside the language model; None for all others.
        first: Each row's first visual column, read where there are cuts.
        embeds, positions, last: What the prefill reads; `last` is each row's last real column.
        token, logits: The newest token and what it was chosen from.
        column, position: Where the next token goes, in the caches (one row for layers that hold the same tokens) and
            in the rotary tables.
    """

    batch: int
    length: int
    columns: list[int]
    cuts: Cuts | None
    first: Int[Tensor, " B"]
    embeds: Float[Tensor, "B T L"]
    positions: Int[Tensor, "*R B T"]
    last: Int[Tensor, " B"]
    token: Int[Tensor, " B"]
    logits: Float[Tensor, "B V"]
    column: Int[Tensor, "segments B"]
    position: Int[Tensor, "*R B 1"]
    cache: list[Cache]
    prefill: Stage = field(init=False)
    decode: Stage = field(init=False)

    @classmethod
    def build(
        cls,
        decoder: Decoder,
        store: CacheStore,
        *,
        batch: int,
        length: int,
        max_new_tokens: int,
        axes: tuple[int, ...],
        capture: bool,
        cuts: Cuts | None = None,
    ) -> "Bucket":
        """Buffers and stages of that size; `axes` is (3,) for M-RoPE and () for plain positions."""
        weights = decoder.weights
        device, dtype = store.device, store.dtype
        widths = [length] * store.num_layers if cuts is None else cuts.widths(length, store.num_layers)
        columns = [num_columns(count, max_new_tokens) for count in widths]
        width, vocabulary = len(weights.final_norm), len(weights.head[0])

        def whole(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        bucket = cls(
            batch=batch,
            length=length,
            columns=columns,
            cuts=cuts,
            first=whole(batch),
            embeds=torch.zeros(batch, length, width, dtype=dtype, device=device),
            positions=whole(*axes, batch, length),
            last=whole(batch) + (0 if cuts is None else cuts.num_visual),  # a warm-up drops visual tokens before it
            token=whole(batch),
            logits=torch.zeros(batch, vocabulary, dtype=dtype, device=device),
            column=whole(1 if cuts is None else len({0, *cuts.left}), batch),
            position=whole(*axes, batch, 1),
            cache=store.view(batch, columns),
        )
        bucket.prefill = Stage(bucket.make_prefill(decoder), capture=capture)
        bucket.decode = Stage(bucket.make_decode(decoder), capture=capture)
        return bucket

    @property
    def key(self) -> tuple[int, ...]:
        """What distinguishes it from the other buckets."""
        left = () if self.cuts is None else (number for item in sorted(self.cuts.left.items()) for number in item)
        return (self.batch, self.length, *left)

    def takes(self, visual: int) -> bool:
        """Whether prompts with that many visual tokens may be spliced into it."""
        return self.cuts is None or self.cuts.num_visual == visual

    def fill(self, lm: LMInputs, order: Int[Tensor, "R U"], last: Int[Tensor, " R"]) -> None:
        """Inputs of the reference path, padded on the right: columns in that order, the last real one of each row."""
        rows, width = order.shape
        self.embeds[:rows, :width].copy_(
            lm.inputs_embeds.gather(1, order[..., None].expand(-1, -1, lm.inputs_embeds.shape[-1]))
        )
        self.positions[..., :rows, :width].copy_(
            lm.position_ids.gather(-1, order.expand(*lm.position_ids.shape[:-2], *order.shape))
        )
        self.last[:rows].copy_(last)

    def segments(self) -> list[range]:
        """Layers that hold the same tokens."""
        borders = sorted({0, *(self.cuts.left if self.cuts is not None else ())})
        return [range(first, end) for first, end in pairwise([*borders, len(self.cache)])]

    def make_prefill(self, decoder: Decoder) -> Callable[[], None]:
        def run() -> None:
            if self.cuts is None:
                logits = decoder.prefill(self.embeds, self.positions, self.last, self.cache)
                self.column[0].copy_(self.last + 1)
            else:
                logits = self.prefill_with_cuts(decoder, self.cuts)
            self.logits.copy_(logits)
            self.token.copy_(logits.argmax(-1))
            index = self.last[:, None].expand(*self.positions.shape[:-1], 1)
            self.position.copy_(self.positions.gather(-1, index) + 1)

        return run

    def prefill_with_cuts(self, decoder: Decoder, cuts: Cuts) -> Float[Tensor, "B V"]:
        """Logits after each prompt, with visual tokens dropped before the layers of the plan.

        Every prompt has the same number of visual tokens side by side, so all shapes are known beforehand.
        """
        residual, branch = self.embeds, torch.zeros_like(self.embeds)
        positions, last, visual = self.positions, self.last, cuts.num_visual
        entered = residual
        for number, layers in enumerate(self.segments()):
            fewer = cuts.left.get(layers[0], visual)
            if fewer < visual:
                hidden = residual + branch
                state = self.look(decoder, cuts, layers[0], hidden, entered, positions, last, visual)
                keep = keep_largest(cuts.score(state), fewer)
                columns = columns_after_cut(self.first, keep, visual, hidden.shape[1])
                residual = take(hidden, columns)
                branch = torch.zeros_like(residual)
                positions = positions.gather(-1, columns.expand(*positions.shape[:-2], *columns.shape))
                last, visual = last - (visual - fewer), fewer
            self.column[number].copy_(last + 1)
            residual, branch = decoder.run_layers(residual, branch, positions, self.cache, layers[:-1])
            entered = residual + branch
            residual, branch = decoder.run_layers(residual, branch, positions, self.cache, layers[-1:])
        return decoder.logits_at(residual, branch, last)

    def look(
        self,
        decoder: Decoder,
        cuts: Cuts,
        layer: int,
        hidden: Tensor,
        entered: Tensor,
        positions: Tensor,
        last: Tensor,
        visual: int,
    ) -> LayerState:
        """What the method sees before a layer."""
        columns = torch.arange(hidden.shape[1], device=hidden.device)
        valid = columns <= last[:, None]
        seen = [SimpleNamespace(keys=cache.keys[:, :, : hidden.shape[1]]) for cache in self.cache[:layer]]
        reader = AttentionReader(
            decoder=cuts.language_model,
            layer=layer,
            entered=entered,
            hidden=hidden,
            tables=decoder.tables(hidden, positions),
            valid=valid,
            two_way=None,
            cache=SimpleNamespace(layers=seen),
        )
        return LayerState(
            layer=layer,
            hidden=hidden,
            attention_mask=valid,
            visual=self.first[:, None] + torch.arange(visual, device=hidden.device),
            last=last,
            reader=reader,
        )

    def make_decode(self, decoder: Decoder) -> Callable[[], None]:
        def run() -> None:
            segments = list(zip(self.segments(), self.column, strict=True))
            logits = decoder.decode(self.token, self.position, segments, self.cache)
            self.logits.copy_(logits)
            self.token.copy_(logits.argmax(-1))
            for layers, column in segments:  # never past the cache, however often a step is measured
                column.copy_((column + 1).clamp_max(self.columns[layers[0]] - 1))
            self.position.add_(1)

        return run


def num_columns(length: int, max_new_tokens: int) -> int:
    """Columns of a cache for a prompt of that length and its answer."""
    return -(-(length + max_new_tokens) // ALIGN) * ALIGN
