"""DeiT and ViT image classifiers: the small models on which the paper's probes run.

Patch tokens are dropped (or weakened) once, after the embedding or after a chosen block. Positions are added at the
embedding, so a patch carries its place with it and dropping the others is exact. `PrunedClassifier` puts a method
around it.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from diffprune.backbones._clip import block_attention, crop_boxes, encoder_layers
from diffprune.backbones.base import Preset
from diffprune.nn import BlockSpec
from diffprune.registry import BACKBONES
from diffprune.types import VisualTokens

_PLAIN = "the hub holds it as a ViT, without distillation token"


class Encoded(NamedTuple):
    """Patch tokens where the model is cut, and the prefix ([CLS], distillation) that is always kept."""

    tokens: VisualTokens
    prefix: Float[Tensor, "B P D"]


@BACKBONES.register("deit")
class DeiT:
    """An image classifier cut open where tokens can be dropped.

    Args:
        model: DeiTForImageClassification, DeiTForImageClassificationWithTeacher or ViTForImageClassification.
        image_processor: Its image processor, for the boxes; None where only pixel tensors are used.
        cut: How many blocks run before tokens are dropped; 0 drops right after the embedding.
    """

    family: ClassVar[str] = "deit"
    model_types: ClassVar[tuple[str, ...]] = ("deit", "vit")
    provides: ClassVar[frozenset[str]] = frozenset({"cls_attention", "keys"})
    presets: ClassVar[dict[str, Preset]] = {
        "deit-tiny": Preset(hub_id="facebook/deit-tiny-patch16-224", num_visual="196", note=_PLAIN),
        "deit-small": Preset(hub_id="facebook/deit-small-patch16-224", num_visual="196", note=_PLAIN),
        "deit-base": Preset(hub_id="facebook/deit-base-patch16-224", num_visual="196", note=_PLAIN),
    }

    def __init__(self, model: nn.Module, image_processor: Any = None, *, cut: int = 0) -> None:
        self.model = cast(Any, model)
        model_type = getattr(getattr(model, "config", None), "model_type", None)
        if model_type not in self.model_types:
            raise ValueError(
                f"model type {model_type!r} is no classifier known here; there are {', '.join(self.model_types)}"
            )
        if not (hasattr(model, "classifier") or hasattr(model, "cls_classifier")):
            raise ValueError(f"{type(model).__name__} has no classification head; load it with one")
        if not 0 <= cut <= len(self.blocks):
            raise ValueError(
                f"cut={cut} is no place to drop tokens; the model has {len(self.blocks)} blocks, give 0 to that"
            )
        self.image_processor = image_processor
        self.cut = cut

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def trunk(self) -> Any:
        """Embedding, blocks and final norm."""
        return getattr(self.model, self.model.base_model_prefix)

    @property
    def blocks(self) -> Any:
        return encoder_layers(self.trunk)

    @property
    def block(self) -> BlockSpec:
        """The kind of block the model is made of."""
        return BlockSpec.from_config(self.config)

    @property
    def side(self) -> int:
        return self.config.image_size // self.config.patch_size

    @torch.no_grad()
    def encode(
        self,
        pixel_values: Float[Tensor, "B C height width"],
        needs: frozenset[str] = frozenset(),
        *,
        sizes: Sequence[tuple[int, int]] = (),
        seeds: tuple[int, ...] | None = None,
    ) -> Encoded:
        """Patch tokens after `cut` blocks, raster order; with `sizes` (width, height) also where each one looks."""
        if needs and self.cut == 0:
            raise ValueError(
                f"the method needs {', '.join(sorted(needs))}, and no block has run at cut=0; give cut=1 or more"
            )
        hidden = [self.trunk.embeddings(pixel_values.to(self.model.dtype))]
        for block in self.blocks[: self.cut]:
            hidden.append(block(hidden[-1]))
        skip = hidden[0].shape[1] - self.side**2  # [CLS], distillation
        extra: dict[str, Any] = {}
        if needs:
            attention, keys = block_attention(self.blocks[self.cut - 1], hidden[self.cut - 1])
            extra = {
                name: value[:, skip:] for name, value in (("cls_attention", attention), ("keys", keys)) if name in needs
            }
        boxes = None
        if sizes and self.image_processor is not None:
            boxes = crop_boxes(self.image_processor, sizes, self.side, pixel_values.device)
        grid = ((self.side, self.side),) * len(pixel_values)
        here = hidden[self.cut]
        tokens = VisualTokens(x=here[:, skip:], grid=grid, seeds=seeds, boxes=boxes, **extra)
        return Encoded(tokens, here[:, :skip])

    def logits(
        self, prefix: Float[Tensor, "B P D"], x: Float[Tensor, "B K D"], mask: Bool[Tensor, "B K"] | None = None
    ) -> Float[Tensor, "B classes"]:
        """Class logits from the prefix and the patch tokens that are left, by the remaining blocks.

        Args:
            prefix: From `encode`.
            x: Patch tokens, dropped or weakened.
            mask: True where a token is real, for rows that keep different numbers.
        """
        return self.answer(self.states(prefix, x, mask))

    def states(
        self, prefix: Float[Tensor, "B P D"], x: Float[Tensor, "B K D"], mask: Bool[Tensor, "B K"] | None = None
    ) -> Float[Tensor, "B P+K D"]:
        """What the heads read: prefix and tokens after the remaining blocks and the final norm."""
        hidden = torch.cat([prefix, x.to(prefix.dtype)], dim=1)
        blocked = None
        if mask is not None and not bool(mask.all()):
            seen = torch.cat([mask.new_ones(prefix.shape[:2]), mask], dim=1)[:, None, None]  # [B, 1, 1, P + K]
            blocked = torch.zeros(seen.shape, dtype=hidden.dtype, device=hidden.device)
            blocked = blocked.masked_fill(~seen, torch.finfo(hidden.dtype).min).expand(-1, -1, hidden.shape[1], -1)
        for block in self.blocks[self.cut :]:
            hidden = block(hidden, blocked)
        return self.trunk.layernorm(hidden)

    def answer(self, hidden: Float[Tensor, "B T D"]) -> Float[Tensor, "B classes"]:
        """Class logits from `states`."""
        if hasattr(self.model, "cls_classifier"):  # both heads, as the model itself does
            return (self.model.cls_classifier(hidden[:, 0]) + self.model.distillation_classifier(hidden[:, 1])) / 2
        return self.model.classifier(hidden[:, 0])
