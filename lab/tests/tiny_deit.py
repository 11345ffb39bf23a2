"""DeiT and ViT in miniature: 4 x 4 patches, ten classes."""

from typing import Any

import torch
from transformers import (
    DeiTConfig,
    DeiTForImageClassification,
    DeiTForImageClassificationWithTeacher,
    DeiTImageProcessorPil,
    ViTConfig,
    ViTForImageClassification,
)

from tests.tiny import HEADS, LAYERS, MLP, WIDTH

SIDE, PATCH, CLASSES = 56, 14, 10
KINDS = {
    "deit": (DeiTConfig, DeiTForImageClassification),
    "deit_teacher": (DeiTConfig, DeiTForImageClassificationWithTeacher),
    "vit": (ViTConfig, ViTForImageClassification),
}


def build(kind: str = "deit") -> tuple[Any, Any]:
    torch.manual_seed(0)
    config_class, model_class = KINDS[kind]
    config = config_class(
        hidden_size=WIDTH,
        intermediate_size=MLP,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        image_size=SIDE,
        patch_size=PATCH,
        num_labels=CLASSES,
    )
    model = model_class(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "position" in name or "token" in name:  # start at zero, so all places would be alike
                parameter.normal_(std=0.5)
            elif parameter.ndim >= 2:
                parameter.mul_(4.0)
    processor = DeiTImageProcessorPil(size={"height": 64, "width": 64}, crop_size={"height": SIDE, "width": SIDE})
    return model, processor
