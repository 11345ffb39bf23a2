"""The one loop over the decoder's layers, for methods that drop tokens inside the language model.

The stock forward has one sequence length for all layers. Here each layer sees the tokens that are left when it is
reached and keeps a cache of exactly those. Positions are the original ones throughout, so decoding goes on from the
unpruned length in every layer; a method that numbers what is left anew ("packed") goes on from its own count in each.

In training nothing is dropped: what a method would drop gets a soft mask, with which the other tokens attend to it less
or not at all.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache

from diffprune.backbones.base import Backbone
from diffprune.backbones.prompts import IGNORE, behind_prompt
from diffprune.backbones.windows import refuse_beyond_window
from diffprune.inside.layers import add_after, additive_mask, attention_mask, run_layer, run_routed
from diffprune.inside.reader import AttentionReader, at_columns, columns_of
from diffprune.inside.state import Cut, Decision, LayerState, Prompt, Route
from diffprune.inside.stream import (
    LayerCache,
    Stream,
    drop,
    entering,
    last_column,
    real_first,
    start,
    with_glimpse,
)
from diffprune.losses import AnswerStates, add
from diffprune.methods.base import LayerPruner, TrainableLayerPruner
from diffprune.ops.noise import Generators
from diffprune.types import LMInputs

Ask = Callable[[LayerState, Int[Tensor, " B"]], Int[Tensor, "B K"] | Cut | Route | Decision]


class LayersOutput(NamedTuple):
    """The sequence behind the last layer.

    Args:
        stream: Its columns, hidden states before the final norm.
        soft_mask: How much the others attend to each column in the end; None where nothing was masked.
        penalty: Of each prompt, summed over the method's decisions.
    """

    stream: Stream
    soft_mask: Float[Tensor, "B T"] | None
    penalty: Float[Tensor, " B"] | None


def run_layers(
    backbone: Backbone,
    lm: LMInputs,
    method: LayerPruner | None = None,
    k: Int[Tensor, " B"] | None = None,
    *,
    ask: Ask | None = None,
    cache: LayerCache | None = None,
) -> LayersOutput:
    """Every layer over the tokens that are left for it.

    Args:
        method: Says before which layers it is asked; none: `lm.soft_mask` alone holds.
        k: Visual tokens that each prompt is to keep.
        ask: What the method does at a cut: drop (its `select_at`) or decide on soft masks (its `decide`).
        cache: Filled with each layer's keys and values.
    """
    decoder = backbone.language_model
    refuse_beyond_window(decoder.config, lm, in_layers=True)
    num_layers = len(decoder.layers)
    stream, prompt = start(backbone, lm)
    plan: dict[int, Int[Tensor, " B"]] = {}
    if method is not None and k is not None:
        plan = plan_stages(method, num_layers, lm.visual.sum(-1), k)
        if any(has_more(stream, left) for left in plan.values()):
            loses = torch.stack([stream.visual.sum(-1) > left for left in plan.values()]).any(0)
            stream = with_glimpse(stream, prompt, method, loses)
    soft_mask = None if lm.soft_mask is None else lm.soft_mask.float().gather(1, stream.source)
    tables: Any = None  # rotary tables and mask are made anew where the sequence is another
    mask, is_new = None, True
    entered, penalty = None, None
    for first, end in pairwise([*sorted({0, *plan}), num_layers]):
        if ask is not None and first in plan and has_more(stream, plan[first]):
            state = look(decoder, first, stream, prompt, entered, cache, soft_mask)
            count = (state.visual >= 0).sum(-1)
            answer = ask(state, plan[first].minimum(count))
            if isinstance(answer, Route):
                entered = stream.hidden
                stream = run_routed(decoder, first, stream, state.visual, answer, cache)
                first += 1
            elif isinstance(answer, Decision):
                loses = plan[first] < count  # a prompt that may keep all its tokens loses none, and pays for none
                weights = torch.where(loses[:, None], answer.soft_mask, 1.0)
                soft_mask = multiply_at(all_ones(stream) if soft_mask is None else soft_mask, state.visual, weights)
                paid = None if answer.penalty is None else answer.penalty.where(loses, 0.0)
                penalty = add(penalty, paid)
                is_new = True
            else:
                cut = answer if isinstance(answer, Cut) else Cut(answer)
                stream = drop(stream, state.visual, cut, cache, method)
                is_new = True
        if is_new:
            tables = decoder.rotary_emb(stream.hidden, stream.positions)
            mask, is_new = attention_mask(decoder, stream, soft_mask), False
        if cache is not None and first < end:
            cache.segments.append(stream.segment(range(first, end)))
        for index in range(first, end):
            entered = entering(stream, method, index)
            keys_values = None if cache is None else cache.keys_values
            hidden = run_layer(decoder, index, entered, stream.positions, tables, mask, keys_values)
            stream = replace(stream, hidden=add_after(stream, index, hidden))
    return LayersOutput(stream, soft_mask, penalty)


def prefill(
    backbone: Backbone, lm: LMInputs, method: LayerPruner, k: Int[Tensor, " B"]
) -> tuple[Float[Tensor, "B L"], LayerCache]:
    """Hidden state of the last position and the caches, with visual tokens dropped where the method says.

    Where `lm` holds answers (labels), they and all behind the first of them have no say in what is kept.
    """
    cache = LayerCache(keys_values=DynamicCache(), segments=[])
    stream = run_layers(backbone, lm, method, k, ask=method.select_at, cache=cache).stream
    last = stream.valid.sum(-1) - 1
    hidden = stream.hidden[torch.arange(len(last), device=last.device), last]
    return backbone.language_model.norm(hidden), cache


def extend(backbone: Backbone, embeds: Float[Tensor, "B S L"], cache: LayerCache) -> Float[Tensor, "B S L"]:
    """Hidden states of S more tokens, every layer with its own cache; rows may be padded behind."""
    decoder, hidden, num = backbone.language_model, embeds, embeds.shape[1]
    causal = torch.ones(num, num, dtype=torch.bool, device=embeds.device).tril()
    for segment in cache.segments:
        seen = torch.cat([segment.valid[:, None].expand(-1, num, -1), causal.expand(len(embeds), -1, -1)], dim=2)
        mask = additive_mask(seen[:, None], hidden) if segment.padded or num > 1 else None  # [B, 1, S, T + S]
        positions = segment.next_position + torch.arange(num, device=embeds.device)
        tables = decoder.rotary_emb(hidden, positions)
        for index in segment.layers:
            hidden = run_layer(decoder, index, hidden, positions, tables, mask, cache.keys_values)
        segment.valid = torch.cat([segment.valid, segment.valid.new_ones(len(embeds), num)], dim=1)
        segment.next_position = segment.next_position + num
    return decoder.norm(hidden)


def step(backbone: Backbone, embeds: Float[Tensor, "B 1 L"], cache: LayerCache) -> Float[Tensor, "B L"]:
    """Hidden state after one more token."""
    return extend(backbone, embeds, cache)[:, -1]


def dropped_states(backbone: Backbone, lm: LMInputs, method: LayerPruner, k: Int[Tensor, " B"]) -> AnswerStates:
    """What the deployed path holds before each word behind the prompts, and the words of answers.

    The prompt is run and cut alone, and what follows goes over its caches, as when it is generated and asked on.
    """
    assert lm.labels is not None
    refuse_beyond_window(backbone.language_model.config, lm, in_layers=True)
    answered = behind_prompt(lm.labels)
    hidden, cache = prefill(backbone, replace(lm, attention_mask=lm.attention_mask * ~answered, labels=None), method, k)
    order, real = real_first(answered)
    words = lm.inputs_embeds.gather(1, order[..., None].expand(-1, -1, hidden.shape[-1]))
    states = [hidden[:, None]]
    if words.shape[1] > 1:
        states.append(extend(backbone, words[:, :-1], cache))
    return AnswerStates(torch.cat(states, dim=1), torch.where(real, lm.labels.gather(1, order), IGNORE))


def masked_states(
    backbone: Backbone,
    lm: LMInputs,
    method: TrainableLayerPruner | None = None,
    k: Int[Tensor, " B"] | None = None,
    *,
    tau: float | Tensor = 1.0,
    generator: Generators = None,
) -> AnswerStates:
    """The language model over prompts and answers in training, with soft masks of `lm` or of the method's decisions."""
    assert lm.labels is not None
    ask = None if method is None else partial(method.decide, tau=tau, generator=generator)
    stream, soft_mask, penalty = run_layers(backbone, lm, method, k, ask=ask)
    soft_mask = all_ones(stream) if soft_mask is None else soft_mask
    following = functional.pad(lm.labels[:, 1:], (0, 1), value=IGNORE)  # what follows each column of `lm`
    silent = ~stream.valid if stream.glimpse is None else ~stream.valid | stream.glimpse
    return AnswerStates(
        hidden=backbone.language_model.norm(stream.hidden),
        targets=following.gather(1, stream.source).masked_fill(silent, IGNORE),
        kept=stream.visual & (soft_mask > 0.5),
        tokens=None if lm.origin is None else lm.origin.index.gather(1, stream.source).masked_fill(~stream.visual, -1),
        alpha=soft_mask.detach().masked_fill(~stream.visual, 0.0),
        penalty=penalty,
    )


# The parts -----------------------------------------------------------------------------------------------------------


def plan_stages(
    method: LayerPruner, num_layers: int, num_visual: Int[Tensor, " B"], k: Int[Tensor, " B"]
) -> dict[int, Int[Tensor, " B"]]:
    """For each layer with a cut, the visual tokens each prompt has left from there on."""
    rows = [
        method.stages(num_layers, total, min(keep, total))
        for total, keep in zip(num_visual.tolist(), k.tolist(), strict=True)
    ]
    return {layer: torch.tensor([row[layer] for row in rows], device=k.device) for layer in rows[0]}


def has_more(stream: Stream, left: Int[Tensor, " B"]) -> bool:
    """Whether any prompt holds more visual tokens than it may."""
    return bool((stream.visual.sum(-1) > left).any())


def look(
    decoder: Any,
    layer: int,
    stream: Stream,
    prompt: Prompt,
    entered: Tensor | None,
    cache: LayerCache | None = None,
    soft_mask: Float[Tensor, "B T"] | None = None,
) -> LayerState:
    """What a method sees before that layer; `entered` is what entered the one that just ran."""
    visual = columns_of(stream.visual)
    return LayerState(
        layer=layer,
        hidden=stream.hidden,
        attention_mask=stream.valid,
        visual=visual,
        last=last_column(stream, prompt),
        source=stream.source,
        prompt=prompt,
        reader=AttentionReader(
            decoder=decoder,
            layer=layer,
            entered=entered,
            hidden=stream.hidden,
            tables=decoder.rotary_emb(stream.hidden, stream.positions),
            valid=stream.valid,
            two_way=stream.two_way,
            cache=None if cache is None else cache.keys_values,
        ),
        soft_mask=None if soft_mask is None else at_columns(soft_mask, visual),
    )


def all_ones(stream: Stream) -> Float[Tensor, "B T"]:
    """A soft mask that hides nothing."""
    return stream.hidden.new_ones(stream.valid.shape, dtype=torch.float32)


def multiply_at(
    values: Float[Tensor, "B T"], columns: Int[Tensor, "B M"], factors: Float[Tensor, "B M"]
) -> Float[Tensor, "B T"]:
    """The values, those at the columns (-1: none) multiplied by their factors."""
    width = values.shape[1]
    spread = values.new_ones(len(values), width + 1)
    spread = spread.scatter(1, columns.masked_fill(columns < 0, width), factors.to(values.dtype))
    return values * spread[:, :width]
