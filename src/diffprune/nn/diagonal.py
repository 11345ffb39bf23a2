"""The throttler's block: maps weakened tokens back to what the frozen projector expects, and is gone at inference.

Both kinds start as the identity (zero output projections) and are called the same way.
"""

from abc import ABC, abstractmethod

from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from diffprune.nn.blocks import Block, BlockSpec, position_angles, zero_padding


class ThrottleBlock(nn.Module, ABC):
    """A Transformer block whose residual branches can be weighed token by token; a kind says what tokens attend to."""

    def __init__(self, spec: BlockSpec) -> None:
        super().__init__()
        self.block = Block(spec).zero_outputs_()

    @abstractmethod
    def attend(
        self,
        patches: Float[Tensor, "B P W"],
        mask: Bool[Tensor, "B N"] | None,
        coords: Int[Tensor, "B N G 2"] | None,
    ) -> Float[Tensor, "B P W"]:
        """What attention adds to each normed patch."""

    def forward(
        self,
        x: Float[Tensor, "B N D"],
        *,
        mask: Bool[Tensor, "B N"] | None = None,
        coords: Int[Tensor, "B N G 2"] | None = None,
        branch_scale: Float[Tensor, "B N"] | None = None,
    ) -> Float[Tensor, "B N D"]:
        """Every token, brought back to what the projector expects.

        Args:
            x: Weakened tokens, D = G * width.
            mask: True where a token is real.
            coords: Place of each patch, needed where the tower has rotary positions and tokens attend to each other.
            branch_scale: Weight of both residual branches; 0 passes a token through as it is.
        """
        block = self.block
        patches, scale = _patches(x, block, mask, branch_scale)
        patches = patches + scale * self.attend(block.norm1(patches), mask, coords)
        patches = patches + scale * block.mlp(block.norm2(patches))
        return patches.reshape(x.shape).to(x.dtype)


class DiagonalBlock(ThrottleBlock):
    """A Transformer block under an identity attention mask, so no token ever attends to another (paper, Section 4.3).

    The softmax over one key is 1, so the query-key product is skipped. The query and key weights stay, frozen: they
    belong to the block, and no gradient reaches them.
    """

    def __init__(self, spec: BlockSpec) -> None:
        super().__init__(spec)
        attention = self.block.attention
        for unused in (attention.query, attention.key, attention.query_norm, attention.key_norm):
            unused.requires_grad_(False)

    def attend(
        self,
        patches: Float[Tensor, "B P W"],
        mask: Bool[Tensor, "B N"] | None,
        coords: Int[Tensor, "B N G 2"] | None,
    ) -> Float[Tensor, "B P W"]:
        return self.block.attention.alone(patches)


class GlobalBlock(ThrottleBlock):
    """The ablation: the same block with full attention within an image, which lets a token recover what it lost."""

    def attend(
        self,
        patches: Float[Tensor, "B P W"],
        mask: Bool[Tensor, "B N"] | None,
        coords: Int[Tensor, "B N G 2"] | None,
    ) -> Float[Tensor, "B P W"]:
        patch_mask = None if mask is None else mask.repeat_interleave(patches.shape[1] // mask.shape[1], dim=1)
        angles = position_angles(coords, self.block.spec)
        return self.block.attention(patches, mask=patch_mask, angles=angles)


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
