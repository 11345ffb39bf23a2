"""Qwen2.5-VL: as Qwen2-VL, but most vision blocks attend within windows, so the tower runs groups in window order."""

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from jaxtyping import Int
from torch import Tensor
from transformers.vision_utils import get_vision_window_index

from diffprune.backbones._presets import SMALL, SMALL_VOCABULARY, byte_tokenizer, chat, end_tokens
from diffprune.backbones._qwen_vision import QwenVL
from diffprune.backbones.base import Preset
from diffprune.backbones.image_only import image_only
from diffprune.nn import BlockSpec
from diffprune.registry import BACKBONES

NUM_VISUAL = "1 per 28 x 28 pixels"

TEXT: dict[str, dict[str, Any]] = {
    "3b": {
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
    },
    "7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    },
    "32b": {
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "vocab_size": 152064,
    },
}
TOWER_MLP = {"3b": 3420, "7b": 3420, "32b": 3456}  # of the vision tower
_IMAGE, _VIDEO, _START, _END = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"


def describe(size: str, tiny: bool) -> tuple[Any, Any]:
    """Configuration and processor of Qwen2.5-VL."""
    from transformers import Qwen2_5_VLConfig

    tokenizer = byte_tokenizer(_IMAGE, _START, _END, _VIDEO)
    ids = tokenizer.convert_tokens_to_ids
    tied = size == "3b"
    text = (SMALL | {"num_key_value_heads": 2, "vocab_size": SMALL_VOCABULARY} if tiny else TEXT[size]) | {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [2, 3, 3] if tiny else [16, 24, 24],
        },
        "use_sliding_window": False,
        "tie_word_embeddings": tied,
        **end_tokens(tokenizer),
    }
    vision: dict[str, Any] = {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112}
    if tiny:
        vision |= {"depth": 3, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4}
        vision |= {"out_hidden_size": 64, "fullatt_block_indexes": [2]}
    else:
        vision |= {"depth": 32, "hidden_size": 1280, "intermediate_size": TOWER_MLP[size], "num_heads": 16}
        vision |= {"out_hidden_size": TEXT[size]["hidden_size"], "fullatt_block_indexes": [7, 15, 23, 31]}
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=ids(_IMAGE),
        video_token_id=ids(_VIDEO),
        vision_start_token_id=ids(_START),
        vision_end_token_id=ids(_END),
        tie_word_embeddings=tied,
    )
    return config, make_processor(tokenizer)


def make_processor(tokenizer: Any) -> Any:
    """The stock processor for pictures and text."""
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessorPil

    sizes = {"shortest_edge": 4 * 28 * 28, "longest_edge": 16384 * 28 * 28}
    images = Qwen2VLImageProcessorPil(patch_size=14, merge_size=2, temporal_patch_size=2, size=sizes)
    kind: Any = image_only(Qwen2_5_VLProcessor)
    return kind(image_processor=images, tokenizer=tokenizer, chat_template=chat(_START + _IMAGE + _END))


@BACKBONES.register("qwen2_5_vl")
class Qwen25VL(QwenVL):
    family: ClassVar[str] = "qwen2_5_vl"
    presets: ClassVar[dict[str, Preset]] = {
        "qwen2.5-vl-3b": Preset(
            hub_id="Qwen/Qwen2.5-VL-3B-Instruct", num_visual=NUM_VISUAL, describe=partial(describe, "3b")
        ),
        "qwen2.5-vl-7b": Preset(
            hub_id="Qwen/Qwen2.5-VL-7B-Instruct", num_visual=NUM_VISUAL, describe=partial(describe, "7b")
        ),
        "qwen2.5-vl-32b": Preset(
            hub_id="Qwen/Qwen2.5-VL-32B-Instruct", num_visual=NUM_VISUAL, describe=partial(describe, "32b")
        ),
    }

    compiled_tower: ClassVar[str | None] = "diffprune.fast.towers:QwenTower"

    @classmethod
    def tower_block(cls, config: Any) -> BlockSpec:
        return replace(super().tower_block(config), norm="rms", gated=True)

    def window_order(self, grid: Int[Tensor, "B 3"]) -> tuple[Int[Tensor, " groups"], Int[Tensor, " cuts"]]:
        tower = self.tower
        order, cuts = get_vision_window_index(grid, tower.spatial_merge_size, tower.window_size, tower.patch_size)
        return order.to(grid.device), cuts

    @property
    def full_blocks(self) -> frozenset[int]:
        return frozenset(self.tower.fullatt_block_indexes)
