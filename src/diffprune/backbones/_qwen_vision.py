"""What Qwen2-VL, Qwen2.5-VL and Qwen3-VL share: a native-resolution tower, 2 x 2 groups, three-row positions.

The tower's forward ends with the merger on every group. Here its own parts are called one by one instead, so that the
merger runs on kept groups alone. P counts patches over all images, group after group in raster order; W is their width.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int, UInt8
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize
from transformers.models.qwen2_vl.modeling_qwen2_vl import apply_rotary_pos_emb_vision
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids

from diffprune.backbones._clip import grid_boxes
from diffprune.backbones.base import Backbone, with_needs
from diffprune.backbones.features import Layout
from diffprune.backbones.forms import Form, smaller_sizes
from diffprune.backbones.processors import Picture, by_size, normalise
from diffprune.backbones.prompts import Batch
from diffprune.nn import BlockSpec
from diffprune.ops import pad_rows
from diffprune.types import LMInputs, VisualTokens

QUERY_CHUNK = 256  # queries whose attention rows are held at a time; never a whole P x P map


class QwenVL(Backbone):
    """A Qwen vision-language model: plain patches and full attention in every block, unless a family says otherwise."""

    provides: ClassVar[frozenset[str]] = frozenset({"projected", "text", "cls_attention", "keys"})
    sequence_features: ClassVar[Mapping[str, int]] = {"mm_token_type_ids": 0}
    plain_positions: ClassVar[bool] = False
    picture_features: ClassVar[tuple[str, ...]] = ("image_grid_thw",)

    # ------------------------------------------------------------------------------------- what a family says

    def embed_patches(self, pixels: Tensor, grid: Int[Tensor, "B 3"]) -> Float[Tensor, "P W"]:
        """What the first block takes."""
        return self.tower.patch_embed(pixels)

    def window_order(self, grid: Int[Tensor, "B 3"]) -> tuple[Int[Tensor, " groups"], Int[Tensor, " cuts"]] | None:
        """Group that stands at each place while the blocks run, and where the windows begin; None for raster order."""
        return None

    @property
    def full_blocks(self) -> frozenset[int]:
        """Blocks in which a patch attends to its whole image; default: all."""
        return frozenset(range(len(self.tower.blocks)))

    @property
    def plane_blocks(self) -> tuple[int, ...]:
        """Blocks whose output is kept as a further plane of features."""
        return ()

    @classmethod
    def block_widths(cls, vision_config: Any) -> tuple[int, int]:
        """Features of a patch, and hidden ones of the MLP."""
        return vision_config.hidden_size, vision_config.intermediate_size

    @classmethod
    def tower_block(cls, config: Any) -> BlockSpec:
        vision = getattr(config, "vision_config", config)
        theta = (getattr(vision, "rope_parameters", None) or {}).get("rope_theta", 10000.0)
        width, mlp_width = cls.block_widths(vision)
        return BlockSpec(
            width=width,
            heads=vision.num_heads,
            mlp_width=mlp_width,
            activation=vision.hidden_act,
            eps=1e-6,
            rotary=float(theta),
        )

    # ------------------------------------------------------------------------------------- the cut

    @property
    def tower(self) -> Any:
        return self.model.model.visual

    @property
    def group(self) -> int:
        """Patches in one language token."""
        return int(self.config.vision_config.spatial_merge_size) ** 2

    def vision_modules(self) -> dict[str, nn.Module]:
        return {"visual": self.tower}  # the merger is a part of it

    @torch.no_grad()
    def encode(self, batch: Batch, needs: frozenset[str] = frozenset()) -> VisualTokens:
        grid, group = batch.features["image_grid_thw"], self.group
        last, looked_at = len(self.tower.blocks) - 1, max(self.full_blocks)
        asked = needs & {"cls_attention", "keys"}
        wanted = {last, *self.plane_blocks} | ({looked_at - 1} if asked else set())
        outputs, rotary = self.run_blocks(batch.features["pixel_values"], grid, wanted)
        counts = (grid.prod(-1) // group).tolist()

        def rows(patches: Float[Tensor, "P W"]) -> Float[Tensor, "B N D"]:
            return pad_rows(patches.reshape(-1, group * patches.shape[-1]).split(counts))

        extra: dict[str, Tensor] = {}
        if asked:
            images = [count * group for count in counts]
            attention, keys = received_attention(self.tower.blocks[looked_at], outputs[looked_at - 1], rotary, images)
            by_group = {
                "cls_attention": attention.unflatten(0, (-1, group)).mean(1),
                "keys": keys.unflatten(0, (-1, group)).mean(1),
            }
            extra = {name: pad_rows(by_group[name].split(counts)) for name in asked}
        merge = self.config.vision_config.spatial_merge_size
        places = get_vision_position_ids(grid, merge)  # [P, 2]
        sides = tuple((int(height) // merge, int(width) // merge) for _, height, width in grid.tolist())
        known = zip(batch.sizes, sides, strict=True) if batch.sizes else ()  # sizes, and with them boxes
        boxes = [stretched_boxes(size, side) for size, side in known]
        x = rows(outputs[last])
        tokens = VisualTokens(
            x=x,
            mask=pad_rows([torch.ones(count, dtype=torch.bool, device=x.device) for count in counts]),
            grid=sides,
            group=group,
            coords=pad_rows(places.unflatten(0, (-1, group)).split(counts)),
            seeds=batch.seeds,
            boxes=pad_rows(boxes).to(x.device) if boxes else None,
            planes=tuple(rows(outputs[index]) for index in self.plane_blocks),
            **extra,
        )
        return with_needs(self, batch, tokens, needs)

    def pictures_of(self, batch: Batch, images: Sequence[int]) -> Batch:
        grid = batch.features["image_grid_thw"]
        patches = batch.features["pixel_values"].split(grid.prod(-1).tolist())
        own = {"pixel_values": torch.cat([patches[image] for image in images]), "image_grid_thw": grid[list(images)]}
        return batch.only(images, own)

    def run_blocks(
        self, pixels: Tensor, grid: Int[Tensor, "B 3"], wanted: set[int]
    ) -> tuple[dict[int, Float[Tensor, "P W"]], tuple[Tensor, Tensor]]:
        """Outputs of the wanted blocks (-1 is what the first one takes) and the rotary tables, all in raster order."""
        tower, group = self.tower, self.group
        hidden = self.embed_patches(pixels, grid)
        rotary = tower.rotary_pos_emb(hidden, get_vision_position_ids(grid, tower.spatial_merge_size))
        whole = get_vision_cu_seqlens(grid)
        windows = self.window_order(grid)
        turned: Any = rotary
        cuts = whole
        undo = None
        if windows is not None:
            order, cuts = windows
            undo = order.argsort()
            hidden = take_groups(hidden, order, group)
            turned = tuple(take_groups(table, order, group) for table in rotary)
        outputs = {-1: hidden} if -1 in wanted else {}
        images, parts = by_length(whole), by_length(cuts)
        for index, block in enumerate(tower.blocks):
            hidden = run_block(block, hidden, turned, images if index in self.full_blocks else parts)
            if index in wanted:
                outputs[index] = hidden
        if undo is not None:
            outputs = {index: take_groups(output, undo, group) for index, output in outputs.items()}
        return outputs, rotary

    def project(self, x: Float[Tensor, "B K D"]) -> Float[Tensor, "B K L"]:
        return self.merge(self.tower.merger, x)

    def merge(self, merger: nn.Module, x: Float[Tensor, "B K D"]) -> Float[Tensor, "B K L"]:
        """One language token for each group; a merger takes one row per patch."""
        patches = x.reshape(-1, x.shape[-1] // self.group).contiguous()
        return merger(patches).unflatten(0, x.shape[:2])

    # ------------------------------------------------------------------------------------- prompts and positions

    def process(self, pictures: list[list[Image.Image]], prompts: list[str]) -> dict[str, Tensor]:
        for prompt in prompts:
            if self.image_token * 2 in prompt:
                raise ValueError(
                    f"two placeholders {self.image_token} stand side by side, and this family cannot separate "
                    f"such images; write {self.placeholder_prompt(1)} for each"
                )
        return super().process(pictures, prompts)

    def picture_layout(self, features: Mapping[str, Tensor]) -> Layout:
        grid, patch = features["image_grid_thw"].tolist(), self.config.vision_config.patch_size
        placeholders = [time * rows * columns // self.group for time, rows, columns in grid]
        return Layout(placeholders, [(columns * patch, rows * patch) for _, rows, columns in grid])

    def scaled(self, size: tuple[int, int], least: int | None = None) -> tuple[int, int]:
        """(height, width) to which the processor scales a picture of (width, height).

        Args:
            least: Pixels below which it makes pictures larger; default: its own setting.
        """
        processor, (width, height) = self.processor.image_processor, size
        limits, factor = dict(processor.size), processor.patch_size * processor.merge_size
        pixels = {"min_pixels": least or limits["shortest_edge"], "max_pixels": limits["longest_edge"]}
        height, width = smart_resize(height, width, factor=factor, **pixels)
        return height, width

    def keeps_size(self, size: tuple[int, int]) -> bool:
        return self.scaled(size) == size[::-1]

    def forms(self, size: tuple[int, int], *, alone: bool = True) -> Iterator[Form]:
        """The picture as it is, then of fewer pixels, with no smallest number of them in the processor's way."""
        processor = self.processor.image_processor
        token = (processor.patch_size * processor.merge_size) ** 2  # pixels of one
        yield Form(size, math.prod(self.scaled(size)) // token)
        limits = dict(processor.size) | {"shortest_edge": token}
        given = {key: limits[key] for key in ("shortest_edge", "longest_edge")}
        for form in smaller_sizes(size, lambda size: math.prod(self.scaled(size, token)) // token):
            yield replace(form, setting=("size", type(processor.size)(**given)))

    def pixel_features(self, pictures: Sequence[Picture]) -> dict[str, Tensor]:
        """Patches, group after group."""
        processor = self.processor.image_processor
        patch, merge, frames = processor.patch_size, processor.merge_size, processor.temporal_patch_size

        def cut(pixels: UInt8[Tensor, "B 3 H W"]) -> Float[Tensor, "B P E"]:
            values = normalise(processor, pixels)
            split = values.unflatten(3, (-1, merge, patch)).unflatten(2, (-1, merge, patch))
            groups = split.permute(0, 2, 5, 3, 6, 1, 4, 7)  # [B, rows, columns, merge, merge, 3, patch, patch]
            still = groups[:, :, :, :, :, :, None].expand(*groups.shape[:6], frames, *groups.shape[6:])
            return still.flatten(5).flatten(1, 4)

        grid = [[1, picture.shape[-2] // patch, picture.shape[-1] // patch] for picture in pictures]
        return {
            "pixel_values": torch.cat(by_size(pictures, cut)),
            "image_grid_thw": torch.tensor(grid, device=pictures[0].device),
        }

    def placeholder_prompt(self, num_images: int) -> str:
        start, end = (
            self.tokenizer.convert_ids_to_tokens(int(token))
            for token in (self.config.vision_start_token_id, self.config.vision_end_token_id)
        )
        return f"{start}{self.image_token}{end}" * num_images

    def positions(self, batch: Batch) -> Int[Tensor, "*R B T"]:
        """Time, row and column of every token of the unpruned sequence, from its ids alone.

        The offset that the model keeps between calls (`rope_deltas`) is neither read nor written.
        """
        ids = batch.features["input_ids"]
        where, _ = self.model.model.get_rope_index(
            ids,
            mm_token_type_ids=(ids == self.image_token_id).int(),
            image_grid_thw=batch.features.get("image_grid_thw"),
            attention_mask=batch.features["attention_mask"],
        )
        return where

    def generation_positions(self, lm: LMInputs) -> Int[Tensor, "*R B T"]:
        """A row in front that counts without gaps: `generate` builds its mask from it and turns by the other three."""
        counted = (lm.attention_mask.cumsum(-1) - 1).clamp_min(0)
        return torch.cat([counted[None], lm.position_ids])


def by_length(cuts: Int[Tensor, " cuts"]) -> list[Int[Tensor, "_ _"]]:
    """Patches of every segment between two cuts, one row each; segments of one length share a tensor."""
    ends: list[int] = cuts.tolist()
    starts: dict[int, list[int]] = {}
    for start, end in pairwise(ends):
        if end > start:
            starts.setdefault(end - start, []).append(start)
    return [
        torch.tensor(first, device=cuts.device)[:, None] + torch.arange(length, device=cuts.device)
        for length, first in starts.items()
    ]


def run_block(
    block: Any, hidden: Float[Tensor, "P W"], rotary: tuple[Tensor, Tensor], segments: Sequence[Int[Tensor, "_ _"]]
) -> Float[Tensor, "P W"]:
    """The block's own parts with attention inside each segment, all segments of one length at once.

    The block itself calls attention once per window, thousands of times for a batch of pictures.
    """
    attention = block.attn
    query, key, value = attention.qkv(block.norm1(hidden)).unflatten(-1, (3, attention.num_heads, -1)).unbind(1)
    query, key = apply_rotary_pos_emb_vision(query, key, *rotary)  # [P, H, W / H]
    attended = torch.empty_like(query)
    for rows in segments:
        q, k, v = (states[rows].transpose(1, 2) for states in (query, key, value))  # [S, H, M, W / H]
        within = F.scaled_dot_product_attention(q, k, v, scale=attention.scaling)
        attended[rows] = within.transpose(1, 2).to(attended.dtype)
    hidden = hidden + attention.proj(attended.flatten(1))
    return hidden + block.mlp(block.norm2(hidden))


def take_groups(patches: Float[Tensor, "P W"], order: Int[Tensor, " groups"], group: int) -> Float[Tensor, "P W"]:
    """Groups in another order, the patches inside each as they were."""
    return patches.unflatten(0, (-1, group))[order].flatten(0, 1)


def stretched_boxes(size: tuple[int, int], side: tuple[int, int]) -> Float[Tensor, "N 4"]:
    """Where each group looks: the processor stretches the whole picture to full groups and crops nothing."""
    (width, height), (rows, columns) = size, side
    return grid_boxes(torch.arange(columns + 1) * (width / columns), torch.arange(rows + 1) * (height / rows))


def received_attention(
    block: Any, hidden: Float[Tensor, "P W"], rotary: tuple[Tensor, Tensor], images: Sequence[int]
) -> tuple[Float[Tensor, " P"], Float[Tensor, "P W"]]:
    """Attention each patch receives within its image, mean over heads and queries, and the keys before rotation.

    The tower has no [CLS] whose row could say what matters. Computed from the block's own projections, a few queries at
    a time.
    """
    attention = block.attn
    heads = attention.num_heads
    query, key, _ = attention.qkv(block.norm1(hidden)).unflatten(-1, (3, heads, -1)).unbind(1)  # [P, H, W / H]
    turned_query, turned_key = apply_rotary_pos_emb_vision(query, key, *rotary)
    received = []
    for q, k in zip(turned_query.split(list(images)), turned_key.split(list(images)), strict=True):
        q, k = q.transpose(0, 1), k.permute(1, 2, 0)  # [H, Q, W / H], [H, W / H, Q]
        total = torch.zeros(k.shape[-1], dtype=torch.float32, device=k.device)
        for some in q.split(QUERY_CHUNK, dim=1):
            weights = torch.softmax((some @ k).float() * attention.scaling, dim=-1)
            total += weights.mean(0).sum(0)
        received.append(total / k.shape[-1])
    return torch.cat(received), key.flatten(1)
