"""LLaVA-1.5 in miniature: 4 x 4 tokens."""

from typing import Any

from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

from tests.tiny import PATCH, SIDE, WIDTH, byte_tokenizer, chat_template, text_config, vision_config


def build() -> tuple[Any, Any]:
    tokenizer = byte_tokenizer("<image>")
    image_id = tokenizer.convert_tokens_to_ids("<image>")
    vision = CLIPVisionConfig(**vision_config(projection_dim=WIDTH))
    config = LlavaConfig(
        vision_config=vision,
        text_config=LlamaConfig(**text_config(tokenizer)),
        image_token_index=image_id,
        image_token_id=image_id,
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        image_seq_length=(SIDE // PATCH) ** 2,
    )
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=chat_template("<image>"),
    )
    return LlavaForConditionalGeneration(config), processor
