"""What a method inside the language model is shown before a layer, and what it may answer."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffprune.inside.reader import Reader, at_columns
from diffprune.ops import take_tokens
from diffprune.types import Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What the language model was given, before its first layer: P columns a row.

    Args:
        embeds: Text and projected visual tokens.
        visual: True where a visual token stands.
        instruction: True at the text behind the last picture, answers excluded; at the last column where there is none.
        origin: Where the visual tokens come from, with what the encoder gave for them.
    """

    embeds: Float[Tensor, "B P L"]
    visual: Bool[Tensor, "B P"]
    instruction: Bool[Tensor, "B P"]
    origin: Origin | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerState:
    """What a method inside the language model sees right before a decoder layer.

    Rows are prompts here, not images; their real columns come first, padding behind. What costs something is computed
    when it is asked for: `attention`, `keys`, `rope_bias` and `normed` need a `reader`, which a running model gives.

    Args:
        layer: The layer about to run; `layer - 1` just ran.
        hidden: What is about to enter it.
        attention_mask: True where a column is real.
        visual: For each prompt the columns where visual tokens still stand, ascending, -1 for padding.
        last: Column of the last instruction token, from which the answer goes on; of the method's own token
            (`LayerPruner.glimpse`) where it has one. Default: the last real column.
        source: Column of `prompt` each column comes from.
        prompt: What the first layer was given.
        reader: Of the layers beside the cut.
        soft_mask: In training, how much the others attend to each visual token after the cuts before. Default: all.
    """

    layer: int
    hidden: Float[Tensor, "B T L"]
    attention_mask: Bool[Tensor, "B T"]
    visual: Int[Tensor, "B M"]
    last: Int[Tensor, " B"] = None  # type: ignore[assignment]  # filled in __post_init__
    source: Int[Tensor, "B T"] | None = None
    prompt: Prompt | None = None
    reader: Reader | None = None
    soft_mask: Float[Tensor, "B M"] | None = None

    def __post_init__(self) -> None:
        if self.last is None:  # pyright: ignore[reportUnnecessaryComparison]
            columns = torch.arange(self.attention_mask.shape[1], device=self.attention_mask.device)
            last = torch.where(self.attention_mask, columns, 0).amax(-1)
            object.__setattr__(self, "last", last)

    @property
    def instruction(self) -> Bool[Tensor, "B T"]:
        """True at the columns of the text behind the last picture."""
        return self.from_prompt(self._prompt.instruction)

    def from_prompt(self, mask: Bool[Tensor, "B P"]) -> Bool[Tensor, "B T"]:
        """A mask over the prompt's columns as one over the columns that are left."""
        assert self.source is not None
        return mask.gather(1, self.source) & self.attention_mask

    def attention(self, rows: Int[Tensor, "B R"], layer: int | None = None) -> Float[Tensor, "B H R T"]:
        """How the query columns `rows` (-1: none) attend, in float32: in the layer that just ran, or in `layer`."""
        return self._reader.attention(rows, self.layer - 1 if layer is None else layer)

    def last_attention(self, layer: int | None = None) -> Float[Tensor, "B M"]:
        """Attention each visual token gets from the last instruction token, mean over heads."""
        row = self.attention(self.last[:, None], layer).mean(1)[:, 0]  # [B, T]
        return at_columns(row, self.visual)

    def mean_logits(self, rows: Int[Tensor, "B R"], layer: int | None = None) -> Float[Tensor, "B T"]:
        """What the query columns `rows` (-1: none) score every column before the softmax, mean over them and heads."""
        return self._reader.mean_logits(rows, self.layer - 1 if layer is None else layer)

    @property
    def tokens(self) -> Float[Tensor, "B M L"]:
        """Hidden states of the visual tokens, 0 at padding."""
        return take_tokens(self.hidden, self.visual)

    @property
    def origin(self) -> Origin:
        """The images' tokens, and for each visual token that is left the one it was (-1: padding)."""
        whole = self._prompt.origin
        if whole is None or self.source is None:
            raise ValueError("the state does not say where its tokens come from; let PrunedVLM.generate make it")
        columns = whole.index.gather(1, self.source).gather(1, self.visual.clamp_min(0))
        return Origin(tokens=whole.tokens, index=columns.masked_fill(self.visual < 0, -1))

    def keys(self, layer: int | None = None) -> Float[Tensor, "B H T E"]:
        """Rotated keys of the layer that just ran, or of `layer`, one set per key-value head."""
        return self._reader.keys(self.layer - 1 if layer is None else layer)

    def rope_bias(self, rows: Int[Tensor, "B R"]) -> Float[Tensor, "B R T"]:
        """What queries and keys of all ones would score at these positions."""
        return self._reader.rope_bias(rows)

    def normed(self) -> Float[Tensor, "B T L"]:
        """Hidden states through the model's final norm."""
        return self._reader.final_norm(self.hidden)

    @property
    def _reader(self) -> Reader:
        if self.reader is None:
            raise ValueError("the state holds no reader of decoder layers; let PrunedVLM.generate make it")
        return self.reader

    @property
    def _prompt(self) -> Prompt:
        if self.prompt is None:
            raise ValueError("the state holds no prompt; let PrunedVLM.generate make it")
        return self.prompt


class Cut(NamedTuple):
    """What stays at a cut, where that is more than a choice.

    Args:
        keep: Indices into `LayerState.visual`; the tokens go on in the order given, in the places of those that stay.
        hidden: What these tokens hold from now on, where some were merged with others.
    """

    keep: Int[Tensor, "B K"]
    hidden: Float[Tensor, "B K L"] | None = None


class Route(NamedTuple):
    """Who goes through one layer; the others skip it and are there again for the next.

    Args:
        keep: Indices into `LayerState.visual` of those that go through it.
        weight: Of every visual token: of the layer's MLP for those that go through it, of what they are for the others.
    """

    keep: Int[Tensor, "B K"]
    weight: Float[Tensor, "B M"]


class Decision(NamedTuple):
    """What a training step makes of a cut: nothing is dropped, but what would be is masked.

    Args:
        soft_mask: How much the others attend to each visual token from here on, from 0 to 1.
        logits: The scores behind it.
        penalty: Of each prompt; their mean is added to the loss. One that loses no token pays none.
    """

    soft_mask: Float[Tensor, "B M"]
    logits: Float[Tensor, "B M"]
    penalty: Float[Tensor, " B"] | None = None
