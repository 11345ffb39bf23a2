"""Three sizes of Qwen2.5-VL in miniature, for pictures of any size (`reference.py`), and how they are trained."""

from diffprune_lab.scenes.qwen.reference import (
    SPECS,
    build_model,
    build_processor,
    build_tokenizer,
    load_model,
    named_in,
)

__all__ = ["SPECS", "build_model", "build_processor", "build_tokenizer", "load_model", "named_in"]
