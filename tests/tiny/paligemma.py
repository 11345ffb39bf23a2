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

from tests.tiny import HEADS, LAYERS, MLP, WIDTH, byte_tokenizer, quiet_tower, text_config

SIDE, PATCH = 56, 14


def build() -> tuple[Any, Any]:
    tokenizer = byte_tokenizer("<image>")
    image_processor = SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE})
    image_processor.image_seq_length = (SIDE // PATCH) ** 2
    processor = PaliGemmaProcessor(image_processor=image_processor, tokenizer=tokenizer)  # adds tokens of its own
    vision = SiglipVisionConfig(
        hidden_size=WIDTH,
        intermediate_size=MLP,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        image_size=SIDE,
        patch_size=PATCH,
        projection_dim=WIDTH,
        vision_use_head=False,
    )
    config = PaliGemmaConfig(
        vision_config=vision,
        text_config=GemmaConfig(**text_config(tokenizer), head_dim=WIDTH // HEADS),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        projection_dim=WIDTH,
        hidden_size=WIDTH,
    )
    return quiet_tower(PaliGemmaForConditionalGeneration(config)), processor
