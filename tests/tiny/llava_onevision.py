"""LLaVA-OneVision in miniature: an overview and tiles of 4 x 4 tokens, scaled down to at most two tiles' worth."""

from typing import Any

from transformers import (
    LlavaOnevisionConfig,
    LlavaOnevisionForConditionalGeneration,
    LlavaOnevisionImageProcessorPil,
    LlavaOnevisionProcessor,
    Qwen2Config,
    SiglipVisionConfig,
)

from diffprune.backbones.image_only import image_only
from tests.tiny import PATCH, SIDE, byte_tokenizer, chat_template, quiet_tower, text_config, vision_config

RATIO = "anyres_max_2"
PINPOINTS = [[rows * SIDE, columns * SIDE] for rows in (1, 2, 3) for columns in (1, 2, 3)]


def build() -> tuple[Any, Any]:
    tokenizer = byte_tokenizer("<image>", "<video>")
    vision = SiglipVisionConfig(**vision_config(vision_use_head=False))
    config = LlavaOnevisionConfig(
        vision_config=vision,
        text_config=Qwen2Config(**text_config(tokenizer)),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=PINPOINTS,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        vision_aspect_ratio=RATIO,
    )
    processor = image_only(LlavaOnevisionProcessor)(
        image_processor=LlavaOnevisionImageProcessorPil(
            size={"height": SIDE, "width": SIDE}, image_grid_pinpoints=PINPOINTS
        ),
        tokenizer=tokenizer,
        num_image_tokens=(SIDE // PATCH) ** 2,
        vision_feature_select_strategy="full",
        vision_aspect_ratio=RATIO,
        chat_template=chat_template("<image>"),
    )
    return quiet_tower(LlavaOnevisionForConditionalGeneration(config)), processor
