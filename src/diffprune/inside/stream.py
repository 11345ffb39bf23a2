"""The tokens on their way through the decoder's layers, and what a cut does to them and to the caches.

Real columns come first and padding behind: then being causal is all the mask a prompt needs, a batch of different
lengths included, and no layer is ever given a T x T tensor under SDPA.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache

from diffprune.backbones.base import Backbone
from diffprune.backbones.prompts import behind_prompt
from diffprune.inside.state import Cut, Prompt
from diffprune.methods.base import LayerPruner
from diffprune.types import LMInputs


@dataclass(slots=True)
class Segment:
    """Layers that hold the same tokens.

    Args:
        layers: Their indices.
        valid: Which columns of their caches are real.
        padded: Whether any is not.
        next_position: Of the token to come.
    """

    layers: range
    valid: Bool[Tensor, "B T"]
    padded: bool
    next_position: Int[Tensor, "*R B 1"]


@dataclass(slots=True)
class LayerCache:
    """Keys and values of each layer, and the segments of layers that hold the same tokens: shorter after each cut."""

    keys_values: DynamicCache
    segments: list[Segment]

    def lengths(self) -> list[int]:
        """Cached columns of each layer."""
        return [segment.valid.shape[1] for segment in self.segments for _ in segment.layers]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """The tokens on their way through the layers, real columns first; `glimpse` marks a token of the method's own."""

    hidden: Float[Tensor, "B T L"]
    positions: Int[Tensor, "*R B T"]
    valid: Bool[Tensor, "B T"]
    visual: Bool[Tensor, "B T"]
    source: Int[Tensor, "B T"]
    additions: tuple[Float[Tensor, "B T L"], ...]
    two_way: Bool[Tensor, "B T"] | None
    glimpse: Bool[Tensor, "B T"] | None = None

    def take(self, columns: Int[Tensor, "B U"], valid: Bool[Tensor, "B U"]) -> "Stream":
        """The columns named, in that order; `valid` says which of them are real."""
        wide = columns[..., None].expand(-1, -1, self.hidden.shape[-1])
        return Stream(
            hidden=self.hidden.gather(1, wide),
            positions=self.positions.gather(-1, columns.expand(*self.positions.shape[:-2], *columns.shape)),
            valid=valid,
            visual=self.visual.gather(1, columns) & valid,
            source=self.source.gather(1, columns),
            additions=tuple(addition.gather(1, wide) for addition in self.additions),
            two_way=None if self.two_way is None else self.two_way.gather(1, columns) & valid,
            glimpse=None if self.glimpse is None else self.glimpse.gather(1, columns) & valid,
        )

    def packed(self) -> "Stream":
        """The sequence with positions that count on from the first without a gap."""
        counted = self.valid.cumsum(-1) - 1 + self.positions[..., :1]
        return replace(self, positions=torch.where(self.valid, counted, 0))

    def segment(self, layers: range) -> Segment:
        """Layers that run on these tokens."""
        last = torch.where(self.valid, self.positions, 0).amax(-1, keepdim=True)  # [*R, B, 1]
        if last.ndim == 3:  # a picture at the end of the prompt: the token to come stands behind all three axes
            last = last.amax(0, keepdim=True).expand_as(last)
        return Segment(layers=layers, valid=self.valid, padded=not bool(self.valid.all()), next_position=last + 1)


def start(backbone: Backbone, lm: LMInputs) -> tuple[Stream, Prompt]:
    """The sequence before the first layer, and the prompt as methods look back at it."""
    real = lm.attention_mask.bool()
    asked = real if lm.labels is None else real & ~behind_prompt(lm.labels)
    columns = torch.arange(real.shape[1], device=real.device)
    picture = (lm.input_ids == backbone.image_token_id) & asked  # newlines between its rows included
    behind = asked & (columns > torch.where(picture, columns, -1).amax(-1, keepdim=True))
    last = torch.where(asked, columns, 0).amax(-1, keepdim=True)
    prompt = Prompt(
        embeds=lm.inputs_embeds,
        visual=lm.visual,
        instruction=torch.where(behind.any(-1, keepdim=True), behind, columns == last),
        origin=lm.origin,
    )
    stream = Stream(
        hidden=lm.inputs_embeds,
        positions=lm.position_ids,
        valid=real,
        visual=lm.visual,
        source=columns.expand_as(real),
        additions=tuple(backbone.layer_additions(lm)),
        two_way=backbone.two_way(lm),
    )
    return stream.take(*real_first(real)), prompt


def drop(
    stream: Stream,
    visual: Int[Tensor, "B M"],
    cut: Cut,
    cache: LayerCache | None = None,
    method: LayerPruner | None = None,
) -> Stream:
    """The sequence with the tokens of the cut, in the cut's order, and everything that is not visual.

    Args:
        cache: Of the layers before; cut too, where the method says so.
        method: Whose cut it is.
    """
    width = stream.valid.shape[1]
    columns = visual.gather(1, cut.keep.clamp_min(0)).masked_fill(cut.keep < 0, width)  # [B, K]; padding past the end
    if cut.hidden is not None:
        spare = torch.cat([stream.hidden, stream.hidden[:, :1]], dim=1)
        spare = spare.scatter(1, columns[..., None].expand_as(cut.hidden), cut.hidden.to(spare.dtype))
        stream = replace(stream, hidden=spare[:, :width])
    left, valid = columns_left(stream, columns)
    short = replace(stream.take(left, valid), glimpse=None)
    if method is not None and method.positions == "packed":
        short = short.packed()
    if cache is not None and method is not None and method.prunes_earlier:
        for layer in cache.keys_values.layers:
            index = left[:, None, :, None].expand(-1, layer.keys.shape[1], -1, layer.keys.shape[-1])  # type: ignore[union-attr]
            layer.keys, layer.values = layer.keys.gather(2, index), layer.values.gather(2, index)  # type: ignore[union-attr]
        cache.segments = [short.segment(segment.layers) for segment in cache.segments]
    return short


def columns_left(stream: Stream, columns: Int[Tensor, "B K"]) -> tuple[Int[Tensor, "B U"], Bool[Tensor, "B U"]]:
    """Everything that is not visual and the visual columns given, real first: the n-th of them at the n-th place.

    Args:
        columns: In any order, the width of the sequence for padding.
    """
    width = stream.valid.shape[1]
    others = stream.valid & ~stream.visual
    if stream.glimpse is not None:
        others = others & ~stream.glimpse
    stays = functional.pad(others, (0, 1)).scatter(1, columns, True)[:, :width]
    places = columns.sort(dim=-1).values  # the n-th token of the cut goes to the n-th place that stays
    content = torch.arange(width + 1, device=columns.device).repeat(len(columns), 1).scatter(1, places, columns)
    order, valid = real_first(stays)
    return content.gather(1, order), valid


def with_glimpse(stream: Stream, prompt: Prompt, method: LayerPruner, loses: Bool[Tensor, " B"]) -> Stream:
    """The sequence with the method's own token behind each prompt that loses some, still empty, where it has one.

    Nothing of the prompt attends to it, and a cut takes it away. It stands where the first word of the answer will.
    """
    if method.glimpse(0) is None:
        return stream
    width = stream.valid.shape[1]
    at = torch.where(loses, last_column(stream, prompt) + 1, width)[:, None]  # [B, 1]; padding where nothing is lost
    columns = torch.arange(width + 1, device=at.device)
    order = torch.where(columns < at, columns, columns - 1)  # at its own place, that of the last prompt token
    is_own = (columns == at) & loses[:, None]
    wide = stream.take(order, stream.valid.gather(1, order) & (columns != at) | is_own)
    return replace(
        wide,
        hidden=wide.hidden.masked_fill(is_own[..., None], 0.0),
        positions=wide.positions + is_own,
        visual=wide.visual & ~is_own,
        additions=tuple(addition.masked_fill(is_own[..., None], 0.0) for addition in wide.additions),
        two_way=None if wide.two_way is None else wide.two_way & ~is_own,
        glimpse=is_own,
    )


def entering(stream: Stream, method: LayerPruner | None, index: int) -> Float[Tensor, "B T L"]:
    """What enters a layer: the hidden states, the method's own token with what the method adds to it there."""
    if stream.glimpse is None or method is None:
        return stream.hidden
    own = method.glimpse(index)
    return stream.hidden if own is None else stream.hidden + stream.glimpse[..., None] * own.to(stream.hidden.dtype)


def last_column(stream: Stream, prompt: Prompt) -> Int[Tensor, " B"]:
    """Where the last instruction token stands."""
    columns = torch.arange(stream.valid.shape[1], device=stream.valid.device)
    instruction = prompt.instruction.gather(1, stream.source) & stream.valid
    return torch.where(instruction, columns, 0).amax(-1)


def real_first(stays: Bool[Tensor, "B T"]) -> tuple[Int[Tensor, "B U"], Bool[Tensor, "B U"]]:
    """Columns that stay, in order and flush left, and which of them are real."""
    width = max(1, int(stays.sum(-1).max()))
    order = torch.argsort((~stays).long(), dim=-1, stable=True)[:, :width]
    return order, stays.gather(1, order)
