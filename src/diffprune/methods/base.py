"""The ladder of pruning methods. A class is an interface (abstract) or a method (final); nothing in between.

Whatever its kind, a method has one verb for inference and one for training:

    deploy(tokens, k) -> Kept: x [B, K, D], index [B, K]
    restrict(tokens, k, tau) -> Restricted: all tokens, each weakened by its weight

A new method writes one of these, and gets the verbs from it:

Pruner               select(tokens, k) -> index [B, K]
  ScoringPruner      score(tokens) -> logits [B, N]; select keeps the K largest
    TrainablePruner  restrict itself
  MergingPruner      reduce(tokens, k) -> Kept, of new tokens
  LayerPruner        select_at(state, k) -> index [B, K] between decoder layers; deploy keeps all
    ScoringLayerPruner    score_at(state) -> logits [B, M]; select_at keeps the K largest
    TrainableLayerPruner  decide(state, k, tau) -> a soft mask, for training
  SelfSupervisedPruner    own_loss(tokens, k) -> what it learns from pictures alone, without the language model
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from jaxtyping import Float, Int
from torch import Tensor, nn

from diffprune.inside.budget import layer_average
from diffprune.inside.state import Cut, Decision, LayerState, Route
from diffprune.nn import BlockSpec
from diffprune.nn.language import LanguageSpec
from diffprune.ops import hard_topk, take_tokens
from diffprune.ops.noise import Generators
from diffprune.ops.similarity import raster, raster_order
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


class Kept(NamedTuple):
    """The tokens that go on, and the raster index each stands at, -1 for padding.

    `deploy` gives them ascending; `reduce` in the order of the release where the method is built with `native=True`.
    """

    x: Float[Tensor, "B K D"]
    index: Int[Tensor, "B K"]  # type: ignore[assignment]  # not the method of a tuple

    # As in `Restricted`, where tokens are weakened: here they are as they were.
    alpha = penalty = soft_mask = distillation = own_loss = None

    def in_raster_order(self) -> "Kept":
        """These tokens with their indices ascending, padding at the end."""
        order = raster_order(self.index)
        return Kept(take_tokens(self.x, order), self.index.gather(-1, order))


class Distillation(NamedTuple):
    """How much a training step is held to what the unpruned model says, beside the answers themselves.

    Args:
        answers: Weight of the divergence from its next-token distribution, mean over answer tokens.
        tokens: Weight of the squared distance of the kept visual tokens' last hidden states from its own.
    """

    answers: float
    tokens: float


class Restricted(NamedTuple):
    """What a training step runs, and the weights that made it.

    Args:
        x: The tokens, weakened; as they were where a soft mask does it.
        alpha: The weight of each token.
        logits: The scores behind the weights; all alike where nothing is weakened here.
        penalty: Of each picture, where a method needs more than the model's own loss: its mean over each prompt's
            pictures, then over prompts, is added.
        soft_mask: How much the language model's other tokens attend to each; None: as ever.
        distillation: Holds the step to the unpruned model.
        index: Raster index each of `x` stands at, -1 for padding; None: nothing was removed.
        own_loss: Of each picture the whole loss, where the language model has no part in it; weighs like a penalty.
    """

    x: Float[Tensor, "B K D"]
    alpha: Float[Tensor, "B N"]
    logits: Float[Tensor, "B N"]
    penalty: Float[Tensor, " B"] | None = None
    soft_mask: Float[Tensor, "B N"] | None = None
    distillation: Distillation | None = None
    index: Int[Tensor, "B K"] | None = None  # type: ignore[assignment]  # not the method of a tuple
    own_loss: Float[Tensor, " B"] | None = None


class Pruner(nn.Module, ABC):
    """Decides which visual tokens stay.

    Args:
        options: An instance of the class's `Options`; default: those of the class.
        block: The kind of Transformer block the backbone's vision tower is made of; learned methods build on it.
    """

    name: ClassVar[str] = ""
    card: ClassVar[Card]
    needs: ClassVar[frozenset[str]] = frozenset()
    place: ClassVar[str] = "before the LLM"
    trained: ClassVar[bool] = False
    deploys: ClassVar[str] = ""  # the method whose trained weights it takes, where it has none of its own
    is_inside: ClassVar[bool] = False  # it drops between decoder layers
    is_merging: ClassVar[bool] = False  # it makes new tokens
    is_exact: ClassVar[bool] = True  # K says how many stay
    hides_tokens: bool = False  # training masks tokens in attention (`Restricted.soft_mask`) instead of changing them
    learns_from_regions: bool = False  # its loss asks for VisualTokens.regions, where the data has them
    native_positions: ClassVar[str] = "original"  # "packed" where the release numbers what is left without gaps
    native_rounding: ClassVar[str] = "nearest"  # "down" where the release makes int(share * N) of a share
    Options: ClassVar[type] = NoOptions

    def __init__(self, options: Any = None, *, block: BlockSpec | None = None) -> None:
        super().__init__()
        self.options = self.Options() if options is None else options
        self.block = block
        self.trained_as: tuple[Pruner, ...] = ()  # the method its weights were trained by, where that is another

    @property
    def choice_name(self) -> str:
        """How it uses scores of another method: `diverse` of `diffprune-diverse`; empty where it has its own rule."""
        return self.name.removeprefix(f"{self.deploys}-") if self.deploys else ""

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

    def deploy(self, tokens: VisualTokens, k: Counts) -> Kept:
        """The tokens the language model is given, in raster order."""
        return take(tokens, self.choose(tokens, k).keep)

    def restrict(
        self, tokens: VisualTokens, k: Int[Tensor, " B"], *, tau: float | Tensor, generator: Generators = None
    ) -> Restricted:
        """All N tokens, each weakened by its weight; one generator per image makes a row independent of its batch."""
        raise ValueError(f"method {self.name!r} has nothing to train; loss(..., hard=True) measures it")

    def start_training(self) -> None:  # most methods need nothing here
        """Make what exists for training only, under names that start with `throttle_`; called once, before a run."""

    def at_step(self, step: int) -> None:  # most methods need nothing here
        """Told before each pass of a training of which optimiser step, from 0, it is; what changes over a run follows
        from that and not from the number of passes, which another batch size or number of processes changes."""

    def average(self, num_layers: int, num_visual: int, keep: int) -> float:
        """Visual tokens a decoder layer sees, mean over all layers: the other meaning of "K tokens" in tables."""
        return keep

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


class TrainablePruner(ScoringPruner):
    """Learns its ranking by weakening tokens during training. Parameters named `throttle_*` never leave training."""

    trained: ClassVar[bool] = True
    # Whether the weights of a training step sum to K; else a penalty holds them near it.
    exact_in_training: bool = True

    @abstractmethod
    def restrict(
        self, tokens: VisualTokens, k: Int[Tensor, " B"], *, tau: float | Tensor, generator: Generators = None
    ) -> Restricted: ...


class SelfSupervisedPruner(Pruner):
    """Learns from pictures alone: neither answers nor the language model have a part in its loss."""

    trained: ClassVar[bool] = True

    def restrict(
        self, tokens: VisualTokens, k: Int[Tensor, " B"], *, tau: float | Tensor, generator: Generators = None
    ) -> Restricted:
        real = tokens.mask.float()
        return Restricted(tokens.x, real, real, own_loss=self.own_loss(tokens, k, generator=generator))

    @abstractmethod
    def own_loss(
        self, tokens: VisualTokens, k: Int[Tensor, " B"], *, generator: Generators = None
    ) -> Float[Tensor, " B"]:
        """The loss of each image; one generator per image makes a row independent of its batch."""


class MergingPruner(Pruner):
    """Makes K new tokens out of N instead of choosing K of them."""

    is_merging: ClassVar[bool] = True

    @abstractmethod
    def reduce(self, tokens: VisualTokens, k: Counts) -> Kept:
        """New tokens in place of the old ones, and the raster index each stands at."""

    def select(self, tokens: VisualTokens, k: Counts) -> Int[Tensor, "B K"]:
        return self.reduce(tokens, k).index

    def deploy(self, tokens: VisualTokens, k: Counts) -> Kept:
        kept = self.reduce(tokens, k)
        return kept.in_raster_order() if self.is_native else kept


class LayerPruner(Pruner):
    """Drops tokens between decoder layers; every layer keeps a cache of the tokens it saw."""

    place: ClassVar[str] = "inside the LLM"
    is_inside: ClassVar[bool] = True
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
        return layer_average(self.stages(num_layers, num_visual, keep), num_layers, num_visual)

    def select(self, tokens: VisualTokens, k: Counts) -> Int[Tensor, "B K"]:
        raise ValueError(
            f"{self.name} chooses inside the language model; ask with it (`generate`, `diffprune ask`), or take a "
            "method that chooses before (`diffprune methods`)"
        )

    def deploy(self, tokens: VisualTokens, k: Counts) -> Kept:
        return Kept(tokens.x, tokens.everything)


class ScoringLayerPruner(LayerPruner):
    """Ranks the visual tokens before a decoder layer and keeps the first K; the fast path can compile the ranking."""

    @abstractmethod
    def score_at(self, state: LayerState) -> Float[Tensor, "B M"]:
        """One logit for each of `state.visual`, larger is more worth keeping; padding may hold anything finite."""

    def select_at(self, state: LayerState, k: Int[Tensor, " B"]) -> Int[Tensor, "B K"]:
        return hard_topk(self.score_at(state), k, state.visual >= 0)


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

    def restrict(
        self, tokens: VisualTokens, k: Int[Tensor, " B"], *, tau: float | Tensor, generator: Generators = None
    ) -> Restricted:
        real = tokens.mask.float()
        return Restricted(tokens.x, real, real)  # whole: what is weakened is decided between the layers

    @abstractmethod
    def decide(
        self, state: LayerState, k: Int[Tensor, " B"], *, tau: float | Tensor, generator: Generators = None
    ) -> Decision | Route:
        """What a training step does at a cut; one generator per prompt makes a row independent of its batch."""


def take(tokens: VisualTokens, index: Int[Tensor, "B K"]) -> Kept:
    """The tokens at these indices, as they are."""
    return Kept(take_tokens(tokens.x, index), index)


def check_choices(options: Any, **choices: Sequence[str]) -> None:
    """Raise a `ValueError` that names the option where it has none of the values it may have."""
    for name, allowed in choices.items():
        value = getattr(options, name)
        if value not in allowed:
            raise ValueError(f"{name}={value!r:.80} is not known; give one of {', '.join(allowed)}")


def check_counts(options: Any, *names: str) -> None:
    """Raise a `ValueError` that names the option where it is a number below 1."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} is no count; give 1 or more")


def require_block(method: str, block: BlockSpec | None) -> BlockSpec:
    """The block a learned method builds on, or a `ValueError` that says how to give it."""
    if block is None:
        raise ValueError(
            f"{method} is built of the vision tower's blocks; pass block=BlockSpec.from_config(model.config)"
        )
    return block
