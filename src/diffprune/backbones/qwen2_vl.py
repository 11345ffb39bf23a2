"""Qwen2-VL: native resolution, full attention in every vision block, 2 x 2 patches per language token, M-RoPE."""

from typing import Any, ClassVar

from diffprune.backbones._qwen_vision import QwenVL
from diffprune.backbones.base import Preset
from diffprune.registry import BACKBONES

NUM_VISUAL = "1 per 28 x 28 pixels"


@BACKBONES.register("qwen2_vl")
class Qwen2VL(QwenVL):
    family: ClassVar[str] = "qwen2_vl"
    presets: ClassVar[dict[str, Preset]] = {
        "qwen2-vl-2b": Preset(hub_id="Qwen/Qwen2-VL-2B-Instruct", num_visual=NUM_VISUAL),
        "qwen2-vl-7b": Preset(hub_id="Qwen/Qwen2-VL-7B-Instruct", num_visual=NUM_VISUAL),
    }

    compiled_tower: ClassVar[str | None] = "diffprune.fast.towers:QwenTower"

    @classmethod
    def block_widths(cls, vision_config: Any) -> tuple[int, int]:
        """`hidden_size` of this config is the language model's width."""
        return vision_config.embed_dim, int(vision_config.embed_dim * vision_config.mlp_ratio)
