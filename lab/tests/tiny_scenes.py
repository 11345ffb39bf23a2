"""A reference model of the scenes world in miniature: 36 tokens, random weights, the real tokenizer and processor."""

from dataclasses import replace
from functools import cache
from typing import Any

import torch

from diffprune.model import PrunedVLM
from diffprune_lab.scenes import reference
from tests import tiny

SPEC = reference.ReferenceSpec(
    patch=32,
    vision_width=32,
    vision_blocks=2,
    vision_hidden=32,
    text_width=32,
    text_layers=2,
    text_hidden=32,
    head_width=16,
)
NUM_VISUAL = SPEC.grid**2
# For what looks at the feature layer, the last but one: a block before it and one behind, 8 x 8 tokens.
THREE_BLOCKS = replace(SPEC, patch=24, vision_blocks=3, vision_hidden=48, text_hidden=48)


@cache
def build() -> tuple[Any, Any]:
    """(model, processor), built once per test process; weights are widened so that differences show."""
    tokenizer = reference.build_tokenizer()
    with torch.random.fork_rng(devices=[]):  # so that a test draws the same whether or not it is the first to build
        model = reference.build_model(SPEC, tokenizer).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(3.0)
    images = reference.build_processor("scenes-nano", tokenizer)
    images.patch_size = SPEC.patch
    return model, images


def pruned(method: Any = "full", keep: int | float = 1.0, **options: Any) -> PrunedVLM:
    """The tiny model with a method around it."""
    return PrunedVLM(*build(), method=method, keep=keep, **options)


def say_always_(model: Any, tokenizer: Any, word: str) -> None:
    """Makes a model look at nothing: after any prompt it says the word, then ends."""
    (said,) = tokenizer(f" {word}", add_special_tokens=False)["input_ids"]
    tiny.say_always_(model, said, tokenizer.eos_token_id)


def always_says(word: str) -> tuple[Any, Any]:
    """A model that looks at nothing: after any prompt it says the word, then ends."""
    tokenizer = reference.build_tokenizer()
    model = reference.build_model(SPEC, tokenizer).eval()
    say_always_(model, tokenizer, word)
    return model, build()[1]
