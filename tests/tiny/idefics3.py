"""Idefics3 in miniature: tiles of 4 x 4 tokens, each of 2 x 2 patches; `parts` serves SmolVLM as well."""

from typing import Any

from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    LlamaConfig,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import (
    Idefics3ImageProcessorPil,  # oldest: not at the top
)

from tests.tiny import HEADS, LAYERS, MLP, WIDTH, byte_tokenizer, chat_template, text_config

SIDE, PATCH, SCALE = 56, 7, 2
TAGS = ["<fake_token_around_image>", "<end_of_utterance>", "<global-img>"]
TAGS += [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]


def parts(
    config_class: type, image_processor_class: type, processor_class: type = Idefics3Processor
) -> tuple[Any, Any]:
    """(config, processor) of a family built this way."""
    tokenizer = byte_tokenizer("<image>", *TAGS)
    config = config_class(
        vision_config=dict(
            hidden_size=WIDTH,
            intermediate_size=MLP,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            image_size=SIDE,
            patch_size=PATCH,
        ),
        text_config=LlamaConfig(**text_config(tokenizer)),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
        scale_factor=SCALE,
    )
    processor = processor_class(
        image_processor=image_processor_class(size={"longest_edge": 2 * SIDE}, max_image_size={"longest_edge": SIDE}),
        tokenizer=tokenizer,
        image_seq_len=(SIDE // PATCH // SCALE) ** 2,
        chat_template=chat_template("<image>"),
    )
    return config, processor


def build() -> tuple[Any, Any]:
    config, processor = parts(Idefics3Config, Idefics3ImageProcessorPil)
    return Idefics3ForConditionalGeneration(config), processor
