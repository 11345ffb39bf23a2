"""Our own loop over the decoder's layers, for methods that drop tokens inside the language model.

The stock forward has one sequence length for all layers. Here each layer sees the tokens that are left when it is
reached and keeps a cache of exactly those; positions are the original ones throughout, so decoding goes on from the
unpruned length in every layer.
"""

from dataclasses import dataclass
from typing import Any

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

from diffprune.backbones.base import Backbone, left_pad_order, pad_rows
from diffprune.methods.base import LayerPruner, LayerState
from diffprune.types import LMInputs


@dataclass(slots=True)
class LayerCache:
    """Keys and values per layer, and which of their columns are real: layers after a cut are shorter."""

    keys_values: DynamicCache
    valid: list[Bool[Tensor, "B T"]]
    next_position: Int[Tensor, "*R B 1"]

    def lengths(self) -> list[int]:
        """Cached tokens of each layer."""
        return [mask.shape[1] for mask in self.valid]


def prefill(
    backbone: Backbone, lm: LMInputs, method: LayerPruner, k: Int[Tensor, " B"]
) -> tuple[Float[Tensor, "B L"], LayerCache]:
    """Hidden state of the last position and the caches, with visual tokens dropped where the method says."""
    decoder = backbone.language_model
    additions = backbone.layer_additions(lm)
    hidden, positions, valid, visual = lm.inputs_embeds, lm.position_ids, lm.attention_mask.bool(), lm.visual
    two_way = backbone.two_way(lm)
    cache = LayerCache(keys_values=DynamicCache(), valid=[], next_position=positions[..., -1:] + 1)
    stages = method.stages(len(decoder.layers))
    total = visual.sum(-1)
    for index in range(len(decoder.layers)):
        if index in stages:
            target = total - ((total - k.clamp(max=total)).double() * stages[index]).round().long()
            columns = pad_rows([row.nonzero()[:, 0] for row in visual], -1)
            state = LayerState(layer=index, hidden=hidden, attention_mask=valid, visual=columns)
            keep = method.select_at(state, target)
            chosen = torch.zeros_like(columns, dtype=torch.bool)
            chosen.scatter_(1, keep.clamp_min(0), keep >= 0)
            # A padded entry of `keep` points at column 0; put that one back to what the real entries say.
            chosen[:, :1] = (keep == 0).any(-1, keepdim=True)
            dropped = torch.zeros_like(valid)
            for row in range(len(columns)):
                dropped[row, columns[row][(columns[row] >= 0) & ~chosen[row]]] = True
            order, valid = left_pad_order(valid & ~dropped)
            features = order[..., None].expand(-1, -1, hidden.shape[-1])
            hidden = hidden.gather(1, features)
            additions = [addition.gather(1, features) for addition in additions]
            positions = positions.gather(-1, order.expand(*positions.shape[:-2], *order.shape))
            visual = visual.gather(1, order) & valid
            two_way = None if two_way is None else two_way.gather(1, order)
        cache.valid.append(valid)
        hidden = _layer(decoder, index, hidden, positions, cache, two_way)
        if index < len(additions):
            hidden = hidden + additions[index]
    return decoder.norm(hidden)[:, -1], cache


def step(backbone: Backbone, embeds: Float[Tensor, "B 1 L"], cache: LayerCache) -> Float[Tensor, "B L"]:
    """Hidden state after one more token, every layer with its own cache."""
    decoder, hidden = backbone.language_model, embeds
    for index in range(len(decoder.layers)):
        cache.valid[index] = torch.cat([cache.valid[index], cache.valid[index].new_ones(len(embeds), 1)], dim=1)
        hidden = _layer(decoder, index, hidden, cache.next_position, cache)
    cache.next_position = cache.next_position + 1
    return decoder.norm(hidden)[:, -1]


def _layer(
    decoder: Any, index: int, hidden: Tensor, positions: Tensor, cache: LayerCache, two_way: Tensor | None = None
) -> Tensor:
    valid = cache.valid[index]
    num_queries, num_keys = hidden.shape[1], valid.shape[1]
    causal = torch.ones(num_queries, num_keys, dtype=torch.bool, device=hidden.device).tril(num_keys - num_queries)
    if two_way is not None:
        causal = causal | (two_way[:, None, :, None] & two_way[:, None, None, :])
    allowed = causal & valid[:, None, None, :]
    # An additive mask serves SDPA and eager alike; rows of padding see themselves, so that nothing is 0 / 0.
    own = torch.eye(num_queries, num_keys, dtype=torch.bool, device=hidden.device).roll(num_keys - num_queries, 1)
    mask = torch.zeros(allowed.shape, dtype=hidden.dtype, device=hidden.device)
    mask.masked_fill_(~(allowed | own), torch.finfo(hidden.dtype).min)
    out = decoder.layers[index](
        hidden,
        attention_mask=mask,
        position_ids=positions if positions.ndim == 2 else positions[0],
        past_key_values=cache.keys_values,
        use_cache=True,
        position_embeddings=decoder.rotary_emb(hidden, positions),
    )
    return out[0] if isinstance(out, tuple) else out


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
) -> Int[Tensor, "B T"]:
    """New tokens, greedy or sampled, with per-layer caches."""
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
            logits = warpers(lm.input_ids, logits)
            token = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
        else:
            token = logits.argmax(-1)
        token = torch.where(done, backbone.pad_id, token)
        new.append(token)
        done = done | torch.isin(token, end_ids)
        if len(new) == max_new_tokens or bool(done.all()):
            return torch.stack(new, dim=1)
        hidden = step(backbone, embed(token[:, None]), cache)
