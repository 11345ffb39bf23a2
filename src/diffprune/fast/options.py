"""What may be asked of `compile()`, and of `generate()` on the fast path."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Real
from types import NoneType
from typing import Any

import torch

from diffprune.fast.precision import PRECISIONS


class NotCompiled(ValueError):
    """A request outside what was compiled; the reference path answers it."""


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """Options of `compile()`.

    Args:
        keep: One budget or several to compile for; default: the model's own.
        batch_sizes: Rows of a prefill; the next larger size is used.
        text_buckets: Text tokens beside the visual ones; the next larger number is used.
        image_sizes: (width, height) of pictures, for families whose number of tokens depends on it.
        max_new_tokens: Room for answers in the cache.
        fuse: Make private copies of weights in a better layout.
        compile_layers: Use `torch.compile` on a GPU.
        autotune: Let it try more kernels for tower and scorer.
        precision: Of the decoder's linear maps: "model" (as they are), or "fp8" on cards that have such products.
        max_logit_error: How far logits in fewer bits may be off (see `CompileReport`); beyond it "model" is used.
        on_demand: Shapes (picture sizes, budgets, buckets) that may be made on first use, beside those named.
        share: The `FastPath` of another method around the same base model, whose weights and compiled code are used.
    """

    keep: int | float | Sequence[int | float] | None = None
    batch_sizes: Sequence[int] = (1,)
    text_buckets: Sequence[int] = (64, 128)
    image_sizes: Sequence[tuple[int, int]] | None = None
    max_new_tokens: int = 64
    fuse: bool = True
    compile_layers: bool = True
    autotune: bool = False
    precision: str = "model"
    max_logit_error: float = 0.5  # beyond that it is no rounding
    on_demand: int = 8
    share: Any = None


@dataclass(frozen=True, kw_only=True)
class CompileReport:
    """What `compile()` did.

    Args:
        seconds: Of each part.
        extra_bytes: Memory it holds beyond the model: private copies of weights, the static cache, and on a GPU what
            the allocator holds more than before (graphs and buffers included).
        buckets: (batch, length) of every prefill.
        captured: CUDA graphs were made.
        precision: Of the decoder's linear maps: the model's, or "fp8".
        logit_error: Of logits in fewer bits: their difference from the model's own, relative to these; else None.
    """

    seconds: dict[str, float]
    extra_bytes: dict[str, int]
    buckets: tuple[tuple[int, int], ...]
    captured: bool
    precision: str = ""
    logit_error: float | None = None


def read_options(given: dict[str, Any]) -> CompileOptions:
    """The options by name; a `ValueError` names one that is not known or a value that is no size."""
    known = [option.name for option in fields(CompileOptions)]
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"compile() has no option {name!r}; it takes {', '.join(known)}")
        if name in LISTS and not isinstance(value, SINGLE.get(name, ())):
            check_list(name, value)
        if name == "max_new_tokens":
            check_positive(name, value)
        if name == "precision" and value not in PRECISIONS:
            raise ValueError(f"precision={value!r} is not known; give {' or '.join(map(repr, PRECISIONS))}")
        if name == "max_logit_error" and (
            isinstance(value, bool) or not isinstance(value, int | float) or not value > 0
        ):
            raise ValueError(f"max_logit_error={value!r} is no number above 0; give one, as 0.5")
        if name == "on_demand" and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
            raise ValueError(f"on_demand={value!r} is no number of shapes; give 0 or more")
    return CompileOptions(**given)


# Options that are lists, and how each is written.
LISTS = {
    "keep": "keep=64 or keep=(64, 128)",
    "batch_sizes": "batch_sizes=(1, 8)",
    "text_buckets": "text_buckets=(64, 128)",
    "image_sizes": "image_sizes=[(336, 336)], each (width, height)",
}
SINGLE: dict[str, tuple[type, ...]] = {"keep": (NoneType, Real), "image_sizes": (NoneType,)}  # what need be no list


def check_list(name: str, value: object) -> None:
    """A `ValueError` about an option's value that is no list, an empty one, or holds what is no size."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValueError(f"{name}={value!r} is no list; write it as {LISTS[name]}")
    if not value:
        raise ValueError(f"{name}={value!r} names nothing; give at least one, as in {LISTS[name]}")
    for item in value:
        if name in ("batch_sizes", "text_buckets"):
            check_positive(name, item)
        is_pair = isinstance(item, Sequence) and len(item) == 2 and all(isinstance(side, int) for side in item)
        if name == "image_sizes" and not (is_pair and min(item) > 0):
            raise ValueError(f"{name}={value!r} holds {item!r}, which is no size; write it as {LISTS[name]}")


def check_positive(name: str, value: object) -> None:
    """A `ValueError` about a value that is no whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} holds {value!r}; give whole numbers of at least 1")


# What in a generation config leaves greedy decoding as it is; None everywhere means not set.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "do_sample": (False,),
    "num_beams": (1,),
    "num_return_sequences": (1,),
    "return_dict_in_generate": (False,),
    "repetition_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "guidance_scale": (1.0,),
    "bad_words_ids": (),
    "suppress_tokens": (),
    "begin_suppress_tokens": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "sequence_bias": (),
    "stop_strings": (),
    "max_time": (),
    "exponential_decay_length_penalty": (),
    "watermarking_config": (),
    "prompt_lookup_num_tokens": (),
    "constraints": (),
    "force_words_ids": (),
}
WITHOUT_EFFECT = frozenset({"temperature", "top_k", "top_p", "min_p", "typical_p", "use_cache"})  # on a greedy choice
TAKEN = frozenset({"max_new_tokens", "eos_token_id", "pad_token_id"})


def greedy_settings(config: Any, kwargs: dict[str, Any], *, but: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Arguments of `FastPath.generate` for those of the model's own; `NotCompiled` where not greedy.

    Args:
        but: Settings of the config that are not looked at.
    """
    for name in sorted(kwargs.keys() - NEUTRAL.keys() - WITHOUT_EFFECT - TAKEN):
        raise NotCompiled(f"{name} is not for it")
    for name, neutral in NEUTRAL.items():
        value = kwargs.get(name, getattr(config, name, None))
        if name not in but and value is not None and value not in neutral:
            raise NotCompiled(f"{name}={value} asks for more than the likeliest next token")
    if kwargs.get("max_new_tokens") is None:
        raise NotCompiled("max_new_tokens is not given")
    if "pad_token_id" in kwargs and kwargs["pad_token_id"] is None:
        raise NotCompiled("pad_token_id=None leaves it to transformers to find one")
    ends = kwargs.get("eos_token_id", config.eos_token_id)
    return {
        "max_new_tokens": kwargs["max_new_tokens"],
        "ends": [] if ends is None else torch.as_tensor(ends).flatten().tolist(),
        "pad_id": kwargs.get("pad_token_id"),
    }


# What transformers' own processors and criteria do with a step's scores, whatever computed these.
STEERING = frozenset(
    {
        *("do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff"),
        *("repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "sequence_bias", "renormalize_logits"),
        *("suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"),
        *("min_length", "min_new_tokens", "exponential_decay_length_penalty", "watermarking_config"),
        *("stop_strings", "tokenizer", "max_time", "streamer", "remove_invalid_values"),
        *("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn"),
    }
)


def read_decoding(config: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `FastPath.generate` for those of the model's own; `NotCompiled` where it cannot do as they say.

    Args:
        config: The model's generation config.
        kwargs: Of one call of `generate`.
    """
    given = {name: value for name, value in kwargs.items() if value is not None or name in TAKEN}
    streamer = given.pop("streamer", None)
    try:
        return {**greedy_settings(config, given), "streamer": streamer}
    except NotCompiled:
        looked_at = {key: value for key, value in given.items() if key not in STEERING}
        greedy_settings(
            config, looked_at, but=STEERING - {"stop_strings"}
        )  # which only a call can name a tokenizer for
    return {"max_new_tokens": given["max_new_tokens"], "steering": kwargs}
