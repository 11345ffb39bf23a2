"""Seeded tokens as 24 x 24 patches give them: plain noise, a few clusters, repeated tokens, or numbers that tie."""

import torch
from torch import Tensor

from diffprune.methods.base import MergingPruner, Pruner
from diffprune.types import VisualTokens

KINDS = ("noise", "clusters", "repeats", "ties")
BUDGETS = (128, 64, 32)
NUM_TOKENS = 576


def picture(kind: str, seed: int, *, width: int = 160) -> VisualTokens:
    """One image with all that methods before the language model ask for."""
    generator = torch.Generator().manual_seed(1000 * seed + KINDS.index(kind))

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    x, projected, keys = noise(NUM_TOKENS, width), noise(NUM_TOKENS, 2 * width), noise(NUM_TOKENS, 16)
    attention = torch.rand(NUM_TOKENS, generator=generator) ** 3
    if kind == "clusters":
        home = torch.randint(20, (NUM_TOKENS,), generator=generator)
        x, projected, keys = (noise(20, part.shape[1])[home] + 0.3 * part for part in (x, projected, keys))
    if kind == "repeats":
        first = torch.randint(400, (NUM_TOKENS,), generator=generator).sort().values
        x, projected, keys = x[first], projected[first], keys[first]
    if kind == "ties":
        attention = (attention * 16).round() / 16
    return VisualTokens(
        x=x[None],
        projected=projected[None],
        keys=keys[None],
        cls_attention=attention[None],
        text=noise(1, 3, width),
        grid=((24, 24),),
    )


def signs(seed: int) -> Tensor:
    """576 tokens of 64 numbers, each 1 or -1: every cosine is a multiple of 1/32 without rounding, and most tie."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, (NUM_TOKENS, 64), generator=generator).float() * 2 - 1


def unit(vectors: Tensor) -> Tensor:
    return vectors / vectors.norm(dim=-1, keepdim=True)


def largest(values: Tensor, count: int) -> list[int]:
    """Places of the largest values, best first, of equal ones the first."""
    listed = values.tolist()
    return sorted(range(len(listed)), key=lambda place: -listed[place])[:count]


def chosen(method: Pruner, tokens: VisualTokens, k: int) -> list[int]:
    """What the method keeps of one image, in the order it gives."""
    assert not isinstance(method, MergingPruner)  # its places say too little
    return [index for index in method.select(tokens, k)[0].tolist() if index >= 0]
