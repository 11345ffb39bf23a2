"""What runs the language model: as it is, or with tokens dropped between its layers. Chosen once, for one method."""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from diffprune.backbones.base import Backbone
from diffprune.backbones.splice import real_columns_first
from diffprune.backbones.windows import most_new_tokens, refuse_beyond_window, window_of
from diffprune.inside.generate import generate
from diffprune.inside.layers import run_layer
from diffprune.inside.loop import dropped_states, masked_states
from diffprune.losses import AnswerStates, add, cross_entropy, distance_from_full, share_of
from diffprune.memory import Memory
from diffprune.methods.base import Kept, LayerPruner, Pruner, Restricted, TrainableLayerPruner
from diffprune.ops.noise import Generators
from diffprune.types import LMInputs


class Decoder(ABC):
    """A language model over the sequence that `PrunedVLM.splice` made."""

    def __init__(self, backbone: Backbone) -> None:
        self.backbone = backbone

    @abstractmethod
    def generate(
        self, lm: LMInputs, k: Int[Tensor, " B"] | None, *, memory: Memory | None = None, **kwargs: Any
    ) -> Any:
        """New tokens, as many rows as there are answers; an output object that holds them where one is asked for.

        Args:
            k: Visual tokens each prompt is to keep; None where there is no picture.
            memory: Of the conversation whose next turn this is.
            kwargs: As the model's own `generate` takes them.
        """

    @abstractmethod
    def states(
        self, lm: LMInputs, k: Int[Tensor, " B"] | None, *, tau: float | Tensor | None, generator: Generators
    ) -> AnswerStates:
        """Hidden states before each answer word; `tau` is None on the deployed path."""

    def loss(
        self,
        lm: LMInputs,
        k: Int[Tensor, " B"] | None,
        kept: Kept | Restricted | None,
        *,
        tau: float | Tensor | None = None,
        generator: Generators = None,
        num_targets: int | Tensor | None = None,
        num_prompts: int | None = None,
        whole: LMInputs | None = None,
    ) -> tuple[Float[Tensor, ""], Tensor | None]:
        """The loss of the answers, and the weights the visual tokens had in it (None on the deployed path).

        Args:
            kept: What `lm` was made of, a penalty by prompts; None where there is no picture.
            num_targets: What the summed loss is divided by; default: the batch's own answer tokens.
            num_prompts: Of which this batch's are a part; a method's penalty, a mean over prompts, weighs by that part.
            whole: The sequence of the unpruned model, where some tokens of `lm` were taken out.
        """
        if lm.labels is None:
            raise ValueError("the batch has no answers to learn from; make it with prepare(images, text, answers)")
        head = self.backbone.model.lm_head
        states = self.states(lm, k, tau=tau, generator=generator)
        loss = cross_entropy(head, states, num_targets=num_targets)
        penalty, alpha = states.penalty, states.alpha
        if kept is not None:
            penalty, alpha = add(kept.penalty, penalty), kept.alpha if alpha is None else alpha
            if kept.distillation is not None:
                with torch.no_grad():
                    full = masked_states(self.backbone, replace(whole or lm, soft_mask=None))
                said, moved = distance_from_full(head, states, full, kept.distillation, num_targets=num_targets)
                loss, penalty = loss + said, add(penalty, moved)
        if penalty is not None:
            loss = loss + share_of(penalty, lm.labels, num_targets, num_prompts)
        return loss, alpha


class StockDecoder(Decoder):
    """The model's own forward and `generate`; in training its layers one by one.

    Attributes:
        multiple: Sequences are filled up to one of these lengths in training, so that there are few of them.
    """

    multiple = 1

    def generate(
        self, lm: LMInputs, k: Int[Tensor, " B"] | None, *, memory: Memory | None = None, **kwargs: Any
    ) -> Any:
        new_tokens = most_new_tokens(self.backbone.model, lm.input_ids.shape[1], kwargs)
        refuse_beyond_window(self.backbone.language_model.config, lm, new_tokens=new_tokens)
        return self.backbone.generate(lm, **kwargs) if memory is None else memory.generate(self.backbone, lm, **kwargs)

    def states(
        self,
        lm: LMInputs,
        k: Int[Tensor, " B"] | None = None,
        *,
        tau: float | Tensor | None = None,
        generator: Generators = None,
    ) -> AnswerStates:
        if lm.soft_mask is not None:
            return masked_states(self.backbone, lm)._replace(alpha=None)  # the method's own weights are the mask
        causal = self.backbone.two_way(lm) is None
        if causal:
            lm = real_columns_first(lm)
        assert lm.labels is not None
        is_plain = causal and runs_layer_by_layer(self.backbone.language_model)
        hidden = causal_states(self.backbone, lm, self.multiple) if is_plain else self.backbone.last_states(lm)
        return AnswerStates(hidden[:, :-1], lm.labels[:, 1:], num_targets=lm.num_targets)


def runs_layer_by_layer(decoder: Any) -> bool:
    """Whether a causal pass needs nothing but the layers: no window, no mask, no layers split over processes."""
    return (
        decoder.config._attn_implementation == "sdpa"
        and window_of(decoder.config) is None
        and not hasattr(decoder, "unshard")  # as fully_shard makes it
    )


def causal_states(backbone: Backbone, lm: LMInputs, multiple: int = 1) -> Float[Tensor, "B T L"]:
    """Last hidden states of rows with their padding behind, as `backbone.hidden` gives them.

    The stock forward first asks the device whether its mask hides anything; here that is known.

    Args:
        multiple: Of which the length is made one, with columns that nothing before them attends to.
    """
    decoder, width = backbone.language_model, lm.inputs_embeds.shape[1]
    more = -width % multiple
    hidden, positions = F.pad(lm.inputs_embeds, (0, 0, 0, more)), F.pad(lm.position_ids, (0, more))
    additions = [F.pad(addition, (0, 0, 0, more)) for addition in backbone.layer_additions(lm)]
    tables = decoder.rotary_emb(hidden, positions)
    for index in range(len(decoder.layers)):
        hidden = run_layer(decoder, index, hidden, positions, tables, None)
        hidden = hidden + additions[index] if index < len(additions) else hidden
    return decoder.norm(hidden)[:, :width]


class LayerDecoder(Decoder):
    """Layers one by one, with a method between them; prompts without a picture go through the model's own forward."""

    def __init__(self, backbone: Backbone, method: LayerPruner) -> None:
        super().__init__(backbone)
        self.method = method
        self.stock = StockDecoder(backbone)

    def generate(
        self, lm: LMInputs, k: Int[Tensor, " B"] | None, *, memory: Memory | None = None, **kwargs: Any
    ) -> Any:
        if k is None:
            return self.stock.generate(lm, k, memory=memory, **kwargs)
        if memory is not None:
            memory.forget_cache()  # the method looks at the question, so each turn is cut anew
        new_tokens = most_new_tokens(self.backbone.model, lm.input_ids.shape[1], {"max_new_tokens": 32, **kwargs})
        refuse_beyond_window(self.backbone.language_model.config, lm, new_tokens=new_tokens, in_layers=True)
        return generate(self.backbone, lm, self.method, k, **kwargs)

    def states(
        self, lm: LMInputs, k: Int[Tensor, " B"] | None, *, tau: float | Tensor | None, generator: Generators
    ) -> AnswerStates:
        if k is None:
            return self.stock.states(lm)
        if tau is None:
            return dropped_states(self.backbone, lm, self.method, k)
        assert isinstance(self.method, TrainableLayerPruner)
        return masked_states(self.backbone, lm, self.method, k, tau=tau, generator=generator)


def make_decoder(backbone: Backbone, method: Pruner) -> Decoder:
    """The decoder that goes with a method."""
    return LayerDecoder(backbone, method) if isinstance(method, LayerPruner) else StockDecoder(backbone)
