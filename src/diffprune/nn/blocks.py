"""A pre-norm Transformer block in the shape of the backbone's own vision blocks, described by a `BlockSpec`.

P counts patches, W is the width of one patch: P = N * G and D = G * W where one visual token is made of G patches.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from diffprune.ops import rotate

_FIELDS = {
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "mlp_width": "intermediate_size",
    "activation": "hidden_act",
    "eps": "layer_norm_eps",
}  # ours, and what a vision config calls them


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec:
    """What one block of a vision tower is made of; `BlockSpec.from_config` reads it off a Hugging Face vision config.

    Args:
        width: Features of one patch.
        heads: Attention heads.
        mlp_width: Hidden features of the MLP.
        activation: A name in transformers' `ACT2FN`.
        norm: "layer" for LayerNorm, "rms" for RMSNorm.
        eps: Of the norms.
        qkv_bias, out_bias, mlp_bias: Whether those linear maps have a bias.
        gated: The MLP is `down(act(gate(x)) * up(x))` (SwiGLU) instead of `down(act(up(x)))`.
        qk_norm: RMSNorm on queries and keys before they are split into heads.
        rotary: Base of the two-dimensional rotary positions, None where the tower has none.
    """

    width: int
    heads: int
    mlp_width: int
    activation: str = "gelu"
    norm: str = "layer"
    eps: float = 1e-6
    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    gated: bool = False
    qk_norm: bool = False
    rotary: float | None = None

    def __post_init__(self) -> None:
        if self.width < 1 or self.heads < 1 or self.width % self.heads:
            raise ValueError(f"width={self.width} does not split into heads={self.heads}; give a divisor of the width")
        if self.rotary is not None and self.head_width % 4:
            raise ValueError(f"rotary positions need a head width divisible by 4, not {self.head_width}; change heads")
        if self.norm not in ("layer", "rms"):
            raise ValueError(f"norm={self.norm!r:.80} is not known; give 'layer' or 'rms'")
        from transformers.activations import (
            ACT2FN,
        )  # here: transformers takes seconds to import, listing methods should not

        if self.activation not in ACT2FN:
            raise ValueError(f"activation={self.activation!r:.80} is not known; give a name of transformers' ACT2FN")

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @classmethod
    def from_config(cls, config: Any) -> "BlockSpec":
        """The block of a tower built like CLIP, SigLIP, ViT or InternVL, from a vision config or one that holds it.

        There is no layer scale as in InternVL: it tames stacks of dozens of blocks, and a scorer has two.
        """
        config = getattr(config, "vision_config", config)
        missing = [name for name in _FIELDS.values() if not hasattr(config, name)]
        if missing:
            model_type = getattr(config, "model_type", type(config).__name__)
            raise ValueError(
                f"the vision blocks of model_type={model_type!r} are not built like CLIP's (its config has no "
                f"{', '.join(missing)}); pass block=PrunedVLM(model, processor).backbone.block, or describe them with "
                "BlockSpec(width=..., heads=..., mlp_width=...)"
            )
        return cls(
            **{field: getattr(config, name) for field, name in _FIELDS.items()},
            norm="rms" if getattr(config, "norm_type", None) == "rms_norm" else "layer",
            qkv_bias=getattr(config, "qkv_bias", getattr(config, "attention_bias", True)),
            qk_norm=getattr(config, "use_qk_norm", False),
        )

    def resized(self, width: int) -> "BlockSpec":
        """This kind of block at another width: MLP ratio kept, head width the nearest one that divides `width`."""
        step = 4 if self.rotary is not None else 1
        fitting = [size for size in range(step, width + 1, step) if width % size == 0]
        if not fitting:
            raise ValueError(f"width={width} does not split into heads with rotary positions; give a multiple of 4")
        head_width = min(fitting, key=lambda size: abs(size - self.head_width))
        mlp_width = round(self.mlp_width * width / self.width)
        return dataclasses.replace(self, width=width, heads=width // head_width, mlp_width=mlp_width)


def make_norm(spec: BlockSpec) -> nn.LayerNorm | nn.RMSNorm:
    """The tower's own kind of norm over one patch."""
    return nn.LayerNorm(spec.width, eps=spec.eps) if spec.norm == "layer" else nn.RMSNorm(spec.width, eps=spec.eps)


def rotary_angles(coords: Int[Tensor, "B P 2"], spec: BlockSpec) -> Float[Tensor, "B P head"]:
    """Rotation angle of each feature of a head: a quarter of them per axis (row, column), then the same again."""
    assert spec.rotary is not None
    half = spec.head_width // 2
    exponents = torch.arange(0, half, 2, dtype=torch.float32, device=coords.device) / half
    angles = coords.unsqueeze(-1).float() / spec.rotary**exponents  # [B, P, 2, head / 4]
    return angles.flatten(-2).repeat(1, 1, 2)


def position_angles(coords: Int[Tensor, "B N G 2"] | None, spec: BlockSpec) -> Float[Tensor, "B P head"] | None:
    """Rotary angles of every patch of every token, None for a tower without rotary positions."""
    if spec.rotary is None:
        return None
    if coords is None:
        raise ValueError("this tower has rotary positions, but VisualTokens.coords is None; give each patch's place")
    return rotary_angles(coords.flatten(1, 2), spec)


def zero_padding(x: Float[Tensor, "B N D"], mask: Bool[Tensor, "B N"] | None) -> Float[Tensor, "B N D"]:
    """`x` with padding set to 0: attention gives it weight 0, but 0 * NaN is NaN, there and in gradients."""
    return x if mask is None else torch.where(mask.unsqueeze(-1), x, 0.0)


def rotate_patches(x: Float[Tensor, "B H P head"], angles: Float[Tensor, "B P head"]) -> Float[Tensor, "B H P head"]:
    """`x` turned by its patch's angles, in float32 at least: low precision would blur far positions."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    angles = angles.to(wide.dtype)
    return rotate(wide, angles.cos(), angles.sin()).to(x.dtype)


class Attention(nn.Module):
    """Self-attention among the patches of one row."""

    def __init__(self, spec: BlockSpec) -> None:
        super().__init__()
        self.heads = spec.heads
        self.query = nn.Linear(spec.width, spec.width, bias=spec.qkv_bias)
        self.key = nn.Linear(spec.width, spec.width, bias=spec.qkv_bias)
        self.value = nn.Linear(spec.width, spec.width, bias=spec.qkv_bias)
        self.out = nn.Linear(spec.width, spec.width, bias=spec.out_bias)
        self.query_norm = nn.RMSNorm(spec.width, eps=spec.eps) if spec.qk_norm else nn.Identity()
        self.key_norm = nn.RMSNorm(spec.width, eps=spec.eps) if spec.qk_norm else nn.Identity()

    def forward(
        self,
        x: Float[Tensor, "B P W"],
        *,
        mask: Bool[Tensor, "B P"] | None = None,
        angles: Float[Tensor, "B P head"] | None = None,
    ) -> Float[Tensor, "B P W"]:
        query, key, value = (
            projected.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [B, H, P, head]
            for projected in (self.query_norm(self.query(x)), self.key_norm(self.key(x)), self.value(x))
        )
        if angles is not None:
            query, key = rotate_patches(query, angles), rotate_patches(key, angles)
        keys = None
        if mask is not None:
            keys = (mask | ~mask.any(-1, keepdim=True))[:, None, None]  # a row without any key would come out NaN
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=keys)
        return self.out(attended.transpose(1, 2).flatten(-2))

    def alone(self, x: Float[Tensor, "*B W"]) -> Float[Tensor, "*B W"]:
        """Attention under an identity mask: every softmax is over one key, so only the value path is left."""
        return self.out(self.value(x))


class Mlp(nn.Module):
    """The block's second half, gated or plain."""

    def __init__(self, spec: BlockSpec) -> None:
        super().__init__()
        self.gate = nn.Linear(spec.width, spec.mlp_width, bias=spec.mlp_bias) if spec.gated else None
        self.up = nn.Linear(spec.width, spec.mlp_width, bias=spec.mlp_bias)
        self.down = nn.Linear(spec.mlp_width, spec.width, bias=spec.mlp_bias)
        from transformers.activations import ACT2FN

        self.activation: Callable[[Tensor], Tensor] = ACT2FN[spec.activation]

    def forward(self, x: Float[Tensor, "*B W"]) -> Float[Tensor, "*B W"]:
        if self.gate is None:
            return self.down(self.activation(self.up(x)))
        return self.down(self.activation(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """One pre-norm Transformer block, the same function as the tower's own block, without its layer scale."""

    def __init__(self, spec: BlockSpec) -> None:
        super().__init__()
        self.spec = spec
        self.norm1 = make_norm(spec)
        self.attention = Attention(spec)
        self.norm2 = make_norm(spec)
        self.mlp = Mlp(spec)
        self.apply(_start_linear)

    def forward(
        self,
        x: Float[Tensor, "B P W"],
        *,
        mask: Bool[Tensor, "B P"] | None = None,
        angles: Float[Tensor, "B P head"] | None = None,
    ) -> Float[Tensor, "B P W"]:
        """Every patch after hearing the real patches of its row.

        Args:
            x: Patch features; finite also where `mask` is False.
            mask: True where a patch is real and may be attended to.
            angles: From `rotary_angles`, for towers with rotary positions.
        """
        x = x + self.attention(self.norm1(x), mask=mask, angles=angles)
        return x + self.mlp(self.norm2(x))

    @torch.no_grad()
    def zero_outputs_(self) -> "Block":
        """Both output projections set to zero: the block starts as the identity."""
        for linear in (self.attention.out, self.mlp.down):
            linear.weight.zero_()
            if linear.bias is not None:
                linear.bias.zero_()
        return self


@torch.no_grad()
def _start_linear(module: nn.Module) -> None:
    """Random start that keeps the variance of what passes through, at any width."""
    if isinstance(module, nn.Linear):
        module.weight.normal_(std=module.in_features**-0.5)
        if module.bias is not None:
            module.bias.zero_()
