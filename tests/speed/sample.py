"""What the tests here measure: a tiny Qwen2.5-VL, pictures of 12 tokens, 3 of them kept."""

from typing import Any

import torch

from diffprune.model import PrunedVLM
from diffprune.speed.subject import make_batch

OPTIONS: dict[str, Any] = dict(
    backbone="qwen2.5-vl-7b",
    random_weights=True,
    tiny=True,
    image=(112, 84),
    keeps=[3],
    texts=[40],
    batches=[2],
    device="cpu",
    dtype=torch.float32,
    runs=1,
)


def batch_of(subject: PrunedVLM, num_text: int = 40, batch: int = 2) -> Any:
    return make_batch(subject, size=(112, 84), num_text=num_text, batch=batch)
