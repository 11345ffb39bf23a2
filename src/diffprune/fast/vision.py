"""Vision towers and scorers as pure functions: both are stacks of the same pre-norm block, so one function runs both.

A tower is fixed to one picture shape when it is built: what depends on the shape alone (rotary tables, the order of
windows, masks) is computed once and kept.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from transformers.vision_utils import get_vision_position_ids

from diffprune.backbones._clip import block_attention, encoder_layers
from diffprune.backbones._qwen_vision import QwenVL, received_attention
from diffprune.backbones.base import Backbone, Batch, pad_rows
from diffprune.backbones.llava_next import LlavaNext
from diffprune.fast.decoder import Linear, apply_each, linear_of, norm_eps, side_by_side
from diffprune.fast.graphs import num_bytes
from diffprune.nn.blocks import position_angles
from diffprune.nn.scorer import Scorer
from diffprune.ops import rotate
from diffprune.types import VisualTokens

RANKED_AT_ONCE = 4096  # up to here the ranks come from all pairs in one kernel; beyond, from a sort


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


def block_weights(block: Any, dtype: torch.dtype, *, fuse: bool) -> BlockWeights:
    """The weights of a CLIP-like, Qwen-like or our own block."""

    def cast(linear: Any) -> Linear:
        weight, bias = linear_of(linear)
        return weight.to(dtype), None if bias is None else bias.to(dtype)

    mlp = block.mlp
    if hasattr(block, "self_attn"):  # CLIP, SigLIP
        attention = block.self_attn
        norms, parts = (block.layer_norm1, block.layer_norm2), (attention.q_proj, attention.k_proj, attention.v_proj)
        out, up, down = attention.out_proj, (mlp.fc1,), mlp.fc2
    elif hasattr(block, "attn"):  # Qwen
        norms, parts, out = (block.norm1, block.norm2), (block.attn.qkv,), block.attn.proj
        gated = hasattr(mlp, "gate_proj")
        up, down = ((mlp.gate_proj, mlp.up_proj), mlp.down_proj) if gated else ((mlp.fc1,), mlp.fc2)
    else:
        attention = block.attention
        norms, parts = (block.norm1, block.norm2), (attention.query, attention.key, attention.value)
        out, down = attention.out, mlp.down
        up = (mlp.up,) if mlp.gate is None else (mlp.gate, mlp.up)
    return BlockWeights(
        norm1=norm_of(norms[0], dtype),
        qkv=side_by_side(parts, fuse=fuse and len(parts) > 1, dtype=dtype),
        out=cast(out),
        norm2=norm_of(norms[1], dtype),
        up=side_by_side(up, fuse=fuse and len(up) > 1, dtype=dtype),
        down=cast(down),
    )


def activation_of(block: Any) -> Callable[[Tensor], Tensor]:
    """The activation of a block's MLP, under any of its names."""
    for name in ("activation_fn", "act_fn", "act", "activation"):
        if hasattr(block.mlp, name):
            return getattr(block.mlp, name)
    raise AssertionError(f"{type(block.mlp).__name__} has no activation that is known")


def normalise(x: Float[Tensor, "*B W"], norm: Norm) -> Float[Tensor, "*B W"]:
    if norm.bias is not None:
        return F.layer_norm(x, (x.shape[-1],), norm.weight, norm.bias, norm.eps)
    wide = x.float()
    return norm.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)).to(x.dtype)


def turn(x: Float[Tensor, "R H M E"], cos: Tensor, sin: Tensor) -> Float[Tensor, "R H M E"]:
    """Rotary positions in float32, as towers do."""
    return rotate(x.float(), cos, sin).to(x.dtype)


def vision_block(
    shape: BlockShape,
    residual: Float[Tensor, "B P W"],
    branch: Float[Tensor, "B P W"],
    weights: BlockWeights,
    tables: tuple[Tensor, Tensor] | None,
    heard: Tensor | None,
    rows: int,
) -> tuple[Float[Tensor, "B P W"], Float[Tensor, "B P W"]]:
    """Residual and branch after one block in which patches hear each other within each of `rows` equal rows.

    Args:
        tables: Rotary cosines and sines [rows, M, E].
        heard: True at keys that are real [rows, 1, 1, M]; None where all are.
        rows: Rows that attention runs in; B * P patches are spread over them.
    """
    residual = residual + branch
    images, patches, width = residual.shape
    x = normalise(residual, weights.norm1).view(rows, -1, width)
    query, key, value = (
        part.unflatten(-1, (shape.heads, -1)).transpose(1, 2) for part in apply_each(x, weights.qkv, [width] * 3)
    )
    if tables is not None:
        query, key = turn(query, *tables), turn(key, *tables)
    attended = F.scaled_dot_product_attention(query, key, value, attn_mask=heard)
    out = F.linear(attended.transpose(1, 2).flatten(-2).view(images, patches, width), *weights.out)
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
        self, blocks: Any, heads: int, dtype: torch.dtype, compiler: Callable[..., Any], *, fuse: bool
    ) -> None:
        blocks = list(blocks)
        own = [block_weights(block, dtype, fuse=fuse) for block in blocks]
        self.weights = own
        stock = {parameter.data_ptr() for block in blocks for parameter in block.parameters()}
        tensors = [
            tensor
            for weights in own
            for linear in (*weights.qkv, weights.out, *weights.up, weights.down)
            for tensor in linear
            if tensor is not None and tensor.data_ptr() not in stock
        ]
        self.own_bytes = num_bytes(*tensors)
        if not blocks:
            return
        shape = BlockShape(heads=heads, gated=is_gated(blocks[0]), activation=activation_of(blocks[0]))

        def one_block(*arguments: Any) -> tuple[Tensor, Tensor]:
            return vision_block(shape, *arguments)

        self._block = compiler(one_block)

    def __call__(
        self, index: int, residual: Tensor, branch: Tensor, tables: Any, heard: Any, rows: int
    ) -> tuple[Tensor, Tensor]:
        return self._block(residual, branch, self.weights[index], tables, heard, rows)


def is_gated(block: Any) -> bool:
    """Whether a block's MLP is gated."""
    return hasattr(block.mlp, "gate_proj") or getattr(block.mlp, "gate", None) is not None


# Towers --------------------------------------------------------------------------------------------------------------


class Encoded(NamedTuple):
    """What a tower gives: features in raster order, and attention received and keys where they were asked for."""

    x: Float[Tensor, "B N D"]
    cls_attention: Float[Tensor, "B N"] | None = None
    keys: Float[Tensor, "B N E"] | None = None


class ClipTower:
    """The CLIP or SigLIP tower of LLaVA up to the block whose features are used; later ones never run."""

    def __init__(self, backbone: Backbone, compiler: Callable[..., Any], *, fuse: bool) -> None:
        tower = backbone.model.model.vision_tower
        self.tower = getattr(tower, "vision_model", tower)
        layers = encoder_layers(tower)
        self.last = backbone.config.vision_feature_layer % (len(layers) + 1)  # blocks that run
        self.layers = layers
        heads = backbone.config.vision_config.num_attention_heads
        self.blocks = Blocks(layers[: self.last], heads, backbone.model.dtype, compiler, fuse=fuse)
        self.own_bytes = self.blocks.own_bytes

    def key(self, batch: Batch, host: dict[str, Tensor]) -> tuple[int, ...]:
        """What must be equal for two batches to run the same graph, but for the number of pictures."""
        del host
        return tuple(batch.features["pixel_values"].shape[1:])

    def fix(self, batch: Batch, needs: frozenset[str]) -> Callable[[Tensor], Encoded]:
        """The tower for pictures of this batch's shape."""
        del batch
        asked = needs & {"cls_attention", "keys"}

        def run(pixels: Tensor) -> Encoded:
            hidden = self.tower.embeddings(pixels)
            if hasattr(self.tower, "pre_layrnorm"):
                hidden = self.tower.pre_layrnorm(hidden)
            branch = torch.zeros_like(hidden)
            entered = hidden
            for index in range(self.last):
                if asked and index == self.last - 1:
                    entered = hidden + branch
                hidden, branch = self.blocks(index, hidden, branch, None, None, len(hidden))
            x = (hidden + branch)[:, 1:]  # without [CLS]
            if not asked:
                return Encoded(x)
            attention, keys = block_attention(self.layers[self.last - 1], entered)
            return Encoded(
                x,
                attention[:, 1:] if "cls_attention" in needs else None,
                keys[:, 1:] if "keys" in needs else None,
            )

        return run

    def describe(self, batch: Batch) -> dict[str, Any]:
        """What `VisualTokens` holds besides features."""
        vision = self.tower.config
        side = vision.image_size // vision.patch_size
        return {"grid": ((side, side),) * batch.num_images}


class TileTower(ClipTower):
    """LLaVA-NeXT's: the same tower over the overview and the tiles of pictures of one size, padding cut away."""

    def __init__(self, backbone: LlavaNext, compiler: Callable[..., Any], *, fuse: bool) -> None:
        super().__init__(backbone, compiler, fuse=fuse)
        self.backbone = backbone

    def key(self, batch: Batch, host: dict[str, Tensor]) -> tuple[int, ...]:
        sizes = host["image_sizes"].tolist()
        return (*super().key(batch, host), *sizes[0]) if all(size == sizes[0] for size in sizes) else ()

    def packed(self, batch: Batch) -> list[Int[Tensor, " _"]]:
        """The patch behind each placeholder of each picture, counted over its tiles; -1 is a newline."""
        sizes = batch.features["image_sizes"]
        tiles = batch.features["pixel_values"].shape[1]
        return self.backbone.packed_index([tiles] * len(sizes), sizes)

    def fix(self, batch: Batch, needs: frozenset[str]) -> Callable[[Tensor], Encoded]:
        tower, index = super().fix(batch, needs), self.packed(batch)[0]
        content = index[index >= 0]  # [N]

        def run(pixels: Tensor) -> Encoded:
            each = tower(pixels.flatten(0, 1))

            def rows(per_tile: Tensor) -> Tensor:
                return per_tile.unflatten(0, (len(pixels), -1)).flatten(1, 2)[:, content]

            return Encoded(rows(each.x), *(None if part is None else rows(part) for part in each[1:]))

        return run

    def describe(self, batch: Batch) -> dict[str, Any]:
        return self.backbone.layout(batch, self.packed(batch))


class QwenTower:
    """The tower of Qwen2-VL and Qwen2.5-VL, windows side by side as rows of one attention call.

    Windows at the border of a picture are shorter; they are padded to the longest and their padding is never heard.
    """

    def __init__(self, backbone: QwenVL, compiler: Callable[..., Any], *, fuse: bool) -> None:
        self.backbone, self.tower = backbone, backbone.tower
        heads = backbone.config.vision_config.num_heads
        self.blocks = Blocks(self.tower.blocks, heads, backbone.model.dtype, compiler, fuse=fuse)
        self.own_bytes = self.blocks.own_bytes

    def key(self, batch: Batch, host: dict[str, Tensor]) -> tuple[int, ...]:
        del batch
        grids = host["image_grid_thw"].tolist()
        return tuple(grids[0]) if all(grid == grids[0] for grid in grids) else ()

    def fix(self, batch: Batch, needs: frozenset[str]) -> Callable[[Tensor], Encoded]:
        backbone, tower, group = self.backbone, self.tower, self.backbone.group
        grid = batch.features["image_grid_thw"][:1]
        weight = tower.patch_embed.proj.weight.flatten(1)  # kernel and stride are equal: a linear map of each patch
        assert tower.patch_embed.proj.bias is None
        places = get_vision_position_ids(grid, tower.spatial_merge_size)
        cos, sin = tower.rotary_pos_emb(batch.features["pixel_values"][:1], places)  # [P, E], raster order
        rotary = (cos.float(), sin.float())
        num_patches = int(grid.prod())
        index, undo, real = window_layout(backbone, grid, num_patches)
        windows = len(index)
        within = tuple(table[index] for table in rotary)  # [windows, M, E]
        whole = tuple(table.flatten(0, 1)[None] for table in within)
        full = backbone.full_blocks
        looked_at = max(full)
        asked = needs & {"cls_attention", "keys"}

        def run(pixels: Tensor) -> Encoded:
            images = len(pixels) // num_patches
            patches = F.linear(pixels.to(weight.dtype), weight).unflatten(0, (images, num_patches))
            hidden = patches[:, index.flatten()]  # [B, windows * M, W]
            branch, entered = torch.zeros_like(hidden), hidden
            small = tuple(table.repeat(images, 1, 1) for table in within)
            large = tuple(table.expand(images, -1, -1) for table in whole)
            heard = None if real is None else real.repeat(images, 1)[:, None, None]
            heard_whole = None if real is None else real.view(1, 1, 1, -1).expand(images, -1, -1, -1)
            for number in range(len(self.blocks.weights)):
                if asked and number == looked_at:
                    entered = hidden + branch
                if number in full:
                    hidden, branch = self.blocks(number, hidden, branch, large, heard_whole, images)
                else:
                    hidden, branch = self.blocks(number, hidden, branch, small, heard, images * windows)
            x = (hidden + branch)[:, undo]  # raster order again
            x = x.reshape(images, num_patches // group, -1)
            if not asked:
                return Encoded(x)
            flat = entered[:, undo].flatten(0, 1)
            tables = tuple(table.repeat(images, 1) for table in rotary)
            attention, keys = received_attention(tower.blocks[looked_at], flat, tables, [num_patches] * images)
            return Encoded(
                x,
                attention.view(images, -1, group).mean(-1) if "cls_attention" in needs else None,
                keys.view(images, -1, group, keys.shape[-1]).mean(2) if "keys" in needs else None,
            )

        return run

    def describe(self, batch: Batch) -> dict[str, Any]:
        grid, group = batch.features["image_grid_thw"], self.backbone.group
        merge = self.tower.spatial_merge_size
        places = get_vision_position_ids(grid, merge).view(len(grid), -1, group, 2)
        sides = tuple((height // merge, width // merge) for _, height, width in grid.tolist())
        return {"grid": sides, "group": group, "coords": places}


def window_layout(
    backbone: QwenVL, grid: Int[Tensor, "1 3"], num_patches: int
) -> tuple[Int[Tensor, "R M"], Int[Tensor, " P"], Tensor | None]:
    """Raster index of each patch by window, where each raster patch stands there, and which places are real.

    The last is None where all are. Without windows the picture is one.
    """
    device = grid.device
    ordered = backbone.window_order(grid)
    if ordered is None:
        every = torch.arange(num_patches, device=device)
        return every[None], every, None
    order, cuts = ordered
    patches = (order[:, None] * backbone.group + torch.arange(backbone.group, device=device)).flatten()
    lengths = cuts.diff().tolist()
    index = pad_rows(patches.split([length for length in lengths if length > 0]), -1)
    real = index >= 0
    undo = torch.empty(num_patches, dtype=torch.int64, device=device)
    undo[index[real]] = real.flatten().nonzero()[:, 0]
    return index.clamp_min(0), undo, None if bool(real.all()) else real


def make_tower(backbone: Backbone, compiler: Callable[..., Any], *, fuse: bool) -> ClipTower | QwenTower | None:
    """The family's tower as functions; None where the fast path has none and the stock one runs."""
    if backbone.family == "llava":
        return ClipTower(backbone, compiler, fuse=fuse)
    if isinstance(backbone, LlavaNext):
        return TileTower(backbone, compiler, fuse=fuse)
    if backbone.family in ("qwen2_vl", "qwen2_5_vl"):
        assert isinstance(backbone, QwenVL)
        return QwenTower(backbone, compiler, fuse=fuse)
    return None


# Scorer and choice ---------------------------------------------------------------------------------------------------


class FastScorer:
    """A `Scorer` in the base model's precision, logits in float32: the same ranking, but for ties in rounding."""

    def __init__(self, scorer: Scorer, dtype: torch.dtype, compiler: Callable[..., Any], *, fuse: bool) -> None:
        self.spec = scorer.spec
        self.blocks = Blocks(scorer.blocks, scorer.spec.heads, dtype, compiler, fuse=fuse)
        self.norm = None if isinstance(scorer.norm, torch.nn.Identity) else norm_of(scorer.norm, dtype)
        self.head = (scorer.head.weight.detach().float()[0], scorer.head.bias.detach().float())
        self.finish = compiler(self.logits)
        self.own_bytes = self.blocks.own_bytes

    def fix(self, tokens: VisualTokens) -> Callable[[Float[Tensor, "B N D"]], Float[Tensor, "B N"]]:
        """The scorer for tokens of this shape, none of them padding."""
        angles = position_angles(tokens.coords, self.spec)
        tables = None if angles is None else (angles.cos(), angles.sin())
        nothing = torch.zeros_like(tokens.x).reshape(len(tokens), -1, self.spec.width)  # made once, never written

        def run(x: Tensor) -> Tensor:
            patches, branch = x.reshape(len(x), -1, self.spec.width), nothing
            for index in range(len(self.blocks.weights)):
                patches, branch = self.blocks(index, patches, branch, tables, None, len(patches))
            return self.finish(patches, branch, x.shape[1])

        return run

    def logits(self, residual: Tensor, branch: Tensor, num_tokens: int) -> Float[Tensor, "B N"]:
        patches = residual + branch
        if self.norm is not None:
            patches = normalise(patches, self.norm)
        logits = (patches.float() * self.head[0]).sum(-1) + self.head[1]  # as a sum it falls into the norm's kernel
        return logits.unflatten(1, (num_tokens, -1)).mean(-1)


def keep_largest(logits: Float[Tensor, "B N"], k: int) -> Int[Tensor, "B K"]:
    """Indices of the k largest logits, ascending, of equal ones the lower: `hard_topk` without a sort.

    A token's rank is the number of tokens that go before it, a comparison of all pairs that compiles into one kernel;
    the kept ones then count themselves into place.
    """
    num_tokens = logits.shape[1]
    index = torch.arange(num_tokens, device=logits.device)
    if num_tokens > RANKED_AT_ONCE:
        order = logits.sort(dim=-1, descending=True, stable=True).indices[:, :k]
        return order.sort(dim=-1).values
    this, other = logits[:, :, None], logits[:, None, :]
    before = (other > this) | ((other == this) & (index[None, :] < index[:, None]))
    kept = before.sum(-1) < k
    place = torch.where(kept, kept.cumsum(-1) - 1, -1)
    ranks = torch.arange(k, device=logits.device)
    return torch.where(place[:, None, :] == ranks[:, None], index, 0).sum(-1)  # a scatter would be a kernel of its own


def take(x: Float[Tensor, "B N D"], keep: Int[Tensor, "B K"]) -> Float[Tensor, "B K D"]:
    """The tokens that stay."""
    return x.gather(1, keep[..., None].expand(-1, -1, x.shape[-1]))
