"""The blocks of vision towers and scorers as pure functions: both are stacks of one pre-norm block."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from diffprune.fast.decoder import Linear, apply_each, fused, norm_eps, side_by_side
from diffprune.fast.graphs import num_bytes
from diffprune.fast.towers import BlockParts, MakeBlocks, Parts
from diffprune.nn.blocks import position_angles
from diffprune.nn.scorer import Scorer, merge_groups, pack_segments
from diffprune.ops import rotate
from diffprune.types import VisualTokens

ROW_BYTES = 16  # at multiples of which rows must begin for the fastest loads
EVEN_WIDTH = 64  # of which a width is made a multiple where it has to be made wider: what a matrix kernel works on


class Norm(NamedTuple):
    """LayerNorm, or RMSNorm where `bias` is None."""

    weight: Tensor
    bias: Tensor | None
    eps: float


class BlockWeights(NamedTuple):
    """One vision block."""

    norm1: Norm
    qkv: tuple[Linear, ...]
    out: Linear
    norm2: Norm
    up: tuple[Linear, ...]  # gate and up where the MLP is gated
    down: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """What is the same in all blocks of a stack."""

    heads: int
    gated: bool
    activation: Callable[[Tensor], Tensor]


def norm_of(norm: Any, dtype: torch.dtype) -> Norm:
    bias = getattr(norm, "bias", None)
    return Norm(norm.weight.detach().to(dtype), None if bias is None else bias.detach().to(dtype), norm_eps(norm))


def block_weights(parts: BlockParts, dtype: torch.dtype, *, fuse: bool) -> BlockWeights:
    """The weights of a block in that precision; `fuse` allows copies in a better layout."""

    def cast(linears: Sequence[Any]) -> tuple[Linear, ...]:
        return side_by_side(linears, fuse=False, dtype=dtype)

    up, (down,) = cast(parts.up), cast([parts.down])
    if fuse:
        up, down = with_even_rows(up, down)
    return BlockWeights(
        norm1=norm_of(parts.norms[0], dtype),
        qkv=fused(cast(parts.qkv)) if fuse else cast(parts.qkv),
        out=cast([parts.out])[0],
        norm2=norm_of(parts.norms[1], dtype),
        up=fused(up) if fuse else up,
        down=down,
    )


def with_even_rows(up: tuple[Linear, ...], down: Linear) -> tuple[tuple[Linear, ...], Linear]:
    """An MLP of an odd hidden width, made wider by features that are zero on both sides and so change nothing.

    Rows of a matrix that do not begin at multiples of 16 bytes (3,420 half-precision numbers in Qwen2.5-VL's tower)
    keep matrix products from the kernels that use this hardware best.
    """
    weight, bias = down
    width = weight.shape[1]
    if width * weight.element_size() % ROW_BYTES == 0:
        return up, down
    missing = -width % EVEN_WIDTH
    wider = tuple(
        (F.pad(rows, (0, 0, 0, missing)), None if own is None else F.pad(own, (0, missing))) for rows, own in up
    )
    return wider, (F.pad(weight, (0, missing)), bias)


def normalise(x: Float[Tensor, "*B W"], norm: Norm) -> Float[Tensor, "*B W"]:
    if norm.bias is not None:
        return F.layer_norm(x, (x.shape[-1],), norm.weight, norm.bias, norm.eps)
    wide = x.float()
    return norm.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)).to(x.dtype)


def turn(x: Float[Tensor, "R H M E"], cos: Tensor, sin: Tensor) -> Float[Tensor, "R H M E"]:
    """Rotary positions in float32, as towers do."""
    return rotate(x.float(), cos, sin).to(x.dtype)


def attend_within(
    query: Float[Tensor, "B H P E"], key: Float[Tensor, "B H P E"], value: Float[Tensor, "B H P E"], parts: Parts
) -> Float[Tensor, "B P H E"]:
    """Attention within each part, parts of one length as rows of one call: none is padded, and no mask is needed."""
    found, start, images = [], 0, len(query)
    for count, length in parts:
        rows = [
            states[:, :, start : start + count * length].unflatten(2, (count, length)).transpose(1, 2).flatten(0, 1)
            for states in (query, key, value)
        ]
        within = F.scaled_dot_product_attention(rows[0], rows[1], rows[2])  # [B * count, H, length, E]
        found.append(within.transpose(1, 2).unflatten(0, (images, count)).flatten(1, 2))
        start += count * length
    return found[0] if len(found) == 1 else torch.cat(found, dim=1)


def vision_block(
    shape: BlockShape,
    residual: Float[Tensor, "B P W"],
    branch: Float[Tensor, "B P W"],
    weights: BlockWeights,
    tables: tuple[Tensor, Tensor] | None,
    parts: Parts,
) -> tuple[Float[Tensor, "B P W"], Float[Tensor, "B P W"]]:
    """Residual and branch after one block in which patches attend within each part of their row.

    Args:
        tables: Rotary cosines and sines [B or 1, P, E].
        parts: How many parts of which length a row is made of, in order.
    """
    residual = residual + branch
    width = residual.shape[-1]
    x = normalise(residual, weights.norm1)
    query, key, value = (
        part.unflatten(-1, (shape.heads, -1)).transpose(1, 2) for part in apply_each(x, weights.qkv, [width] * 3)
    )
    if tables is not None:
        query, key = turn(query, *tables), turn(key, *tables)
    attended = attend_within(query, key, value, parts)  # [B, P, H, E]
    out = F.linear(attended.flatten(-2), *weights.out)
    residual = residual + out
    x = normalise(residual, weights.norm2)
    if not shape.gated:
        return residual, F.linear(shape.activation(F.linear(x, *weights.up[0])), *weights.down)
    half = weights.down[0].shape[1]
    gate, up = apply_each(x, weights.up, [half, half])
    return residual, F.linear(shape.activation(gate) * up, *weights.down)


class Blocks:
    """A stack of vision blocks over one set of weights."""

    def __init__(
        self,
        parts: Sequence[BlockParts],
        heads: int,
        dtype: torch.dtype,
        compiler: Callable[..., Any],
        *,
        fuse: bool,
    ) -> None:
        self.weights = [block_weights(part, dtype, fuse=fuse) for part in parts]
        linears = [linear for part in parts for linear in (*part.qkv, part.out, *part.up, part.down)]
        stock = {parameter.data_ptr() for linear in linears for parameter in linear.parameters()}
        tensors = [
            tensor
            for weights in self.weights
            for linear in (*weights.qkv, weights.out, *weights.up, weights.down)
            for tensor in linear
            if tensor is not None and tensor.data_ptr() not in stock
        ]
        self.own_bytes = num_bytes(*tensors)
        if not parts:
            return
        shape = BlockShape(heads=heads, gated=len(parts[0].up) == 2, activation=parts[0].activation)

        def one_block(*arguments: Any) -> tuple[Tensor, Tensor]:
            return vision_block(shape, *arguments)

        self._block = compiler(one_block)

    def __call__(
        self, index: int, residual: Tensor, branch: Tensor, tables: Any, parts: Parts
    ) -> tuple[Tensor, Tensor]:
        return self._block(residual, branch, self.weights[index], tables, parts)


def scorer_block(block: Any) -> BlockParts:
    """A block of `nn.blocks`, without norms of queries and keys."""
    attention, mlp = block.attention, block.mlp
    return BlockParts(
        norms=(block.norm1, block.norm2),
        qkv=(attention.query, attention.key, attention.value),
        out=attention.out,
        up=(mlp.up,) if mlp.gate is None else (mlp.gate, mlp.up),
        down=mlp.down,
        activation=mlp.activation,
    )


class FastScorer:
    """A `Scorer` in the base model's precision, logits in float32: the same ranking, but for ties in rounding."""

    def __init__(
        self, scorer: Scorer, make_blocks: MakeBlocks, dtype: torch.dtype, compiler: Callable[..., Any]
    ) -> None:
        self.spec, self.merges, self.joins = scorer.spec, scorer.groups == "merged", scorer.tiles == "joined"
        self.blocks = make_blocks([scorer_block(block) for block in scorer.blocks], scorer.spec.heads)
        self.norm = None if isinstance(scorer.norm, torch.nn.Identity) else norm_of(scorer.norm, dtype)
        self.head = (scorer.head.weight.detach().float()[0], scorer.head.bias.detach().float())
        self.finish, self.finish_both = compiler(self.logits), compiler(self.logits_and_hidden)
        self.own_bytes = self.blocks.own_bytes

    def fix(self, tokens: VisualTokens) -> Callable[[Float[Tensor, "B N D"]], Float[Tensor, "B N"]]:
        """The scorer for tokens of this shape, none of them padding."""
        run = self._fixed(tokens, self.finish)
        return lambda x: run(x)[0]

    def fix_both(self, tokens: VisualTokens) -> Callable[[Tensor], tuple[Float[Tensor, "B N"], Float[Tensor, "B N W"]]]:
        """The same with the tokens' last hidden states beside their logits."""
        return self._fixed(tokens, self.finish_both)

    def _fixed(self, tokens: VisualTokens, finish: Callable[..., Any]) -> Callable[[Tensor], Any]:
        if tokens.segment is not None and not self.joins:
            return self._fixed_by_tile(tokens, tokens.segment, finish)
        x, coords, width = tokens.x, tokens.coords, self.spec.width
        if self.merges:
            x, coords = merge_groups(x, coords, width)
        angles = position_angles(coords, self.spec)
        tables = None if angles is None else (angles.cos(), angles.sin())
        nothing = torch.zeros_like(x).reshape(len(x), -1, width)  # made once, never written

        def run(x: Tensor) -> Any:
            patches, branch = merge_groups(x, None, width)[0] if self.merges else x.reshape(len(x), -1, width), nothing
            for index in range(len(self.blocks.weights)):
                patches, branch = self.blocks(index, patches, branch, tables, ((1, patches.shape[1]),))
            return finish(patches, branch, x.shape[1])

        return run

    def _fixed_by_tile(
        self, tokens: VisualTokens, segment: Tensor, finish: Callable[..., Any]
    ) -> Callable[[Tensor], tuple[Tensor, ...]]:
        """Tokens attend within their tile; tiles of one length are rows of one call, so that none is padded."""
        packed = pack_segments(torch.ones_like(segment, dtype=torch.bool), segment)  # [R, M], -1 behind shorter tiles
        lengths = (packed >= 0).sum(1)
        groups = [packed[lengths == length, :length] for length in lengths.unique().tolist()]
        back = torch.cat([index.flatten() for index in groups]).argsort()

        def fix(index: Tensor) -> Callable[[Tensor], Any]:
            coords = None if tokens.coords is None else tokens.coords.flatten(0, 1)[index]
            return self._fixed(VisualTokens(x=tokens.x.flatten(0, 1)[index], coords=coords), finish)

        runs = [(index, fix(index)) for index in groups]

        def run(x: Tensor) -> tuple[Tensor, ...]:
            every = x.flatten(0, 1)
            found = zip(*(score(every[index]) for index, score in runs), strict=True)  # logits, and hidden states
            rows = [torch.cat([part.flatten(0, 1) for part in parts])[back] for parts in found]
            return tuple(each.unflatten(0, x.shape[:2]) for each in rows)

        return run

    def logits(self, residual: Tensor, branch: Tensor, num_tokens: int) -> tuple[Float[Tensor, "B N"]]:
        return (self.logits_and_hidden(residual, branch, num_tokens)[0],)

    def logits_and_hidden(
        self, residual: Tensor, branch: Tensor, num_tokens: int
    ) -> tuple[Float[Tensor, "B N"], Float[Tensor, "B N W"]]:
        patches = residual + branch
        if self.norm is not None:
            patches = normalise(patches, self.norm)
        logits = (patches.float() * self.head[0]).sum(-1) + self.head[1]  # as a sum it falls into the norm's kernel
        hidden = patches.unflatten(1, (num_tokens, -1))
        hidden = hidden.squeeze(2) if hidden.shape[2] == 1 else hidden.mean(2)
        return logits.unflatten(1, (num_tokens, -1)).mean(-1), hidden
