"""Pictures of scenes as a model takes them: drawn where it runs, encoded once, and asked about by any prompt."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

from diffprune.backbones.processors import pixel_seed
from diffprune.backbones.prompts import Batch
from diffprune.evaluate.pictures import EncodedPictures, encode_images, num_placeholders
from diffprune.model import PrunedVLM
from diffprune_lab.scenes.pixels import make_features, takes_pixels
from diffprune_lab.scenes.sizes import draw_sized, model_sizes
from diffprune_lab.scenes.world import Scene


def own_sizes(vlm: PrunedVLM) -> str:
    """The way of sizes that the model says is its own."""
    return model_sizes(getattr(vlm.base.config, "_name_or_path", None) or "")


def encode_scenes(
    vlm: PrunedVLM,
    scenes: Sequence[Scene],
    needs: frozenset[str] = frozenset(),
    *,
    sizes: str = "fixed",
    seeds: bool = True,
) -> EncodedPictures:
    """The pictures of scenes, drawn at their size where the model runs, and encoded.

    They go through the model's own processor where it does more to them than to cut and to normalise.

    Args:
        sizes: How pictures are sized (`scenes.sizes.SIZES`).
        seeds: Also the number made from each picture's pixels, for which these are brought to the CPU.
    """
    backbone, dtype = vlm.backbone, vlm.base.dtype
    drawn = draw_sized(scenes, sizes, vlm.base.get_input_embeddings().weight.device)
    if not takes_pixels(backbone, sizes):
        encoded = encode_images(vlm, [Image.fromarray(to_bytes(picture)) for picture in drawn], needs)
        return encoded if seeds else replace(encoded, tokens=replace(encoded.tokens, seeds=None))
    made = make_features(backbone, drawn)
    batch = Batch(
        features={key: value.to(dtype) if value.is_floating_point() else value for key, value in made.items()},
        row_of_image=tuple(range(len(scenes))),
        sizes=tuple((picture.shape[2], picture.shape[1]) for picture in drawn),
        seeds=tuple(pixel_seed(to_bytes(picture)) for picture in drawn) if seeds else (),
    )
    tokens = backbone.encode(batch, needs)
    return EncodedPictures(
        tokens if seeds else replace(tokens, seeds=None),
        tuple((backbone.image_token_id,) * length for length in num_placeholders(tokens)),
        {key: batch.features[key] for key in backbone.picture_features},
    )


def scene_images(scenes: Sequence[Scene], sizes: str) -> list[Image.Image]:
    """The pictures of scenes at their sizes, as pictures of PIL."""
    return [Image.fromarray(to_bytes(picture)) for picture in draw_sized(scenes, sizes)]


def to_images(pixels: UInt8[Tensor, "B 3 H W"]) -> list[Image.Image]:
    """Pixels as pictures of PIL."""
    return [Image.fromarray(to_bytes(picture)) for picture in pixels]


def to_bytes(picture: UInt8[Tensor, "3 H W"]) -> UInt8[np.ndarray, "H W 3"]:
    """Pixels as bytes [H, W, 3] on the CPU."""
    return picture.permute(1, 2, 0).contiguous().cpu().numpy()
