"""PaliGemma in miniature: 4 x 4 tokens, no [CLS], a prefix read in both directions."""

from typing import Any

from transformers import (
    GemmaConfig,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    PaliGemmaProcessor,
    SiglipImageProcessorPil,
    SiglipVisionConfig,
)

from tests.tiny import HEADS, PATCH, SIDE, WIDTH, byte_tokenizer, quiet_tower, text_config, vision_config


def build() -> tuple[Any, Any]:
    tokenizer = byte_tokenizer("<image>")
    image_processor = SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE})
    image_processor.image_seq_length = (SIDE // PATCH) ** 2
    processor = PaliGemmaProcessor(image_processor=image_processor, tokenizer=tokenizer)  # adds tokens of its own
    vision = SiglipVisionConfig(**vision_config(projection_dim=WIDTH, vision_use_head=False))
    config = PaliGemmaConfig(
        vision_config=vision,
        text_config=GemmaConfig(**text_config(tokenizer), head_dim=WIDTH // HEADS),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        projection_dim=WIDTH,
        hidden_size=WIDTH,
    )
    return quiet_tower(PaliGemmaForConditionalGeneration(config)), processor
