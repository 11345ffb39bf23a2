"""Models for scenes at other sizes in miniature, random weights, with the real tokenizer and processors."""

from functools import cache
from typing import Any

import torch

from diffprune.model import PrunedVLM
from diffprune_lab.pretrain import next as tiled
from diffprune_lab.scenes import qwen as native
from lab.tests import tiny_scenes

WAYS = {"qwen2_5_vl": "varying", "llava_next": "384"}  # the sizes each is made for


@cache
def build(family: str) -> tuple[Any, Any]:
    """(model, processor), built once per test process; weights are widened so that differences show."""
    if family == "llava_next":
        base, processor = tiny_scenes.build()
        with torch.random.fork_rng(devices=[]):  # a test draws the same whether or not it is the first to build
            model = tiled.build_next(base, processor.tokenizer)
        return model, tiled.build_processor(processor.tokenizer, patch=tiny_scenes.SPEC.patch)
    spec = native.QwenSpec(
        vision_width=32, vision_blocks=2, vision_hidden=32, text_width=64, text_layers=2, text_hidden=32
    )
    tokenizer = native.build_tokenizer()
    with torch.random.fork_rng(devices=[]):
        model = native.build_model(spec, tokenizer).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(3.0)
    return model, native.build_processor(tokenizer)


def pruned(family: str, method: Any = "full", keep: int | float = 1.0, **options: Any) -> PrunedVLM:
    """The tiny model with a method around it."""
    return PrunedVLM(*build(family), method=method, keep=keep, **options)
