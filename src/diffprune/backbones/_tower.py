"""What families with a tower of one width and a projector of their own have in common: LLaVA and its kin."""

from typing import Any, ClassVar

from jaxtyping import Float
from torch import Tensor, nn

from diffprune.backbones.base import Backbone


class TowerBackbone(Backbone):
    """A `vision_tower`, features of one of its layers without [CLS], and a `multi_modal_projector` token by token."""

    strategies: ClassVar[frozenset[str]] = frozenset({"default"})  # how features may be taken from the layer

    def __init__(self, model: nn.Module, processor: Any) -> None:
        super().__init__(model, processor)
        layer = self.config.vision_feature_layer
        strategy = getattr(self.config, "vision_feature_select_strategy", "default")
        if not isinstance(layer, int):
            raise ValueError(
                f"vision_feature_layer={layer}: features joined from several layers are not supported; one layer is"
            )
        if strategy not in self.strategies:
            raise ValueError(
                f"vision_feature_select_strategy={strategy!r} keeps [CLS] among the visual tokens, which has no place "
                "in the picture; 'default' is supported"
            )

    def vision_modules(self) -> dict[str, nn.Module]:
        return {"vision_tower": self.model.model.vision_tower, "projector": self.model.model.multi_modal_projector}

    @property
    def side(self) -> int:
        """Patches along one side of a tile."""
        return self.config.vision_config.image_size // self.config.vision_config.patch_size

    def project(self, x: Float[Tensor, "B K D"]) -> Float[Tensor, "B K L"]:
        return self.model.model.multi_modal_projector(x)
