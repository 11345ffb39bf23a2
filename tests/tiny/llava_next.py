"""LLaVA-NeXT in miniature: an overview and tiles of 4 x 4 tokens."""

from typing import Any

from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    LlavaNextImageProcessorPil,
    LlavaNextProcessor,
)

from tests.tiny import PATCH, SIDE, WIDTH, byte_tokenizer, chat_template, text_config, vision_config

PINPOINTS = [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE], [3 * SIDE, SIDE], [SIDE, 3 * SIDE]]


def build() -> tuple[Any, Any]:
    tokenizer = byte_tokenizer("<image>")
    image_id = tokenizer.convert_tokens_to_ids("<image>")
    vision = CLIPVisionConfig(**vision_config(projection_dim=WIDTH))
    config = LlavaNextConfig(
        vision_config=vision,
        text_config=LlamaConfig(**text_config(tokenizer)),
        image_token_index=image_id,
        image_token_id=image_id,
        image_grid_pinpoints=PINPOINTS,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
    )
    processor = LlavaNextProcessor(
        image_processor=LlavaNextImageProcessorPil(
            size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}, image_grid_pinpoints=PINPOINTS
        ),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=chat_template("<image>"),
    )
    return LlavaNextForConditionalGeneration(config), processor
