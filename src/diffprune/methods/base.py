"""The ladder of pruning methods. A class is an interface (abstract) or a method (final); nothing in between.

Pruner             select(tokens, k) -> keep [B, K]
  ScoringPruner    score(tokens) -> logits [B, N]; select keeps the K largest
    TrainablePruner  restrict(tokens, k, tau) -> weakened tokens [B, N, D], for training
  MergingPruner    reduce(tokens, k) -> new tokens [B, K, D] and their positions [B, K]
  LayerPruner      select_at(state, k) -> keep [B, K], inside the language model
"""

import dataclasses
import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from diffprune.methods.layer_budget import layer_average
from diffprune.methods.llm_attention import Reader, at_columns
from diffprune.nn import BlockSpec
from diffprune.ops import hard_topk
from diffprune.registry import METHODS
from diffprune.types import VisualTokens

NEEDS = frozenset({"text", "cls_attention", "keys", "projected", "llm_attention"})

Generators = torch.Generator | Sequence[torch.Generator] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What `diffprune methods` says of a method.

    Args:
        idea: The rule in one sentence.
        paper: Title or short name of the source, empty for a plain control.
        year: Of the paper.
        licence: Of the original's released code.
        certainty: How sure our specification is: "own", "formula", "release read", "unofficial".
        budget: "exact K" or the rule by which the method spends its budget.
    """

    idea: str
    paper: str = ""
    year: int | None = None
    licence: str = ""
    certainty: str = "own"
    budget: str = "exact K"


@dataclass(frozen=True, slots=True, kw_only=True)
class NoOptions:
    """A method without knobs."""


class Pruner(nn.Module, ABC):
    """Decides which visual tokens stay.

    Args:
        options: An instance of the class's `Options`; its defaults where left out.
        block: The kind of Transformer block the backbone's vision tower is made of; learned methods build on it.
    """

    name: ClassVar[str] = ""
    card: ClassVar[Card]
    needs: ClassVar[frozenset[str]] = frozenset()
    place: ClassVar[str] = "before the LLM"
    trained: ClassVar[bool] = False
    Options: ClassVar[type] = NoOptions

    def __init__(self, options: Any = None, *, block: BlockSpec | None = None) -> None:
        super().__init__()
        self.options = self.Options() if options is None else options
        self.block = block

    @abstractmethod
    def select(self, tokens: VisualTokens, k: Int[Tensor, " B"]) -> Int[Tensor, "B K"]:
        """Indices of the tokens that stay: ascending, never padding, -1 at the end of rows that keep fewer."""


class ScoringPruner(Pruner):
    """Ranks tokens and keeps the first K."""

    @abstractmethod
    def score(self, tokens: VisualTokens) -> Float[Tensor, "B N"]:
        """One logit per token, larger is more worth keeping; padding may hold anything finite."""

    def select(self, tokens: VisualTokens, k: Int[Tensor, " B"]) -> Int[Tensor, "B K"]:
        return hard_topk(self.score(tokens), k, mask=tokens.mask)


class Restricted(NamedTuple):
    """What a training step runs: weakened tokens, and the weights that weakened them."""

    x: Float[Tensor, "B N D"]
    alpha: Float[Tensor, "B N"]
    logits: Float[Tensor, "B N"]
    penalty: Float[Tensor, ""] | None = None  # added to the loss, where a method needs more than the model's own


class TrainablePruner(ScoringPruner):
    """Learns its ranking by weakening tokens during training. Parameters named `throttle_*` never leave training."""

    trained: ClassVar[bool] = True

    @abstractmethod
    def restrict(
        self, tokens: VisualTokens, k: Int[Tensor, " B"], *, tau: float | Tensor, generator: Generators = None
    ) -> Restricted:
        """All N tokens, each weakened by its weight; one generator per image makes a row independent of its batch."""

    def parameter_counts(self) -> dict[str, int]:
        """Parameters that are deployed, all there are, and those that learn."""
        sizes = [(name, value.numel(), value.requires_grad) for name, value in self.named_parameters()]
        return {
            "scorer": sum(size for name, size, _ in sizes if not name.startswith("throttle_")),
            "all": sum(size for _, size, _ in sizes),
            "trainable": sum(size for _, size, learns in sizes if learns),
        }


class Merged(NamedTuple):
    """New tokens in place of the old ones, and the raster index each stands at (ascending, -1 for padding)."""

    x: Float[Tensor, "B K D"]
    positions: Int[Tensor, "B K"]


class MergingPruner(Pruner):
    """Makes K new tokens out of N instead of choosing K of them."""

    @abstractmethod
    def reduce(self, tokens: VisualTokens, k: Int[Tensor, " B"]) -> Merged: ...

    def select(self, tokens: VisualTokens, k: Int[Tensor, " B"]) -> Int[Tensor, "B K"]:
        return self.reduce(tokens, k).positions


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What the language model was given, before its first layer: P columns a row.

    Args:
        embeds: Text and projected visual tokens.
        visual: True where a visual token stands.
        instruction: True at the text behind the last picture, answers excluded; at the last column where there is none.
    """

    embeds: Float[Tensor, "B P L"]
    visual: Bool[Tensor, "B P"]
    instruction: Bool[Tensor, "B P"]


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
        last: Column of the last instruction token, from which the answer goes on. Left out: the last real column.
        source: Column of `prompt` each column comes from.
        prompt: What the first layer was given.
        reader: Of the layers beside the cut.
    """

    layer: int
    hidden: Float[Tensor, "B T L"]
    attention_mask: Bool[Tensor, "B T"]
    visual: Int[Tensor, "B M"]
    last: Int[Tensor, " B"] = None  # type: ignore[assignment]  # filled in __post_init__
    source: Int[Tensor, "B T"] | None = None
    prompt: Prompt | None = None
    reader: Reader | None = None

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


class LayerPruner(Pruner):
    """Drops tokens between decoder layers; every layer keeps a cache of the tokens it saw."""

    place: ClassVar[str] = "inside the LLM"

    @abstractmethod
    def stages(self, num_layers: int, num_visual: int, keep: int) -> dict[int, int]:
        """The layers before which tokens are dropped, and how many visual tokens a prompt has left from there on.

        `{2: 64}` drops to 64 before layer 2. A prompt that may keep all its tokens, or has none, loses none.
        """

    @abstractmethod
    def select_at(self, state: LayerState, k: Int[Tensor, " B"]) -> Int[Tensor, "B K"] | Cut:
        """Indices into `state.visual` of the tokens that stay in each prompt; a `Cut` where some change."""

    @property
    def positions(self) -> str:
        """ "original", or "packed" where a method numbers what is left anew after each cut."""
        return "original"

    def average(self, num_layers: int, num_visual: int, keep: int) -> float:
        """Visual tokens a decoder layer sees, mean over all layers: the other meaning of "K tokens" in tables."""
        return layer_average(self.stages(num_layers, num_visual, keep), num_layers, num_visual)

    def select(self, tokens: VisualTokens, k: Int[Tensor, " B"]) -> Int[Tensor, "B K"]:
        raise ValueError(f"{self.name} chooses inside the language model; use PrunedVLM.generate with it")


def require_weights(name: str) -> None:
    """An error for a learned method that is asked for by name alone: its scorer would be at its random start."""
    if METHODS.get(name).trained:
        raise ValueError(f"method {name!r} is learned and needs weights; give a saved one with --pruner")


def build_method(name: str, *, block: BlockSpec | None = None, **options: Any) -> Pruner:
    """The method of that name, with its options checked against its own dataclass."""
    cls = METHODS.get(name)
    known = {field.name: field for field in dataclasses.fields(cls.Options)}
    for key in options:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(known) or 'none'}"
            raise ValueError(f"method {name!r} has no option {key!r}; {hint}")
    preset = getattr(cls, "presets", {}).get(name, {})
    method = cls(cls.Options(**{**preset, **options}), block=block)
    method.name = name
    return method


def check_choices(options: Any, **choices: Sequence[str]) -> None:
    """Raise a `ValueError` that names the option where it has none of the values it may have."""
    for name, allowed in choices.items():
        value = getattr(options, name)
        if value not in allowed:
            raise ValueError(f"{name}={value!r} is not known; give one of {', '.join(allowed)}")


def require_block(method: str, block: BlockSpec | None) -> BlockSpec:
    """The block a learned method builds on, or a `ValueError` that says how to give it."""
    if block is None:
        raise ValueError(
            f"{method} is built of the vision tower's blocks; pass block=BlockSpec.from_config(model.config)"
        )
    return block


def draw_normal(
    like: Float[Tensor, "B N D"], mask: Bool[Tensor, "B N"], generator: Generators
) -> Float[Tensor, "B N D"]:
    """Standard normal noise in the shape of `like`, float32."""

    def normal(shape: torch.Size, device: torch.device, own: torch.Generator | None) -> Tensor:
        return torch.randn(shape, generator=own, device=device, dtype=torch.float32)

    return _draw(normal, like, mask, generator)


def draw_gumbel(like: Float[Tensor, "B N"], mask: Bool[Tensor, "B N"], generator: Generators) -> Float[Tensor, "B N"]:
    """Standard Gumbel noise in the shape of `like`, float32."""

    def gumbel(shape: torch.Size, device: torch.device, own: torch.Generator | None) -> Tensor:
        waits = torch.empty(shape, device=device, dtype=torch.float64).exponential_(generator=own)
        return -waits.log().float()  # in float64 no wait is 0

    return _draw(gumbel, like, mask, generator)


def _draw(
    sample: Callable[[torch.Size, torch.device, torch.Generator | None], Tensor],
    like: Tensor,
    mask: Bool[Tensor, "B N"],
    generator: Generators,
) -> Tensor:
    """Noise from one generator for all, or from one per image: then an image's real tokens draw alone, padding gets 0.

    So an image draws the same in any batch, beside any other. Numbers are drawn where the generator lives: a CPU
    generator gives the same noise for every device.
    """
    if generator is None or isinstance(generator, torch.Generator):
        home = like.device if generator is None else generator.device
        return sample(like.shape, home, generator).to(like.device)
    if len(generator) != len(like):
        raise ValueError(f"{len(generator)} generators for {len(like)} images; give one, or one per image")
    drawn = torch.zeros(like.shape, device=like.device)
    for row, (own, count) in enumerate(zip(generator, mask.sum(-1).tolist(), strict=True)):
        drawn[row, mask[row]] = sample(torch.Size((count, *like.shape[2:])), own.device, own).to(like.device)
    return drawn
