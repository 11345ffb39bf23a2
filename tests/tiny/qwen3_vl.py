"""Qwen3-VL in miniature: the first two vision blocks feed DeepStack."""

from typing import Any

from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration, Qwen3VLProcessor

from tests.tiny import HEADS, LAYERS, MLP, WIDTH, text_config
from tests.tiny.qwen2_vl import MERGE, processor_of, qwen_tokenizer, rope, special_ids

PATCH = 16


def build() -> tuple[Any, Any]:
    tokenizer = qwen_tokenizer()
    config = Qwen3VLConfig(
        text_config=text_config(tokenizer) | {"rope_parameters": rope(), "head_dim": WIDTH // HEADS},
        vision_config={
            "depth": LAYERS,
            "hidden_size": WIDTH,
            "intermediate_size": MLP,
            "num_heads": HEADS,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "out_hidden_size": WIDTH,
            "num_position_embeddings": 36,
            "deepstack_visual_indexes": [0, 1],
        },
        **special_ids(tokenizer),
    )
    return Qwen3VLForConditionalGeneration(config), processor_of(Qwen3VLProcessor, tokenizer, PATCH)
