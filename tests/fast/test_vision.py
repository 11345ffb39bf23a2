"""Vision blocks as functions: the same values in any layout of their weights."""

from typing import Any

import pytest
import torch

from diffprune.fast.vision import EVEN_WIDTH, Blocks, attend_within, scorer_block
from diffprune.nn.blocks import Block, BlockSpec


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("width", "wider"), [(30, 64), (66, 128), (32, 32)])
def test_an_mlp_of_odd_width_is_made_wider_and_gives_the_same_values(gated: bool, width: int, wider: int) -> None:
    torch.manual_seed(0)
    activation = "silu" if gated else "sigmoid"  # which is not zero at zero
    block = Block(BlockSpec(width=16, heads=2, mlp_width=width, gated=gated, activation=activation)).eval()
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(2, 5, 16)
    own = {}
    for fuse in (True, False):
        blocks = Blocks([scorer_block(block)], 2, torch.float32, lambda function: function, fuse=fuse)
        with torch.no_grad():
            residual, branch = blocks(0, x, torch.zeros_like(x), None, ((1, 5),))
            torch.testing.assert_close(residual + branch, block(x), atol=1e-5, rtol=1e-5)
        own[fuse] = (blocks.weights[0].down[0].shape[1], blocks.own_bytes)
    assert own[False] == (width, 0)
    assert own[True][0] == wider and (wider == width or wider % EVEN_WIDTH == 0)


@pytest.mark.parametrize("parts", [((1, 12),), ((3, 4),), ((2, 4), (1, 3), (1, 1))])
def test_patches_attend_within_their_part_alone(parts: tuple[tuple[int, int], ...]) -> None:
    query, key, value = torch.randn(3, 2, 2, 12, 8, generator=torch.Generator().manual_seed(0))
    of_patch = torch.cat(
        [
            torch.full((length,), index)
            for index, length in enumerate(length for count, length in parts for _ in range(count))
        ]
    )
    same = of_patch[:, None] == of_patch
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=same)
    torch.testing.assert_close(attend_within(query, key, value, parts), wanted.transpose(1, 2))


def test_private_copies_of_a_wider_mlp_are_counted() -> None:
    block = Block(BlockSpec(width=16, heads=2, mlp_width=30))
    blocks = Blocks([scorer_block(block)], 2, torch.float32, lambda function: function, fuse=True)
    qkv, up, down = 3 * (16 * 16 + 16), 64 * 16 + 64, 16 * 64
    assert blocks.own_bytes == 4 * (qkv + up + down)


def test_weights_of_even_width_stay_the_stock_ones() -> None:
    block: Any = Block(BlockSpec(width=16, heads=2, mlp_width=32))
    blocks = Blocks([scorer_block(block)], 2, torch.float32, lambda function: function, fuse=True)
    assert blocks.weights[0].down[0].data_ptr() == block.mlp.down.weight.data_ptr()
    assert blocks.weights[0].up[0][0].data_ptr() == block.mlp.up.weight.data_ptr()
