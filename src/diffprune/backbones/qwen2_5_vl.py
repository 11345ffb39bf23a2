"""Qwen2.5-VL: as Qwen2-VL, but most vision blocks attend within windows, so the tower runs groups in window order."""

from typing import ClassVar

from jaxtyping import Float, Int
from torch import Tensor
from transformers.vision_utils import get_vision_window_index

from diffprune.backbones._qwen_vision import QwenVL
from diffprune.backbones.base import Preset
from diffprune.registry import BACKBONES

NUM_VISUAL = "1 per 28 x 28 pixels"


@BACKBONES.register("qwen2_5_vl")
class Qwen25VL(QwenVL):
    family: ClassVar[str] = "qwen2_5_vl"
    presets: ClassVar[dict[str, Preset]] = {
        "qwen2.5-vl-3b": Preset(hub_id="Qwen/Qwen2.5-VL-3B-Instruct", num_visual=NUM_VISUAL),
        "qwen2.5-vl-7b": Preset(hub_id="Qwen/Qwen2.5-VL-7B-Instruct", num_visual=NUM_VISUAL),
        "qwen2.5-vl-32b": Preset(hub_id="Qwen/Qwen2.5-VL-32B-Instruct", num_visual=NUM_VISUAL),
    }

    def embed_patches(self, pixels: Tensor, grid: Int[Tensor, "B 3"]) -> Float[Tensor, "P W"]:
        return self.tower.patch_embed(pixels)

    def window_order(self, grid: Int[Tensor, "B 3"]) -> tuple[Int[Tensor, " groups"], Int[Tensor, " cuts"]]:
        tower = self.tower
        order, cuts = get_vision_window_index(grid, tower.spatial_merge_size, tower.window_size, tower.patch_size)
        return order.to(grid.device), cuts

    @property
    def full_blocks(self) -> frozenset[int]:
        return frozenset(self.tower.fullatt_block_indexes)
