"""LLaVA-1.5: CLIP tower, two-layer projector, LLaMA. 24 x 24 tokens a picture, plain positions."""

from typing import Any, ClassVar

import torch

from diffprune.backbones._clip import crop_boxes, layer_attention
from diffprune.backbones._tower import TowerBackbone
from diffprune.backbones.base import Batch, Preset, with_needs
from diffprune.registry import BACKBONES
from diffprune.types import VisualTokens


@BACKBONES.register("llava")
class Llava(TowerBackbone):
    family: ClassVar[str] = "llava"
    provides: ClassVar[frozenset[str]] = frozenset({"projected", "text", "cls_attention", "keys"})
    presets: ClassVar[dict[str, Preset]] = {
        "llava-1.5-7b": Preset(hub_id="llava-hf/llava-1.5-7b-hf", num_visual="576"),
        "llava-1.5-13b": Preset(hub_id="llava-hf/llava-1.5-13b-hf", num_visual="576"),
    }

    @torch.no_grad()
    def encode(self, batch: Batch, needs: frozenset[str] = frozenset()) -> VisualTokens:
        tower, layer, side = self.model.model.vision_tower, self.config.vision_feature_layer, self.side
        hidden = tower(batch.features["pixel_values"], output_hidden_states=True).hidden_states
        skip = 1  # [CLS]
        extra: dict[str, Any] = {}
        if needs & {"cls_attention", "keys"}:
            attention, keys = layer_attention(tower, hidden, layer)
            extra = {
                name: value[:, skip:] for name, value in (("cls_attention", attention), ("keys", keys)) if name in needs
            }
        tokens = VisualTokens(
            x=hidden[layer][:, skip:],
            grid=((side, side),) * batch.num_images,
            seeds=batch.seeds,
            boxes=crop_boxes(self.processor.image_processor, batch.sizes, side).to(hidden[0].device),
            **extra,
        )
        return with_needs(self, batch, tokens, needs)
