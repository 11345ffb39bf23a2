"""The ladder of pruning methods. A class is an interface (abstract) or a method (final); nothing in between.

Pruner             select(tokens, k) -> keep [B, K]
  ScoringPruner    score(tokens) -> logits [B, N]; select keeps the K largest
    TrainablePruner  restrict(tokens, k, tau) -> weakened tokens [B, N, D], for training
  MergingPruner    reduce(tokens, k) -> new tokens [B, K, D] and their positions [B, K]
  LayerPruner      select_at(state, k) -> keep [B, K], inside the language model
    TrainableLayerPruner  decide(state, k, tau) -> how much of each token is still heard, for training
  SelfTaughtPruner   own_loss(tokens, k) -> what it learns from pictures alone, without the language model
"""

import dataclasses
import difflib
import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from diffprune.methods.layer_budget import layer_average
from diffprune.methods.llm_attention import Reader, at_columns
from diffprune.methods.similarity import raster
from diffprune.nn import BlockSpec
from diffprune.nn.language import LanguageSpec
from diffprune.ops import hard_topk, take_tokens
from diffprune.ops.noise import Generators
from diffprune.registry import METHODS
from diffprune.types import Origin, VisualTokens

NEEDS = frozenset({"text", "cls_attention", "keys", "projected", "llm_attention"})

Counts = int | Int[Tensor, " B"]  # tokens to keep: of each image its own, or of all the same, known without the device


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


class Choice(NamedTuple):
    """What stays, and the score of every token where the method has a ranking."""

    keep: Int[Tensor, "B K"]
    logits: Float[Tensor, "B N"] | None = None


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
    learns_from_regions: bool = False  # its loss asks for VisualTokens.regions, where the data can tell them
    native_positions: ClassVar[str] = "original"  # "packed" where the release numbers what is left without gaps
    native_rounding: ClassVar[str] = "nearest"  # "down" where the release makes int(share * N) of a share
    Options: ClassVar[type] = NoOptions

    def __init__(self, options: Any = None, *, block: BlockSpec | None = None) -> None:
        super().__init__()
        self.options = self.Options() if options is None else options
        self.block = block

    @property
    def is_native(self) -> bool:
        """Whether it does as its release does, where it has such an option."""
        return getattr(self.options, "native", False)

    @property
    def positions(self) -> str:
        """ "original", or "packed" where the method numbers what is left anew, inside the LLM after each cut."""
        return self.native_positions if self.is_native else "original"

    @property
    def rounding(self) -> str:
        """How a share becomes a count (`Budget.rounding`)."""
        return self.native_rounding if self.is_native else "nearest"

    @abstractmethod
    def select(self, tokens: VisualTokens, k: Counts) -> Int[Tensor, "B K"]:
        """Indices of the tokens that stay: ascending, never padding, -1 at the end of rows that keep fewer.

        Where the method is built with `native=True` they come in the order of its release; `choose` has them ascending.
        A tensor of counts has to be read, which waits for its device. With an int, and tokens that were given no mask,
        every shape is known beforehand.
        """

    def choose(self, tokens: VisualTokens, k: Counts) -> Choice:
        """What `select` gives, in raster order whatever its own is, with the scores it went by."""
        keep = self.select(tokens, k)
        return Choice(raster(keep) if self.is_native else keep)

    def parameter_counts(self) -> dict[str, int]:
        """Parameters that are deployed, all there are, and those that learn."""
        sizes = [(name, value.numel(), value.requires_grad) for name, value in self.named_parameters()]
        return {
            "scorer": sum(size for name, size, _ in sizes if not name.startswith("throttle_")),
            "all": sum(size for _, size, _ in sizes),
            "trainable": sum(size for _, size, learns in sizes if learns),
        }


class ScoringPruner(Pruner):
    """Ranks tokens and keeps the first K."""

    @abstractmethod
    def score(self, tokens: VisualTokens) -> Float[Tensor, "B N"]:
        """One logit per token, larger is more worth keeping; padding may hold anything finite."""

    def select(self, tokens: VisualTokens, k: Counts) -> Int[Tensor, "B K"]:
        return self.choose(tokens, k).keep

    def choose(self, tokens: VisualTokens, k: Counts) -> Choice:
        logits = self.score(tokens)
        return Choice(hard_topk(logits, k, mask=tokens.padding_mask), logits)


class Distillation(NamedTuple):
    """How much a training step is held to what the unpruned model says, beside the answers themselves.

    Args:
        answers: Weight of the divergence from its next-token distribution, mean over answer tokens.
        tokens: Weight of the squared distance of the kept visual tokens' last hidden states from its own.
    """

    answers: float
    tokens: float


class Restricted(NamedTuple):
    """What a training step runs: weakened tokens, and the weights that weakened them.

    Where `heard` is given, the tokens are as they were and the language model's attention is weakened instead.
    """

    x: Float[Tensor, "B N D"]
    alpha: Float[Tensor, "B N"]
    logits: Float[Tensor, "B N"]
    penalty: Float[Tensor, ""] | None = None  # added to the loss, where a method needs more than the model's own
    heard: Float[Tensor, "B N"] | None = None
    distillation: Distillation | None = None


class TrainablePruner(ScoringPruner):
    """Learns its ranking by weakening tokens during training. Parameters named `throttle_*` never leave training."""

    trained: ClassVar[bool] = True
    # Whether the weights of a training step sum to K; else a penalty holds them near it.
    exact_in_training: bool = True
    # Whether training hides tokens from attention (`Restricted.heard`) instead of changing them.
    hides_tokens: bool = False

    @abstractmethod
    def restrict(
        self, tokens: VisualTokens, k: Int[Tensor, " B"], *, tau: float | Tensor, generator: Generators = None
    ) -> Restricted:
        """All N tokens, each weakened by its weight; one generator per image makes a row independent of its batch."""


class SelfTaughtPruner(Pruner):
    """Learns from pictures alone: neither answers nor the language model have a part in its loss."""

    trained: ClassVar[bool] = True

    @abstractmethod
    def start_training(self) -> None:
        """Make what exists for training only, under names that start with `throttle_`; called once, before a run."""

    @abstractmethod
    def own_loss(
        self, tokens: VisualTokens, k: Int[Tensor, " B"], *, generator: Generators = None
    ) -> Float[Tensor, ""]:
        """Mean over the images; one generator per image makes a row independent of its batch."""


class Merged(NamedTuple):
    """New tokens in place of the old ones, and the raster index each stands at, -1 for padding.

    Ascending, or in the order of the release where the method is built with `native=True`.
    """

    x: Float[Tensor, "B K D"]
    positions: Int[Tensor, "B K"]

    def in_raster_order(self) -> "Merged":
        """The same tokens with their positions ascending, padding at the end."""
        last = torch.iinfo(self.positions.dtype).max
        order = self.positions.masked_fill(self.positions < 0, last).sort(dim=-1).indices
        return Merged(take_tokens(self.x, order), self.positions.gather(-1, order))


class MergingPruner(Pruner):
    """Makes K new tokens out of N instead of choosing K of them."""

    @abstractmethod
    def reduce(self, tokens: VisualTokens, k: Counts) -> Merged: ...

    def select(self, tokens: VisualTokens, k: Counts) -> Int[Tensor, "B K"]:
        return self.reduce(tokens, k).positions


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
            (`LayerPruner.glimpse`) where it has one. Left out: the last real column.
        source: Column of `prompt` each column comes from.
        prompt: What the first layer was given.
        reader: Of the layers beside the cut.
        heard: In training, how much of each visual token is still heard after the cuts before. Left out: all of it.
    """

    layer: int
    hidden: Float[Tensor, "B T L"]
    attention_mask: Bool[Tensor, "B T"]
    visual: Int[Tensor, "B M"]
    last: Int[Tensor, " B"] = None  # type: ignore[assignment]  # filled in __post_init__
    source: Int[Tensor, "B T"] | None = None
    prompt: Prompt | None = None
    reader: Reader | None = None
    heard: Float[Tensor, "B M"] | None = None

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
    """What a training step makes of a cut: nothing is dropped, but what would be is no longer heard.

    Args:
        heard: How much of each visual token the others hear from here on, from 0 to 1.
        logits: The scores behind it.
        penalty: Added to the loss.
    """

    heard: Float[Tensor, "B M"]
    logits: Float[Tensor, "B M"]
    penalty: Float[Tensor, ""] | None = None


class LayerPruner(Pruner):
    """Drops tokens between decoder layers; every layer keeps a cache of the tokens it saw."""

    place: ClassVar[str] = "inside the LLM"
    prunes_earlier: ClassVar[bool] = False  # a cut also takes the dropped tokens out of the caches of the layers before

    @abstractmethod
    def stages(self, num_layers: int, num_visual: int, keep: int) -> dict[int, int]:
        """The layers before which tokens are dropped, and how many visual tokens a prompt has left from there on.

        `{2: 64}` drops to 64 before layer 2. A prompt that may keep all its tokens, or has none, loses none.
        """

    @abstractmethod
    def select_at(self, state: LayerState, k: Int[Tensor, " B"]) -> Int[Tensor, "B K"] | Cut | Route:
        """Indices into `state.visual` of the tokens that stay in each prompt; a `Cut` where some change, a `Route`
        where those that do not go through the layer come back behind it."""

    def glimpse(self, layer: int) -> Float[Tensor, " L"] | None:
        """What is added before that layer to a token of the method's own, which stands behind the prompt until the
        cut and starts from zero; None where it has no such token."""
        return None

    def average(self, num_layers: int, num_visual: int, keep: int) -> float:
        """Visual tokens a decoder layer sees, mean over all layers: the other meaning of "K tokens" in tables."""
        return layer_average(self.stages(num_layers, num_visual, keep), num_layers, num_visual)

    def select(self, tokens: VisualTokens, k: Counts) -> Int[Tensor, "B K"]:
        raise ValueError(f"{self.name} chooses inside the language model; use PrunedVLM.generate with it")


class TrainableLayerPruner(LayerPruner):
    """Learns inside the frozen language model. Built of the sizes of that model, `language`."""

    trained: ClassVar[bool] = True

    def __init__(
        self, options: Any = None, *, block: BlockSpec | None = None, language: LanguageSpec | None = None
    ) -> None:
        super().__init__(options, block=block)
        if language is None or block is None:
            raise ValueError(
                f"{type(self).__name__} learns inside the language model; pass "
                "block=BlockSpec.from_config(model.config) and language=LanguageSpec.from_config(model.config)"
            )
        self.language = language

    @abstractmethod
    def decide(
        self, state: LayerState, k: Int[Tensor, " B"], *, tau: float | Tensor, generator: Generators = None
    ) -> Decision | Route:
        """What a training step does at a cut; one generator per prompt makes a row independent of its batch."""


def require_weights(name: str) -> None:
    """An error for a learned method that is asked for by name alone: its scorer would be at its random start."""
    if METHODS.get(name).trained:
        raise ValueError(f"method {name!r} is learned and needs weights; give a saved one with --pruner")


def build_method(
    name: str, *, block: BlockSpec | None = None, language: LanguageSpec | None = None, **options: Any
) -> Pruner:
    """The method of that name, with its options checked against its own dataclass.

    Args:
        block: The kind of block the vision tower is made of, for methods that learn.
        language: The sizes of the language model, for methods that learn inside it.
        options: Of the method; `native`, whether it does as its release does, is taken by all: one without such an
            option has a single behaviour.
    """
    cls = METHODS.get(name)
    made = make_options(name, options)
    inside = {"language": language} if "language" in inspect.signature(cls.__init__).parameters else {}
    method = cls(made, block=block, **inside)
    method.name = name
    return method


def make_options(name: str, options: Mapping[str, Any]) -> Any:
    """The method's `Options` of these values; a `ValueError` where it has no such option, or it not such a value."""
    cls = METHODS.get(name)
    known = [field.name for field in dataclasses.fields(cls.Options)]
    given = dict(options)
    if "native" not in known and isinstance(given.get("native"), bool):
        del given["native"]
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            all_known = ", ".join(known) or "none"
            hint = f"did you mean {near[0]} (of {all_known})?" if near else f"it takes {all_known}"
            raise ValueError(f"method {name!r} has no option {key!r}; {hint}")
    preset = getattr(cls, "presets", {}).get(name, {})
    return cls.Options(**{**preset, **given})


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
