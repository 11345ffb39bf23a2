"""SmolVLM in miniature."""

from typing import Any

from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration, SmolVLMProcessor
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil  # oldest: not at the top

from diffprune.backbones.image_only import image_only
from tests.tiny.idefics3 import parts


def build() -> tuple[Any, Any]:
    config, processor = parts(SmolVLMConfig, SmolVLMImageProcessorPil, image_only(SmolVLMProcessor))
    return SmolVLMForConditionalGeneration(config), processor
