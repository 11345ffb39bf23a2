"""LLaVA-1.5: CLIP tower, two-layer projector, LLaMA. 24 x 24 tokens a picture, plain positions."""

from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from diffprune.backbones.base import Backbone, Batch, Preset, with_needs
from diffprune.backbones.clip import crop_boxes, layer_attention
from diffprune.nn import BlockSpec
from diffprune.registry import BACKBONES
from diffprune.types import VisualTokens


@BACKBONES.register("llava")
class Llava(Backbone):
    family: ClassVar[str] = "llava"
    provides: ClassVar[frozenset[str]] = frozenset({"projected", "text", "cls_attention", "keys"})
    presets: ClassVar[dict[str, Preset]] = {
        "llava-1.5-7b": Preset(hub_id="llava-hf/llava-1.5-7b-hf", num_visual="576"),
        "llava-1.5-13b": Preset(hub_id="llava-hf/llava-1.5-13b-hf", num_visual="576"),
    }

    def __init__(self, model: nn.Module, processor: Any) -> None:
        super().__init__(model, processor)
        if not isinstance(self.config.vision_feature_layer, int):
            raise ValueError(
                f"vision_feature_layer={self.config.vision_feature_layer}: features joined from several layers are not "
                "supported; a single layer is"
            )

        if self.config.vision_feature_select_strategy != "default":
            raise ValueError(
                f"vision_feature_select_strategy={self.config.vision_feature_select_strategy!r} keeps [CLS] among the "
                "visual tokens, which has no place in the picture; 'default' is supported"
            )

    @property
    def block(self) -> BlockSpec:
        return BlockSpec.from_config(self.config.vision_config)

    def vision_modules(self) -> dict[str, nn.Module]:
        return {"vision_tower": self.model.model.vision_tower, "projector": self.model.model.multi_modal_projector}

    @torch.no_grad()
    def encode(self, batch: Batch, needs: frozenset[str] = frozenset()) -> VisualTokens:
        tower, vision, layer = (
            self.model.model.vision_tower,
            self.config.vision_config,
            self.config.vision_feature_layer,
        )
        hidden = tower(batch.features["pixel_values"], output_hidden_states=True).hidden_states
        skip = 1  # [CLS]
        side = vision.image_size // vision.patch_size
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

    def project(self, x: Float[Tensor, "B K D"]) -> Float[Tensor, "B K L"]:
        return self.model.model.multi_modal_projector(x)
