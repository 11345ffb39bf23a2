"""Our own loop over the decoder's layers, for methods that drop tokens inside the language model.

The stock forward has one sequence length for all layers. Here each layer sees the tokens that are left when it is
reached and keeps a cache of exactly those. Positions are the original ones throughout, so decoding goes on from the
unpruned length in every layer; a method that numbers what is left anew ("packed") goes on from its own count in each.

Real columns come first and padding behind: then being causal is all the mask a prompt needs, a batch of different
lengths included, and no layer is ever given a T x T tensor under SDPA.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from diffprune.backbones.base import IGNORE, Backbone, behind_prompt
from diffprune.inside.reader import AttentionReader, at_columns, columns_of
from diffprune.inside.state import Cut, LayerState, Prompt, Route
from diffprune.methods.base import LayerPruner
from diffprune.ops import take_tokens
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
        """The same with positions that count on from the first without a gap."""
        counted = self.valid.cumsum(-1) - 1 + self.positions[..., :1]
        return replace(self, positions=torch.where(self.valid, counted, 0))

    def segment(self, layers: range) -> Segment:
        """Layers that run on these tokens."""
        last = torch.where(self.valid, self.positions, 0).amax(-1, keepdim=True)  # [*R, B, 1]
        if last.ndim == 3:  # a picture at the end of the prompt: the token to come stands behind all three axes
            last = last.amax(0, keepdim=True).expand_as(last)
        return Segment(layers=layers, valid=self.valid, padded=not bool(self.valid.all()), next_position=last + 1)


def prefill(
    backbone: Backbone, lm: LMInputs, method: LayerPruner, k: Int[Tensor, " B"]
) -> tuple[Float[Tensor, "B L"], LayerCache]:
    """Hidden state of the last position and the caches, with visual tokens dropped where the method says.

    Where `lm` holds answers (labels), they and all behind the first of them have no say in what is kept.
    """
    decoder = backbone.language_model
    num_layers = len(decoder.layers)
    plan = plan_stages(method, num_layers, lm.visual.sum(-1), k)
    stream, prompt = start(backbone, lm)
    if any(bool((stream.visual.sum(-1) > left).any()) for left in plan.values()):
        stream = with_glimpse(stream, prompt, method)
    cache = LayerCache(keys_values=DynamicCache(), segments=[])
    entered = None
    for first, end in pairwise([*sorted({0, *plan}), num_layers]):
        if first in plan and bool((stream.visual.sum(-1) > plan[first]).any()):
            state = look(decoder, first, stream, prompt, entered, cache.keys_values)
            chosen = method.select_at(state, plan[first].minimum((state.visual >= 0).sum(-1)))
            if isinstance(chosen, Route):
                entered = stream.hidden
                stream = pass_some(decoder, first, stream, state.visual, chosen, cache)
                first += 1
            else:
                stream = leave(stream, state.visual, chosen if isinstance(chosen, Cut) else Cut(chosen), cache, method)
        segment = stream.segment(range(first, end))
        cache.segments += [segment] if segment.layers else []
        tables = decoder.rotary_emb(stream.hidden, stream.positions)
        mask = prefill_mask(decoder, stream)
        for index in segment.layers:
            entered = with_glimpse_of(stream, method, index)
            hidden = run_layer(decoder, index, entered, stream.positions, tables, mask, cache.keys_values)
            stream = replace(stream, hidden=add_after(stream, index, hidden))
    last = stream.valid.sum(-1) - 1
    return decoder.norm(stream.hidden[torch.arange(len(last), device=last.device), last]), cache


def extend(backbone: Backbone, embeds: Float[Tensor, "B S L"], cache: LayerCache) -> Float[Tensor, "B S L"]:
    """Hidden states of S more tokens, every layer with its own cache; rows may be padded behind."""
    decoder, hidden, num = backbone.language_model, embeds, embeds.shape[1]
    causal = torch.ones(num, num, dtype=torch.bool, device=embeds.device).tril()
    for segment in cache.segments:
        seen = torch.cat([segment.valid[:, None].expand(-1, num, -1), causal.expand(len(embeds), -1, -1)], dim=2)
        mask = additive(seen[:, None], hidden) if segment.padded or num > 1 else None  # [B, 1, S, T + S]
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


def answer_states(
    backbone: Backbone, lm: LMInputs, method: LayerPruner, k: Int[Tensor, " B"]
) -> tuple[Float[Tensor, "B S L"], Int[Tensor, "B S"]]:
    """What the deployed path holds before each word behind the prompts, and the words of answers (-100 elsewhere).

    The prompt is run and cut alone, and what follows goes over its caches, as when it is generated and asked on.
    """
    assert lm.labels is not None
    answered = behind_prompt(lm.labels)
    hidden, cache = prefill(backbone, replace(lm, attention_mask=lm.attention_mask * ~answered, labels=None), method, k)
    order, real = real_first(answered)
    words = lm.inputs_embeds.gather(1, order[..., None].expand(-1, -1, hidden.shape[-1]))
    states = [hidden[:, None]]
    if words.shape[1] > 1:
        states.append(extend(backbone, words[:, :-1], cache))
    return torch.cat(states, dim=1), torch.where(real, lm.labels.gather(1, order), IGNORE)


# The parts of a prefill ----------------------------------------------------------------------------------------------


def plan_stages(
    method: LayerPruner, num_layers: int, num_visual: Int[Tensor, " B"], k: Int[Tensor, " B"]
) -> dict[int, Int[Tensor, " B"]]:
    """For each layer with a cut, the visual tokens each prompt has left from there on."""
    rows = [
        method.stages(num_layers, total, min(keep, total))
        for total, keep in zip(num_visual.tolist(), k.tolist(), strict=True)
    ]
    return {layer: torch.tensor([row[layer] for row in rows], device=k.device) for layer in rows[0]}


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


def look(
    decoder: Any,
    layer: int,
    stream: Stream,
    prompt: Prompt,
    entered: Tensor | None,
    cache: DynamicCache | None,
    heard: Float[Tensor, "B T"] | None = None,
) -> LayerState:
    """What a method sees before that layer."""
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
            cache=cache,
        ),
        heard=None if heard is None else at_columns(heard, visual),
    )


def leave(
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
    stays = torch.nn.functional.pad(others, (0, 1)).scatter(1, columns, True)[:, :width]
    places = columns.sort(dim=-1).values  # the n-th token of the cut goes to the n-th place that stays
    content = torch.arange(width + 1, device=columns.device).repeat(len(columns), 1).scatter(1, places, columns)
    order, valid = real_first(stays)
    return content.gather(1, order), valid


def pass_some(
    decoder: Any,
    index: int,
    stream: Stream,
    visual: Int[Tensor, "B M"],
    route: Route,
    cache: LayerCache | None,
) -> Stream:
    """The whole sequence after a layer that only the text and some of the visual tokens go through.

    Those: x' = x + attention, then x' + weight * MLP. A visual token that skips it: weight * x. Text: as ever.
    """
    block, width = plain_layer(decoder, index), stream.valid.shape[1]
    columns = visual.gather(1, route.keep.clamp_min(0)).masked_fill(route.keep < 0, width)
    left, valid = columns_left(stream, columns)
    some = stream.take(left, valid)
    if cache is not None:  # decoding goes on from the whole sequence, over what this layer saw
        segment = stream.segment(range(index, index + 1))
        cache.segments.append(replace(segment, valid=some.valid, padded=not bool(some.valid.all())))
    weight = stream.hidden.new_ones(len(visual), width + 1)
    weight = weight.scatter(1, visual.masked_fill(visual < 0, width), route.weight.to(weight.dtype))[:, :width, None]
    attention, _ = block.self_attn(
        hidden_states=block.input_layernorm(some.hidden),
        attention_mask=prefill_mask(decoder, some),
        position_ids=some.positions if some.positions.ndim == 2 else some.positions[0],
        past_key_values=None if cache is None else cache.keys_values,
        use_cache=cache is not None,
        position_embeddings=decoder.rotary_emb(some.hidden, some.positions),
    )
    passed = some.hidden + attention
    passed = passed + take_tokens(weight, left) * block.mlp(block.post_attention_layernorm(passed))
    target = left.masked_fill(~some.valid, width)[..., None].expand_as(passed)
    whole = torch.nn.functional.pad(weight * stream.hidden, (0, 0, 0, 1)).scatter(1, target, passed)[:, :width]
    return replace(stream, hidden=add_after(stream, index, whole))


def plain_layer(decoder: Any, index: int) -> Any:
    """The layer, where it is attention and an MLP with one norm before each; else a `ValueError`."""
    block = decoder.layers[index]
    parts = {name for name, _ in block.named_children()}
    if parts != {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}:
        raise ValueError(
            f"layers of {type(block).__name__} have other parts than attention, an MLP and a norm before each "
            f"({', '.join(sorted(parts))}), so tokens cannot be weighed in them; choose a method that drops tokens"
        )
    return block


def add_after(stream: Stream, index: int, hidden: Float[Tensor, "B T L"]) -> Float[Tensor, "B T L"]:
    """What leaves a layer, with what the family adds to it there."""
    return hidden + stream.additions[index] if index < len(stream.additions) else hidden


def with_glimpse(stream: Stream, prompt: Prompt, method: LayerPruner) -> Stream:
    """The sequence with the method's own token behind each prompt, still empty, where the method has one.

    Nothing of the prompt hears it, and a cut takes it away. It stands where the first word of the answer will.
    """
    if method.glimpse(0) is None:
        return stream
    at = last_column(stream, prompt)[:, None] + 1  # [B, 1]
    columns = torch.arange(stream.valid.shape[1] + 1, device=at.device)
    order = torch.where(columns < at, columns, columns - 1)  # at its own place, that of the last prompt token
    is_own = columns == at
    wide = stream.take(order, stream.valid.gather(1, order) | is_own)
    return replace(
        wide,
        hidden=wide.hidden.masked_fill(is_own[..., None], 0.0),
        positions=wide.positions + is_own,
        visual=wide.visual & ~is_own,
        additions=tuple(addition.masked_fill(is_own[..., None], 0.0) for addition in wide.additions),
        two_way=None if wide.two_way is None else wide.two_way & ~is_own,
        glimpse=is_own,
    )


def with_glimpse_of(stream: Stream, method: LayerPruner | None, index: int) -> Float[Tensor, "B T L"]:
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


# One layer -----------------------------------------------------------------------------------------------------------


def prefill_mask(decoder: Any, stream: Stream) -> Float[Tensor, "B 1 T T"] | None:
    """What a layer is given as its mask: nothing under SDPA, where being causal is enough; else all of it."""
    if stream.two_way is None and decoder.config._attn_implementation == "sdpa":
        return None
    width = stream.valid.shape[1]
    allowed = torch.ones(width, width, dtype=torch.bool, device=stream.valid.device).tril()
    if stream.two_way is not None:
        allowed = allowed | (stream.two_way[:, :, None] & stream.two_way[:, None])
    return additive((allowed & stream.valid[:, None])[:, None], stream.hidden)


def additive(allowed: Bool[Tensor, "B 1 Q T"], like: Tensor) -> Float[Tensor, "B 1 Q T"]:
    """0 where a key is seen and the lowest number where not: SDPA and eager attention both take it."""
    mask = torch.zeros(allowed.shape, dtype=like.dtype, device=like.device)
    return mask.masked_fill_(~allowed, torch.finfo(like.dtype).min)


def run_layer(
    decoder: Any,
    index: int,
    hidden: Float[Tensor, "B T L"],
    positions: Int[Tensor, "*R B T"],
    tables: tuple[Tensor, Tensor],
    mask: Float[Tensor, "B 1 T U"] | None,
    cache: DynamicCache | None,
) -> Float[Tensor, "B T L"]:
    """One layer as it is, its keys and values put into the cache where there is one."""
    out = decoder.layers[index](
        hidden,
        attention_mask=mask,
        position_ids=positions if positions.ndim == 2 else positions[0],
        past_key_values=cache,
        use_cache=cache is not None,
        position_embeddings=tables,
    )
    return out[0] if isinstance(out, tuple) else out


# Generation ----------------------------------------------------------------------------------------------------------


def generate(
    backbone: Backbone,
    lm: LMInputs,
    method: LayerPruner,
    k: Int[Tensor, " B"],
    *,
    max_new_tokens: int = 32,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_token_id: int | list[int] | None = None,
    generator: torch.Generator | None = None,
    **unknown: Any,
) -> Int[Tensor, "B T"]:
    """New tokens, greedy or sampled, with per-layer caches; the model's own generation settings play no part here."""
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} asks for no answer; give at least 1")
    penalty = getattr(backbone.model.generation_config, "repetition_penalty", None)
    if penalty not in (None, 1.0):
        raise ValueError(
            f"the model's generation_config asks for repetition_penalty={penalty}, which {method.name!r} cannot apply; "
            "set it to 1.0 to compare methods fairly"
        )
    harmless = {"num_beams": 1, "use_cache": True, "pad_token_id": unknown.get("pad_token_id")}
    unknown = {key: value for key, value in unknown.items() if key not in harmless or harmless[key] != value}
    if unknown:
        raise ValueError(
            f"{', '.join(unknown)} cannot be given to {method.name!r}: what drops tokens inside the language model "
            "decodes greedily or by sampling; leave it out"
        )
    warpers = LogitsProcessorList()
    if do_sample:
        if temperature != 1.0:
            warpers.append(TemperatureLogitsWarper(temperature))
        if top_k:
            warpers.append(TopKLogitsWarper(top_k))
        if top_p is not None and top_p < 1.0:
            warpers.append(TopPLogitsWarper(top_p))
    if eos_token_id is None:
        eos_token_id = backbone.model.generation_config.eos_token_id
    ends = [] if eos_token_id is None else [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)
    end_ids = torch.tensor(ends, dtype=torch.long, device=lm.input_ids.device)

    hidden, cache = prefill(backbone, lm, method, k)
    done = torch.zeros(len(hidden), dtype=torch.bool, device=hidden.device)
    new: list[Tensor] = []
    embed = backbone.model.get_input_embeddings()
    while True:
        logits = backbone.model.lm_head(hidden).float()
        if do_sample:
            logits = warpers(cast(torch.LongTensor, lm.input_ids), logits)
            token = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
        else:
            token = logits.argmax(-1)
        token = torch.where(done, backbone.pad_id, token)
        new.append(token)
        done = done | torch.isin(token, end_ids)
        if len(new) == max_new_tokens or bool(done.all()):
            return torch.stack(new, dim=1)
        hidden = step(backbone, embed(token[:, None]), cache)
