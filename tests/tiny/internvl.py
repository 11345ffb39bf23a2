"""InternVL in miniature: tiles of 4 x 4 tokens, each of 2 x 2 patches."""

from typing import Any

import torch
from transformers import (
    GotOcr2ImageProcessorPil,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLProcessor,
    InternVLVisionConfig,
    Qwen2Config,
)

from diffprune.backbones.image_only import image_only
from tests.tiny import HEADS, LAYERS, MLP, WIDTH, byte_tokenizer, chat_template, text_config

SIDE, PATCH = 56, 7
NAMED = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}


def build() -> tuple[Any, Any]:
    tokenizer = byte_tokenizer("<IMG_CONTEXT>", "<img>", "</img>", "<video>", **NAMED)
    vision = InternVLVisionConfig(
        hidden_size=WIDTH,
        intermediate_size=MLP,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        image_size=[SIDE, SIDE],
        patch_size=[PATCH, PATCH],
        layer_scale_init_value=1.0,
    )
    config = InternVLConfig(
        vision_config=vision,
        text_config=Qwen2Config(**text_config(tokenizer)),
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=16,
    )
    processor = image_only(InternVLProcessor)(
        image_processor=GotOcr2ImageProcessorPil(size={"height": SIDE, "width": SIDE}, max_patches=4),
        tokenizer=tokenizer,
        image_seq_length=16,
        chat_template=chat_template("<IMG_CONTEXT>"),
    )
    model = InternVLForConditionalGeneration(config)
    with torch.no_grad():  # starts at zero, so no place could be told from another
        model.model.vision_tower.embeddings.position_embeddings.normal_(std=0.1)
        model.model.vision_tower.embeddings.cls_token.normal_(std=0.1)
    return model, processor
