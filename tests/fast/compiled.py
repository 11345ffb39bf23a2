"""Tiny models with their fast path, and what they answer with and without it."""

from typing import Any

import torch

from diffprune.model import PrunedVLM
from tests.contracts.vlm import pruned

SIZES = {
    "llava": None,
    "llava_next": [(100, 70), (64, 48)],
    "llava_onevision": [(100, 70), (140, 48)],
    "qwen2_vl": [(100, 70)],
    "qwen2_5_vl": [(100, 70), (112, 84)],
}
QUESTIONS = ["what?", "what does the sign beside it say?", "is it red or not?"]


def compiled(family: str, method: Any = "full", *, vlm: PrunedVLM | None = None, **options: Any) -> PrunedVLM:
    """A tiny model with its fast path, room for a few short prompts."""
    vlm = pruned(family, method, keep=5) if vlm is None else vlm
    if str(method).startswith("diffprune"):
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in vlm.method.parameters():
                parameter.normal_(std=0.2)
    small: dict[str, Any] = {"batch_sizes": (1, 2), "text_buckets": (64,), "max_new_tokens": 6, "on_demand": 0}
    vlm.compile(**{**small, "image_sizes": SIZES.get(family), **options})
    return vlm


def reference(vlm: PrunedVLM, images: Any, text: Any, **kwargs: Any) -> torch.Tensor:
    """What the same model answers without its fast path."""
    fast, vlm.fast = vlm.fast, None
    try:
        return vlm.generate(images, text, do_sample=False, return_ids=True, **{"max_new_tokens": 6, **kwargs})
    finally:
        vlm.fast = fast


def answer(vlm: PrunedVLM, images: Any, text: Any, **kwargs: Any) -> torch.Tensor:
    return vlm.generate(images, text, do_sample=False, return_ids=True, **{"max_new_tokens": 6, **kwargs})
