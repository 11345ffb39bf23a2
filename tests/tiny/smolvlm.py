"""SmolVLM in miniature.

Its own processor wants torchvision and num2words for videos; for pictures Idefics3's does the same.
"""

from typing import Any

from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil  # oldest: not at the top

from tests.tiny.idefics3 import parts


def build() -> tuple[Any, Any]:
    config, processor = parts(SmolVLMConfig, SmolVLMImageProcessorPil)
    return SmolVLMForConditionalGeneration(config), processor
