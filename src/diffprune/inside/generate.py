"""Answers of a language model that drops tokens between its layers: greedy or sampled, over caches of its own."""

from collections.abc import Iterable
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from diffprune.backbones.base import Backbone
from diffprune.inside.loop import prefill, step
from diffprune.methods.base import LayerPruner
from diffprune.types import LMInputs


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
    eos_token_id: int | list[int] | Tensor | None = None,
    pad_token_id: int | None = None,
    generator: torch.Generator | None = None,
    streamer: Any = None,
    logits_processor: Iterable[Any] = (),
    stopping_criteria: Iterable[Any] = (),
    return_dict_in_generate: bool = False,
    output_scores: bool = False,
    output_logits: bool = False,
    **unknown: Any,
) -> Any:
    """New tokens, greedy or sampled, with per-layer caches; the model's own generation settings play no part here.

    Args:
        streamer: Is given the prompts, then each step's tokens, as by the stock `generate`.
        logits_processor, stopping_criteria: Called with the ids so far, placeholders of all visual tokens included.
        return_dict_in_generate: Give an output object, with scores and logits where they are asked for.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens} asks for no answer; give at least 1")
    penalty = getattr(backbone.model.generation_config, "repetition_penalty", None)
    if penalty not in (None, 1.0):
        raise ValueError(
            f"the model's generation_config asks for repetition_penalty={penalty}, which {method.name!r} cannot apply; "
            "set it to 1.0 to compare methods fairly"
        )
    harmless = {"num_beams": 1, "use_cache": True}
    unknown = {key: value for key, value in unknown.items() if key not in harmless or harmless[key] != value}
    if unknown:
        raise ValueError(
            f"{', '.join(unknown)} cannot be given to {method.name!r}: what drops tokens inside the language model "
            "decodes greedily or by sampling; leave it out"
        )
    warpers = LogitsProcessorList(logits_processor or ())
    if do_sample:
        if temperature != 1.0:
            warpers.append(TemperatureLogitsWarper(temperature))
        if top_k:
            warpers.append(TopKLogitsWarper(top_k))
        if top_p is not None and top_p < 1.0:
            warpers.append(TopPLogitsWarper(top_p))
    if eos_token_id is None:
        eos_token_id = backbone.model.generation_config.eos_token_id
    ends = [] if eos_token_id is None else torch.as_tensor(eos_token_id).flatten().tolist()
    pad_id = backbone.pad_id if pad_token_id is None else pad_token_id
    end_ids = torch.tensor(ends, dtype=torch.long, device=lm.input_ids.device)

    stopping = StoppingCriteriaList(stopping_criteria or ())

    hidden, cache = prefill(backbone, lm, method, k)
    done = torch.zeros(len(hidden), dtype=torch.bool, device=hidden.device)
    new: list[Tensor] = []
    logits, scores = [], []
    ids = cast(torch.LongTensor, lm.input_ids)
    embed = backbone.model.get_input_embeddings()
    if streamer is not None:
        streamer.put(ids.cpu())
    while True:
        raw = backbone.model.lm_head(hidden).float()
        score = warpers(ids, raw)
        if return_dict_in_generate:
            logits += [raw] if output_logits else []
            scores += [score] if output_scores else []
        token = score.argmax(-1)
        if do_sample:
            token = torch.multinomial(score.softmax(-1), 1, generator=generator)[:, 0]
        token = torch.where(done, pad_id, token)
        new.append(token)
        ids = cast(torch.LongTensor, torch.cat([ids, token[:, None]], dim=1))
        if streamer is not None:
            streamer.put(token.cpu())
        done = done | torch.isin(token, end_ids) | stopping(ids, cast(Any, None))
        if len(new) == max_new_tokens or bool(done.all()):
            break
        hidden = step(backbone, embed(token[:, None]), cache)
    if streamer is not None:
        streamer.end()
    sequences = torch.stack(new, dim=1)
    if not return_dict_in_generate:
        return sequences
    return GenerateDecoderOnlyOutput(
        sequences=cast(torch.LongTensor, sequences),
        scores=cast(Any, tuple(scores) if output_scores else None),
        logits=cast(Any, tuple(logits) if output_logits else None),
    )
