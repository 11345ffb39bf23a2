"""What a call of `generate` asks for: its prompts, the arguments that go to the model, and the form of its answer.

Every argument of transformers' `generate` either does here what it does to the stock model on the whole prompt with the
dropped tokens masked, or is refused by name: none is taken and then ignored.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig

from diffprune.backbones.base import Backbone
from diffprune.backbones.features import FEATURES
from diffprune.backbones.messages import is_one_talk
from diffprune.backbones.prompts import Batch
from diffprune.ops.arguments import shown

MADE_HERE = ("inputs_embeds", "position_ids", "inputs", "decoder_input_ids")
AHEAD = "belongs to decoding that checks several tokens at once, for which a prompt with gaps is not laid out"
LOOP = "replaces the decoding loop"
IGNORED = "is ignored by transformers where the prompt is given as embeddings"
OTHER_PROMPT = "runs a second prompt, which would have no pictures"
# Arguments of `generate` that are refused, and why.
REFUSED: dict[str, str] = {
    "prefill_chunk_size": "gives other tokens with embeddings as input",
    "use_cache": "runs the prompt again without its pictures where it is off",
    "max_length": "counts the prompt's tokens, which are fewer here; give max_new_tokens",
    "min_length": "counts the prompt's tokens, which are fewer here; give min_new_tokens",
    "token_healing": "rewrites the prompt's end, which is made of embeddings here",
    "encoder_repetition_penalty": IGNORED,
    "encoder_no_repeat_ngram_size": IGNORED,
    "guidance_scale": OTHER_PROMPT,
    "negative_prompt_ids": OTHER_PROMPT,
    "negative_prompt_attention_mask": OTHER_PROMPT,
    **dict.fromkeys(
        ("custom_generate", "dola_layers", "penalty_alpha", "low_memory", "continuous_batching_config"), LOOP
    ),
    **dict.fromkeys(("constraints", "force_words_ids", "num_beam_groups", "diversity_penalty"), LOOP),
    **dict.fromkeys(
        ("assistant_model", "assistant_tokenizer", "assistant_early_exit", "prompt_lookup_num_tokens"), AHEAD
    ),
    **dict.fromkeys(("use_mtp", "speculation_type", "is_assistant", "max_matching_ngram_size"), AHEAD),
    **dict.fromkeys(("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"), AHEAD),
    **dict.fromkeys(("assistant_ensemble_weight", "assistant_lookbehind", "target_lookbehind"), AHEAD),
}
# Values that ask for nothing, beside None and transformers' own default.
NOTHING: dict[str, tuple[Any, ...]] = {
    "use_cache": (True,),
    "prefill_chunk_size": (0,),
    "encoder_repetition_penalty": (1, 1.0),
    "encoder_no_repeat_ngram_size": (0,),
    "guidance_scale": (1, 1.0),
    "penalty_alpha": (0, 0.0),
    "min_length": (0,),
    "num_beam_groups": (1,),
    "diversity_penalty": (0, 0.0),
    **dict.fromkeys(("token_healing", "low_memory", "is_assistant", "use_mtp"), (False,)),
}
# Arguments that are numbers, checked before anything runs: transformers compares them with whatever they are.
WHOLE = ("max_new_tokens", "min_new_tokens", "num_beams", "num_return_sequences", "top_k", "no_repeat_ngram_size")
NUMBERS = ("temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "length_penalty", "max_time")
SWITCHES = ("do_sample", "return_dict_in_generate", "output_scores", "output_logits")
LONGEST = 2**31 - 1  # new tokens of an answer
OF_THE_CALL = ("max_length", "min_length")  # a model's own settings of these are for other prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One call's prompts, and how its answers are given back.

    Args:
        batch: The prompts and their pictures.
        kwargs: What goes to the model's own `generate`.
        form: "text" for one prompt, "texts" for several, "ids" without or "sequences" with the prompts in front.
    """

    batch: Batch
    kwargs: dict[str, Any]
    form: str

    def answers(self, backbone: Backbone, out: Any) -> Any:
        """What the model gave, in the form that is asked for; an output object as it is."""
        if not isinstance(out, Tensor) or self.form == "ids":
            return out
        if self.form == "sequences":
            ids = self.batch.features["input_ids"]
            return torch.cat([ids.repeat_interleave(len(out) // len(ids), 0), out], dim=1)
        answers = [answer.strip() for answer in backbone.tokenizer.batch_decode(out, skip_special_tokens=True)]
        return answers[0] if self.form == "text" else answers


def read_request(
    backbone: Backbone,
    images: Any,
    text: str | Sequence[str],
    messages: Any,
    kwargs: Mapping[str, Any],
    *,
    chat: bool,
    return_ids: bool,
) -> Asked:
    """A call of `generate`, checked: a question, a conversation, or what the processor gave for a prompt."""
    kwargs = dict(kwargs)
    check_arguments(backbone.model, kwargs)
    if kwargs.get("input_ids") is not None:
        if images is not None or text or messages is not None:
            raise ValueError("input_ids is given beside images, text or messages; give the prompt once")
        form = "sequences"
        batch = backbone.read(kwargs)
        kwargs = {key: value for key, value in kwargs.items() if key not in batch.features}
    elif messages is not None:
        if text:
            raise ValueError("messages and text are both given; put the question into the messages")
        form = "text" if is_one_talk(messages) else "texts"
        batch = backbone.prepare_messages(messages, images)
    else:
        form = "text" if isinstance(text, str) else "texts"
        batch = backbone.prepare(images, text, chat=chat)
    several = kwargs.get("num_return_sequences") or 1
    if several != 1 and form in ("text", "texts") and not (return_ids or kwargs.get("return_dict_in_generate")):
        raise ValueError("num_return_sequences gives a prompt several answers; take them with return_ids=True")
    return Asked(batch=batch, kwargs=kwargs, form="ids" if return_ids else form)


def check_arguments(model: Any, kwargs: Mapping[str, Any]) -> None:
    """An error where an argument of `generate` would silently change answers, or is made by the pruned path."""
    _check_numbers(kwargs)
    for key in MADE_HERE:
        if kwargs.get(key) is not None:
            raise ValueError(f"{key} is made by the pruned path; give images and text instead")
    if beside := sorted(key for key in FEATURES & kwargs.keys() if kwargs.get("input_ids") is None):
        raise ValueError(
            f"{beside[0]} is made by the pruned path; give images and text, or all of a processor's output"
        )
    if kwargs.get("past_key_values") is not None:
        raise ValueError(
            "past_key_values is given, and it cannot be known which visual tokens such a cache was made with; a "
            "conversation that keeps its cache is vlm.chat(), or generate(messages=..., memory=Memory())"
        )
    given, usual = kwargs.get("generation_config"), GenerationConfig()
    for key, reason in REFUSED.items():
        config = given or (None if key in OF_THE_CALL else model.generation_config)
        value = kwargs[key] if key in kwargs else getattr(config, key, None)
        if value is None or value in NOTHING.get(key, ()) or (key not in kwargs and value == getattr(usual, key, None)):
            continue
        shown = value if isinstance(value, str | int | float | list) else type(value).__name__
        raise ValueError(f"{key}={shown} cannot be given: it {reason}; leave it out")


def _check_numbers(kwargs: Mapping[str, Any]) -> None:
    """An error where an argument that is a number is something else, or a length is none."""
    for key, kind, wanted in (
        *((key, Integral, "a whole number") for key in WHOLE),
        *((key, Real, "a number") for key in NUMBERS),
    ):
        value = kwargs.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, kind) or not -LONGEST <= cast(Any, value) <= LONGEST:
            raise ValueError(f"{key}={shown(value)} is not {wanted} that can be used; leave it out or give one")
        if key == "max_new_tokens" and value < 1:
            raise ValueError(f"max_new_tokens={value} leaves nothing to say; give 1 or more")
    for key in SWITCHES:
        if not isinstance(kwargs.get(key), bool | None):
            raise ValueError(f"{key}={shown(kwargs[key])} is neither True nor False; give one")
