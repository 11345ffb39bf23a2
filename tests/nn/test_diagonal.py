"""The throttler's block: alone means alone, and it starts as the identity."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diffprune.nn import Block, BlockSpec, DiagonalBlock, GlobalBlock

SPEC = BlockSpec(width=16, heads=2, mlp_width=32)
ROTARY = BlockSpec(width=16, heads=2, mlp_width=24, norm="rms", gated=True, activation="silu", rotary=10000.0)


def trained(block: nn.Module) -> nn.Module:
    """As after some training: no weight is zero any more."""
    torch.manual_seed(1)
    for parameter in block.parameters():
        nn.init.normal_(parameter, mean=0.05, std=0.2)
    return block


def under_identity_mask(block: Block, x: Tensor) -> Tensor:
    """The block as the paper writes it: full attention, then a mask that leaves the diagonal."""
    hidden = block.norm1(x)
    attention = block.attention
    query, key, value = (
        linear(hidden).unflatten(-1, (attention.heads, -1)).transpose(1, 2)
        for linear in (attention.query, attention.key, attention.value)
    )
    mask = torch.eye(x.shape[1], dtype=torch.bool)
    attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    x = x + attention.out(attended.transpose(1, 2).flatten(-2))
    return x + block.mlp(block.norm2(x))


@pytest.mark.parametrize("spec", [SPEC, ROTARY], ids=["layer norm", "gated rms"])
def test_the_value_path_equals_the_block_under_an_identity_mask(spec: BlockSpec) -> None:
    diagonal = trained(DiagonalBlock(spec)).double()
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    torch.testing.assert_close(diagonal(x), under_identity_mask(diagonal.block, x), rtol=1e-6, atol=1e-6)


def test_a_token_never_attends_to_another() -> None:
    diagonal = trained(DiagonalBlock(SPEC)).double()
    x = torch.randn(1, 5, 16, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda value: diagonal(value)[0].sum(-1), x)[:, 0]  # [N, N, D]
    strength = jacobian.abs().sum(-1)
    assert (strength.diagonal() > 0).all()
    assert (strength - strength.diagonal().diag() == 0).all()


@pytest.mark.parametrize("kind", [DiagonalBlock, GlobalBlock])
def test_the_weights_of_a_saved_throttler_keep_their_names(kind: type[nn.Module]) -> None:
    assert list(kind(SPEC).state_dict()) == [f"block.{name}" for name in Block(SPEC).state_dict()]


def test_the_global_block_does_hear_others() -> None:
    block = trained(GlobalBlock(SPEC)).double()
    x = torch.randn(1, 5, 16, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(lambda value: block(value)[0].sum(-1), x)[:, 0]
    assert (jacobian.abs().sum(-1) > 0).all()


def test_the_global_block_is_the_tower_s_block_at_branch_scale_one() -> None:
    block = trained(GlobalBlock(SPEC))
    x = torch.randn(2, 5, 16)
    torch.testing.assert_close(block(x), block.block(x))


@pytest.mark.parametrize("kind", [DiagonalBlock, GlobalBlock])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_block_starts_as_the_identity(kind: type, dtype: torch.dtype) -> None:
    x = torch.randn(2, 9, 32).to(dtype)  # two patches per token
    assert torch.equal(kind(SPEC)(x), x)


@pytest.mark.parametrize("kind", [DiagonalBlock, GlobalBlock])
@pytest.mark.parametrize("filler", [float("nan"), 1e20])
def test_padding_reaches_neither_real_tokens_nor_gradients(kind: type, filler: float) -> None:
    block = trained(kind(SPEC))
    mask = torch.tensor([[True] * 4 + [False] * 2, [True] * 6])
    clean = torch.randn(2, 6, 32)
    x = torch.where(mask[..., None], clean, filler)
    out = block(x, mask=mask)
    torch.testing.assert_close(out[0, :4], block(clean[:1, :4])[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out[1], block(clean[1:])[0], rtol=1e-4, atol=1e-5)
    out[mask].sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in block.parameters() if parameter.grad is not None)


@pytest.mark.parametrize("kind", [DiagonalBlock, GlobalBlock])
def test_a_branch_scale_of_zero_leaves_a_token_as_it_is(kind: type) -> None:
    block = trained(kind(SPEC))
    x = torch.randn(1, 4, 32)
    scale = torch.tensor([[0.0, 1.0, 0.5, 0.0]])
    out = block(x, branch_scale=scale)
    assert torch.equal(out[0, 0], x[0, 0]) and torch.equal(out[0, 3], x[0, 3])
    torch.testing.assert_close(out[0, 1], block(x)[0, 1])
    assert not torch.equal(out[0, 2], block(x)[0, 2])


def test_query_and_key_are_there_and_frozen() -> None:
    diagonal = DiagonalBlock(SPEC)
    frozen = {name for name, parameter in diagonal.named_parameters() if not parameter.requires_grad}
    assert frozen == {f"block.attention.{part}.{kind}" for part in ("query", "key") for kind in ("weight", "bias")}


def test_every_other_weight_learns() -> None:
    diagonal = trained(DiagonalBlock(SPEC))
    diagonal(torch.randn(2, 3, 16)).square().sum().backward()
    assert all((p.grad is not None and p.grad.abs().sum() > 0) == p.requires_grad for p in diagonal.parameters())


def test_the_global_block_asks_for_coords_where_positions_are_rotary() -> None:
    x, coords = torch.randn(1, 4, 16), torch.arange(8).view(1, 4, 1, 2)
    block = trained(GlobalBlock(ROTARY))
    assert not torch.allclose(block(x, coords=coords), block(x, coords=torch.zeros_like(coords)))
    with pytest.raises(ValueError, match=r"VisualTokens\.coords"):
        block(x)
