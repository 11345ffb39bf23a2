"""Tiny random models of the real Hugging Face classes with their real processors, one file per family.

Each file has `build() -> (model, processor)`; the seed is fixed, weights are widened so that differences show.
"""

import copy
import importlib
from functools import cache
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import PreTrainedTokenizerFast

from diffprune.backbones._presets import byte_tokenizer

WIDTH, LAYERS, HEADS, MLP = 64, 3, 4, 128
SIDE, PATCH = 56, 14  # of the pictures that towers with one fixed size take
__all__ = ["byte_tokenizer"]


@cache
def build(family: str) -> tuple[Any, Any]:
    """(model, processor) of a family, built once per test process."""
    with torch.random.fork_rng(devices=[]):  # so that a test draws the same whether or not it is the first to build
        torch.manual_seed(0)
        model, processor = importlib.import_module(f"tests.tiny.{family}").build()
    return finish(model, processor), processor


def vision_config(**options: Any) -> dict[str, Any]:
    """A CLIP-like tower of three layers over 4 x 4 patches."""
    return dict(
        hidden_size=WIDTH,
        intermediate_size=MLP,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        image_size=SIDE,
        patch_size=PATCH,
        **options,
    )


def text_config(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """A LLaMA-like decoder of three layers."""
    return dict(
        vocab_size=len(tokenizer),
        hidden_size=WIDTH,
        intermediate_size=MLP,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def chat_template(image: str) -> str:
    """role: content, with the family's placeholder for an image."""
    return (
        "{% for m in messages %}{{ m['role'] }}: {% if m['content'] is string %}{{ m['content'] }}{% else %}"
        "{% for c in m['content'] %}{% if c['type'] == 'image' %}" + image + "{% elif c['type'] == 'text' %}"
        "{{ c['text'] }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )


def quiet_tower(model: Any) -> Any:
    """SigLIP starts far wider than CLIP; at its own start every patch would hear every other above itself."""
    with torch.no_grad():
        for parameter in model.model.vision_tower.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.02)
    return model


def finish(model: Any, processor: Any) -> Any:
    """Weights widened (at the usual 0.02 all logits are near equal) and no early end of generation."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "embed" not in name:
                parameter.mul_(4.0)
    if hasattr(model, "generation_config"):
        model.generation_config.pad_token_id = processor.tokenizer.pad_token_id
        model.generation_config.eos_token_id = None
    return model.eval()


def picture(seed: int = 0, size: tuple[int, int] = (100, 70)) -> Image.Image:
    """A picture of random pixels."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8))


def say_always_(model: Any, token: int, end: int) -> None:
    """Makes a model look at nothing: after any prompt it says the token, then ends."""
    language = model.model.language_model
    with torch.no_grad():
        for layer in language.layers:  # nothing is added, so a position's last state is its own embedding
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        language.embed_tokens.weight.fill_(1.0)
        language.embed_tokens.weight[token] = -1.0
        model.lm_head.weight.zero_()
        model.lm_head.weight[token] = 1.0  # after anything but the token
        model.lm_head.weight[end] = -1.0  # after the token


def always_says(letter: str, family: str = "llava") -> tuple[Any, Any]:
    """(model, processor) of a family; the model looks at nothing, says the letter and ends."""
    built, processor = build(family)
    model = copy.deepcopy(built)
    (token,) = processor.tokenizer(letter, add_special_tokens=False)["input_ids"]
    end = processor.tokenizer.eos_token_id
    say_always_(model, token, end)
    model.generation_config.eos_token_id = end
    return model, processor
