"""Qwen2-VL in miniature, and what the tiny Qwen models share."""

from typing import Any

from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration, Qwen2VLImageProcessorPil, Qwen2VLProcessor

from diffprune.backbones.image_only import image_only
from tests.tiny import HEADS, LAYERS, WIDTH, byte_tokenizer, chat_template, text_config

IMAGE, VIDEO, START, END = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
PATCH, MERGE = 14, 2


def build() -> tuple[Any, Any]:
    tokenizer = qwen_tokenizer()
    config = Qwen2VLConfig(
        text_config=text_config(tokenizer) | {"rope_parameters": rope()},
        vision_config={
            "depth": LAYERS,
            "embed_dim": WIDTH,
            "hidden_size": WIDTH,  # the language model's width
            "mlp_ratio": 2,
            "num_heads": HEADS,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
        },
        **special_ids(tokenizer),
    )
    return Qwen2VLForConditionalGeneration(config), processor_of(Qwen2VLProcessor, tokenizer)


def qwen_tokenizer() -> Any:
    tokenizer = byte_tokenizer(IMAGE, VIDEO, START, END)
    assert tokenizer(START + IMAGE + END)["input_ids"] == tokenizer.convert_tokens_to_ids([START, IMAGE, END])
    return tokenizer


def special_ids(tokenizer: Any) -> dict[str, int]:
    names = {
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": START,
        "vision_end_token_id": END,
    }
    return {name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}


def rope() -> dict[str, Any]:
    """Time, row and column share the eight frequencies of a head of sixteen."""
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}


def processor_of(stock: type, tokenizer: Any, patch: int = PATCH) -> Any:
    """The stock processor for pictures and text, with small pictures."""
    unit = patch * MERGE
    pixels = Qwen2VLImageProcessorPil(
        patch_size=patch,
        merge_size=MERGE,
        temporal_patch_size=2,
        size={"shortest_edge": (2 * unit) ** 2, "longest_edge": (10 * unit) ** 2},
    )
    kind = image_only(stock)
    return kind(image_processor=pixels, tokenizer=tokenizer, chat_template=chat_template(START + IMAGE + END))
