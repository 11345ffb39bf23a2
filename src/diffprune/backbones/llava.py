"""LLaVA-1.5: CLIP tower, two-layer projector, LLaMA. 24 x 24 tokens a picture, plain positions."""

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from diffprune.backbones._clip import crop_boxes, layer_attention
from diffprune.backbones._presets import clip_and_llama
from diffprune.backbones._tower import TowerBackbone
from diffprune.backbones.base import Preset, with_needs
from diffprune.backbones.processors import Picture, normalise
from diffprune.backbones.prompts import Batch
from diffprune.registry import BACKBONES
from diffprune.types import VisualTokens


def describe(size: str, tiny: bool) -> tuple[Any, Any]:
    """Configuration and processor of LLaVA-1.5."""
    from transformers import CLIPImageProcessorPil, LlavaConfig, LlavaProcessor

    images = CLIPImageProcessorPil(size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336})
    return clip_and_llama(LlavaConfig, LlavaProcessor, images, size, tiny, image_seq_length=576)


@BACKBONES.register("llava")
class Llava(TowerBackbone):
    family: ClassVar[str] = "llava"
    provides: ClassVar[frozenset[str]] = frozenset({"projected", "text", "cls_attention", "keys"})
    presets: ClassVar[dict[str, Preset]] = {
        "llava-1.5-7b": Preset(hub_id="llava-hf/llava-1.5-7b-hf", num_visual="576", describe=partial(describe, "7b")),
        "llava-1.5-13b": Preset(
            hub_id="llava-hf/llava-1.5-13b-hf", num_visual="576", describe=partial(describe, "13b")
        ),
    }

    compiled_tower: ClassVar[str | None] = "diffprune.fast.towers:ClipTower"

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
            boxes=crop_boxes(self.processor.image_processor, batch.sizes, side, hidden[0].device),
            **extra,
        )
        return with_needs(self, batch, tokens, needs)

    def keeps_size(self, size: tuple[int, int]) -> bool:
        processor = self.processor.image_processor
        lengths = {*dict(processor.size or {}).values(), *dict(getattr(processor, "crop_size", None) or {}).values()}
        return lengths == set(size) and len(lengths) == 1

    def pixel_features(self, pictures: Sequence[Picture]) -> dict[str, Tensor]:
        return {"pixel_values": normalise(self.processor.image_processor, torch.stack(list(pictures)))}
