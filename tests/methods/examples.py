"""Visual tokens with everything a method may ask for, and methods whose weights are as after some training."""

import dataclasses

import torch
from torch import nn

from diffprune.methods.base import Pruner
from diffprune.methods.options import build_method
from diffprune.nn import BlockSpec
from diffprune.nn.language import LanguageSpec
from diffprune.types import VisualTokens

SPEC = BlockSpec(width=16, heads=2, mlp_width=32)
LANGUAGE = LanguageSpec(width=24, heads=2, layers=4)


def make_tokens(counts: tuple[int, ...] = (12, 10, 6), *, group: int = 1, filler: float = 1e3) -> VisualTokens:
    """One row per image, padded to the longest; padding holds numbers that would show if they were used."""
    grids = {12: (3, 4), 10: (2, 5), 6: (2, 3), 4: (2, 2), 1: (1, 1)}
    rows, length = len(counts), max(counts)
    mask = torch.arange(length) < torch.tensor(counts)[:, None]
    generator = torch.Generator().manual_seed(0)

    def padded(*shape: int) -> torch.Tensor:
        values = torch.randn(rows, length, *shape, generator=generator)
        return torch.where(mask.view(rows, length, *(1,) * len(shape)), values, filler)

    return VisualTokens(
        x=padded(16 * group),
        mask=mask,
        grid=tuple(grids[count] for count in counts),
        group=group,
        seeds=tuple(range(100, 100 + rows)),
        cls_attention=padded().abs(),
        keys=padded(8),
        projected=padded(24),
        text=torch.randn(rows, 5, 24, generator=generator),
        text_mask=torch.ones(rows, 5, dtype=torch.bool),
    )


def one_image(tokens: VisualTokens, row: int) -> VisualTokens:
    """That image alone, without padding."""
    real = tokens.mask[row]
    own = {
        name: value[row : row + 1, real]
        for name in ("x", "mask", "coords", "segment", "boxes", "cls_attention", "keys", "projected")
        if (value := getattr(tokens, name)) is not None
    }
    return dataclasses.replace(
        tokens,
        **own,
        grid=tokens.grid[row : row + 1],
        seeds=None if tokens.seeds is None else tokens.seeds[row : row + 1],
        text=None if tokens.text is None else tokens.text[row : row + 1],
        text_mask=None if tokens.text_mask is None else tokens.text_mask[row : row + 1],
    )


def make_method(name: str, *, seed: int = 0, spec: BlockSpec = SPEC, **options: object) -> Pruner:
    """The method with every weight random: a head of zeros ranks nothing."""
    torch.manual_seed(seed)
    method = build_method(name, block=spec, language=LANGUAGE, **options)
    for parameter in method.parameters():
        nn.init.normal_(parameter, mean=0.05, std=0.2)
    return method.eval()


def kept(keep: torch.Tensor) -> list[list[int]]:
    """Each row's indices without the -1 at its end."""
    return [[index for index in row if index >= 0] for row in keep.tolist()]
