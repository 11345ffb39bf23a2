"""Rotary positions are those of the stock LLaMA."""

import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from diffprune.ops import rotate


def test_rotation_is_that_of_the_stock_decoder() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 5, 8, generator=generator)
    angles = torch.rand(2, 5, 4, generator=generator).repeat(1, 1, 2)
    theirs, _ = apply_rotary_pos_emb(x, x, angles.cos(), angles.sin())
    assert torch.equal(rotate(x, angles.cos(), angles.sin()), theirs)
