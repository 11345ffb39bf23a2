"""The ladder of pruning methods. A class is an interface (abstract) or a method (final); nothing in between.

Pruner             select(tokens, k) -> keep [B, K]
  ScoringPruner    score(tokens) -> logits [B, N]; select keeps the K largest
    TrainablePruner  restrict(tokens, k, tau) -> weakened tokens [B, N, D], for training
  MergingPruner    reduce(tokens, k) -> new tokens [B, K, D] and their positions [B, K]
  LayerPruner      select_at(state, k) -> keep [B, K], inside the language model
    TrainableLayerPruner  decide(state, k, tau) -> how much of each token is still heard, for training
  SelfTaughtPruner   own_loss(tokens, k) -> what it learns from pictures alone, without the language model
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from diffprune.inside.budget import layer_average
from diffprune.inside.state import Cut, Decision, LayerState, Route
from diffprune.nn import BlockSpec
from diffprune.nn.language import LanguageSpec
from diffprune.ops import hard_topk, take_tokens
from diffprune.ops.noise import Generators
from diffprune.ops.similarity import raster
from diffprune.types import VisualTokens

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
