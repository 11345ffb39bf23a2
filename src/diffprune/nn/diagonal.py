"""The throttler's block: maps weakened tokens back to what the frozen projector expects, and is gone at inference.

Both kinds start as the identity (zero output projections) and are called the same way.
"""

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from diffprune.nn.blocks import Block, BlockSpec, position_angles, zero_padding


class DiagonalBlock(nn.Module):
    """A Transformer block under an identity attention mask, so no token ever hears another (paper, Section 4.3).

    The softmax over one key is 1, so the query-key product is skipped. The query and key weights stay, frozen: they
    belong to the block, and no gradient reaches them.
    """

    def __init__(self, spec: BlockSpec) -> None:
        super().__init__()
        self.block = Block(spec).zero_outputs_()
        attention = self.block.attention
        for unused in (attention.query, attention.key, attention.query_norm, attention.key_norm):
            unused.requires_grad_(False)

    def forward(
        self,
        x: Float[Tensor, "B N D"],
        *,
        mask: Bool[Tensor, "B N"] | None = None,
        coords: Int[Tensor, "B N G 2"] | None = None,
        branch_scale: Float[Tensor, "B N"] | None = None,
    ) -> Float[Tensor, "B N D"]:
        """Every token, changed by itself alone; padding comes out as zeros.

        Args:
            x: Weakened tokens, D = G * width.
            mask: True where a token is real.
            coords: Taken so that both blocks are called alike; a token that hears only itself has no use for them.
            branch_scale: Weight of both residual branches; 0 passes a token through as it is.
        """
        del coords
        block = self.block
        patches, scale = _patches(x, block, mask, branch_scale)
        patches = patches + scale * block.attention.alone(block.norm1(patches))
        patches = patches + scale * block.mlp(block.norm2(patches))
        return patches.reshape(x.shape).to(x.dtype)


class GlobalBlock(nn.Module):
    """The ablation: the same block with full attention within an image, which lets a token recover what it lost."""

    def __init__(self, spec: BlockSpec) -> None:
        super().__init__()
        self.block = Block(spec).zero_outputs_()

    def forward(
        self,
        x: Float[Tensor, "B N D"],
        *,
        mask: Bool[Tensor, "B N"] | None = None,
        coords: Int[Tensor, "B N G 2"] | None = None,
        branch_scale: Float[Tensor, "B N"] | None = None,
    ) -> Float[Tensor, "B N D"]:
        """Every token after hearing the real tokens of its image; padding is never heard.

        Args:
            x: Weakened tokens, D = G * width.
            mask: True where a token is real.
            coords: Place of each patch, needed where the tower has rotary positions.
            branch_scale: Weight of both residual branches; 0 passes a token through as it is.
        """
        block = self.block
        patches, scale = _patches(x, block, mask, branch_scale)
        heard = None if mask is None else mask.repeat_interleave(patches.shape[1] // mask.shape[1], dim=1)
        angles = position_angles(coords, block.spec)
        patches = patches + scale * block.attention(block.norm1(patches), mask=heard, angles=angles)
        patches = patches + scale * block.mlp(block.norm2(patches))
        return patches.reshape(x.shape).to(x.dtype)


def _patches(
    x: Float[Tensor, "B N D"],
    block: Block,
    mask: Bool[Tensor, "B N"] | None,
    branch_scale: Float[Tensor, "B N"] | None,
) -> tuple[Float[Tensor, "B P W"], Float[Tensor, "B P 1"] | float]:
    """Patches in the block's precision, and the weight of their branches."""
    patches = zero_padding(x, mask).to(block.mlp.up.weight.dtype).unflatten(-1, (-1, block.spec.width))
    if branch_scale is None:
        return patches.flatten(1, 2), 1.0
    scale = branch_scale.to(patches.dtype)[..., None].expand(patches.shape[:3])  # every patch of a token alike
    return patches.flatten(1, 2), scale.reshape(len(x), -1, 1)
