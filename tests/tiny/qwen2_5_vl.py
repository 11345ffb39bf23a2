"""Qwen2.5-VL in miniature: windows of 2 x 2 groups, so that window order differs from raster order."""

from typing import Any

from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor

from tests.tiny import HEADS, LAYERS, MLP, WIDTH, text_config
from tests.tiny.qwen2_vl import MERGE, PATCH, processor_of, qwen_tokenizer, rope, special_ids


def build() -> tuple[Any, Any]:
    tokenizer = qwen_tokenizer()
    config = Qwen2_5_VLConfig(
        text_config=text_config(tokenizer) | {"rope_parameters": rope()},
        vision_config={
            "depth": LAYERS,
            "hidden_size": WIDTH,
            "intermediate_size": MLP,
            "num_heads": HEADS,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "window_size": 2 * MERGE * PATCH,
            "fullatt_block_indexes": [LAYERS - 2],  # the last block is a windowed one
            "out_hidden_size": WIDTH,
        },
        **special_ids(tokenizer),
    )
    return Qwen2_5_VLForConditionalGeneration(config), processor_of(Qwen2_5_VLProcessor, tokenizer)
