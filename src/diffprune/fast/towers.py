"""Vision towers as functions of pixels, fixed to one picture shape.

What depends on the shape alone (rotary tables, the order of windows, masks) is computed once and kept. A tower is given
`make_blocks`, so it knows nothing of how blocks are compiled, and a family may bring a tower of its own.
"""

import importlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.vision_utils import get_vision_position_ids

from diffprune.backbones._anyres import sizes_of, tile_grid, unpadded
from diffprune.backbones._clip import block_attention, encoder_layers
from diffprune.backbones._qwen_vision import QwenVL, received_attention
from diffprune.backbones.base import Backbone
from diffprune.backbones.llava_next import LlavaNext
from diffprune.backbones.llava_onevision import LlavaOnevision
from diffprune.backbones.prompts import Batch


class Encoded(NamedTuple):
    """What a tower gives: features in raster order, and attention received and keys where they were asked for."""

    x: Float[Tensor, "B N D"]
    cls_attention: Float[Tensor, "B N"] | None = None
    keys: Float[Tensor, "B N E"] | None = None


class BlockParts(NamedTuple):
    """The modules of one pre-norm block."""

    norms: tuple[nn.Module, nn.Module]  # before attention, before the MLP
    qkv: tuple[nn.Module, ...]  # one map of all three, or three
    out: nn.Module
    up: tuple[nn.Module, ...]  # gate and up where the MLP is gated
    down: nn.Module
    activation: Callable[[Tensor], Tensor]


Parts = tuple[tuple[int, int], ...]  # what patches attend within: so many parts of a row of that length, in order
# A stack of blocks over B rows of P patches: `stack(index, residual, branch, rotary tables, parts)`.
MakeBlocks = Callable[[Sequence[BlockParts], int], Any]


@runtime_checkable
class Tower(Protocol):
    """A vision tower whose stages can be captured; `own_bytes` are those of private copies of weights."""

    own_bytes: int

    def key(self, batch: Batch, host: dict[str, Tensor]) -> tuple[int, ...]:
        """What must be equal for two batches to run the same graph, but for the number of pictures; () for none."""
        ...

    def fix(self, batch: Batch, needs: frozenset[str]) -> Callable[[Tensor], Encoded]:
        """The tower for pictures of this batch's shape."""
        ...

    def describe(self, batch: Batch) -> dict[str, Any]:
        """What `VisualTokens` holds besides features."""
        ...


def tower_class(backbone: Backbone) -> Callable[[Any, MakeBlocks], Tower] | None:
    """What makes the tower that the family names; None where there is nothing to compile and the stock one runs."""
    if backbone.compiled_tower is None:
        return None
    module, _, name = backbone.compiled_tower.partition(":")
    return getattr(importlib.import_module(module), name)


def clip_block(block: Any) -> BlockParts:
    """A block of CLIP or SigLIP."""
    attention, mlp = block.self_attn, block.mlp
    return BlockParts(
        norms=(block.layer_norm1, block.layer_norm2),
        qkv=(attention.q_proj, attention.k_proj, attention.v_proj),
        out=attention.out_proj,
        up=(mlp.fc1,),
        down=mlp.fc2,
        activation=mlp.activation_fn,
    )


def qwen_block(block: Any) -> BlockParts:
    """A block of Qwen2-VL (plain MLP) or Qwen2.5-VL (gated)."""
    mlp, is_gated = block.mlp, hasattr(block.mlp, "gate_proj")
    return BlockParts(
        norms=(block.norm1, block.norm2),
        qkv=(block.attn.qkv,),
        out=block.attn.proj,
        up=(mlp.gate_proj, mlp.up_proj) if is_gated else (mlp.fc1,),
        down=mlp.down_proj if is_gated else mlp.fc2,
        activation=mlp.act_fn if is_gated else mlp.act,
    )


class ClipTower:
    """The CLIP or SigLIP tower of LLaVA up to the block whose features are used; later ones never run."""

    def __init__(self, backbone: Backbone, make_blocks: MakeBlocks) -> None:
        tower = backbone.model.model.vision_tower
        self.tower = getattr(tower, "vision_model", tower)
        layers = encoder_layers(tower)
        self.last = backbone.config.vision_feature_layer % (len(layers) + 1)  # blocks that run
        self.skip = int(getattr(backbone.config, "vision_feature_select_strategy", "default") == "default")  # [CLS]
        self.layers = layers
        heads = backbone.config.vision_config.num_attention_heads
        self.blocks = make_blocks([clip_block(layer) for layer in layers[: self.last]], heads)
        self.own_bytes = self.blocks.own_bytes

    def key(self, batch: Batch, host: dict[str, Tensor]) -> tuple[int, ...]:
        del host
        return tuple(batch.features["pixel_values"].shape[1:])

    def fix(self, batch: Batch, needs: frozenset[str]) -> Callable[[Tensor], Encoded]:
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
                hidden, branch = self.blocks(index, hidden, branch, None, ((1, hidden.shape[1]),))
            x = (hidden + branch)[:, self.skip :]
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
        vision = self.tower.config
        side = vision.image_size // vision.patch_size
        return {"grid": ((side, side),) * batch.num_images}


class TileTower(ClipTower):
    """The tower of LLaVA-NeXT over the overview and the tiles of pictures of one size, padding cut away."""

    def __init__(self, backbone: LlavaNext, make_blocks: MakeBlocks) -> None:
        super().__init__(backbone, make_blocks)
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


class ScaledTileTower(ClipTower):
    """The tower and the connector of LLaVA-OneVision over pictures of one size, each alone in its prompt.

    The tiles are projected, joined to one large view, its padding is cut away and it is scaled down where it is too
    large: what the model's own packing does picture by picture, here for all pictures at once.
    """

    def __init__(self, backbone: LlavaOnevision, make_blocks: MakeBlocks) -> None:
        super().__init__(backbone, make_blocks)
        self.backbone = backbone

    def key(self, batch: Batch, host: dict[str, Tensor]) -> tuple[int, ...]:
        sizes = host["image_sizes"].tolist()
        return (*super().key(batch, host), *sizes[0]) if all(size == sizes[0] for size in sizes) else ()

    def fix(self, batch: Batch, needs: frozenset[str]) -> Callable[[Tensor], Encoded]:
        tower, project, side = (
            super().fix(batch, needs),
            self.backbone.model.model.multi_modal_projector,
            self.backbone.side,
        )
        (size,), config = sizes_of({"image_sizes": batch.features["image_sizes"][:1]}), self.backbone.config
        tile = config.vision_config.image_size
        tile_rows, tile_columns = tile_grid(size, config.image_grid_pinpoints, tile)
        whole = unpadded(size, config.image_grid_pinpoints, tile, side)
        view = self.backbone.view(size)
        top, left = (tile_rows * side - whole.rows) // 2, (tile_columns * side - whole.columns) // 2

        def run(pixels: Tensor) -> Encoded:
            each = project(tower(pixels.flatten(0, 1)).x).unflatten(0, (len(pixels), -1))  # [B, tiles, P, L]
            tiles = each[:, 1:].unflatten(2, (side, side)).unflatten(1, (tile_rows, tile_columns))
            joined = tiles.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)  # [B, L, rows, columns]
            joined = joined[:, :, top : top + whole.rows, left : left + whole.columns]
            if (view.rows, view.columns) != (whole.rows, whole.columns):
                joined = F.interpolate(joined, (view.rows, view.columns), mode="bilinear")
            return Encoded(torch.cat([each[:, 0], joined.flatten(2).transpose(1, 2)], dim=1))

        return run

    def describe(self, batch: Batch) -> dict[str, Any]:
        tokens = self.backbone.encode(batch)
        return {"grid": tokens.grid, "segment": tokens.segment, "slots": tokens.slots, "boxes": tokens.boxes}


class QwenTower:
    """The tower of Qwen2-VL and Qwen2.5-VL, windows of one length side by side as rows of one attention call.

    Windows at the border of a picture are shorter: they have calls of their own, so that nothing is padded or masked.
    """

    def __init__(self, backbone: QwenVL, make_blocks: MakeBlocks) -> None:
        self.backbone, self.tower = backbone, backbone.tower
        heads = backbone.config.vision_config.num_heads
        self.blocks = make_blocks([qwen_block(block) for block in self.tower.blocks], heads)
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
        order, parts = window_layout(backbone, grid, num_patches)
        undo, whole = order.argsort(), ((1, num_patches),)
        turned = tuple(table[order][None] for table in rotary)  # [1, P, E]
        full = backbone.full_blocks
        looked_at = max(full)
        asked = needs & {"cls_attention", "keys"}

        def run(pixels: Tensor) -> Encoded:
            images = len(pixels) // num_patches
            patches = F.linear(pixels.to(weight.dtype), weight).unflatten(0, (images, num_patches))
            hidden = patches[:, order]
            branch, entered = torch.zeros_like(hidden), hidden
            for number in range(len(self.blocks.weights)):
                if asked and number == looked_at:
                    entered = hidden + branch
                hidden, branch = self.blocks(number, hidden, branch, turned, whole if number in full else parts)
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


def window_layout(backbone: QwenVL, grid: Int[Tensor, "1 3"], num_patches: int) -> tuple[Int[Tensor, " P"], Parts]:
    """Raster index of the patch at each place, window after window, the longest windows first, and their lengths.

    Without windows the picture is one.
    """
    ordered = backbone.window_order(grid)
    if ordered is None:
        return torch.arange(num_patches, device=grid.device), ((1, num_patches),)
    groups, cuts = ordered
    patches = (groups[:, None] * backbone.group + torch.arange(backbone.group, device=grid.device)).flatten()
    windows = [window for window in patches.split(cuts.diff().tolist()) if len(window)]
    windows.sort(key=len, reverse=True)
    lengths = Counter(map(len, windows))
    return torch.cat(windows), tuple((count, length) for length, count in lengths.items())
