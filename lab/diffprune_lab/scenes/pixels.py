"""What a model's processor makes of pictures it need not resize, made where the pictures are, many at a time."""

from collections.abc import Sequence

from torch import Tensor

from diffprune.backbones.base import Backbone
from diffprune.backbones.processors import Picture
from diffprune_lab.scenes.sizes import possible_sizes


def takes_pixels(backbone: Backbone, sizes: str) -> bool:
    """Whether the processor leaves pictures as large as they are; False too in a family that does not say.

    Args:
        sizes: How the pictures are sized (`scenes.sizes.SIZES`).
    """
    return all(backbone.keeps_size((width, height)) for height, width in possible_sizes(sizes))


def make_features(backbone: Backbone, pictures: Sequence[Picture]) -> dict[str, Tensor]:
    """What the processor would give for the pictures beside the ids of a prompt, on their device."""
    return backbone.pixel_features(pictures)
