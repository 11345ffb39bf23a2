"""Pictures of scenes as a model takes them: drawn where it runs, encoded once, and asked about by any prompt."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Int, UInt8
from PIL import Image
from torch import Tensor

from diffprune.backbones.base import Batch
from diffprune.backbones.processors import pixel_seed
from diffprune.model import PrunedVLM
from diffprune.ops import pad_rows
from diffprune.types import VisualTokens
from diffprune_lab.scenes.pixels import make_features, takes_pixels
from diffprune_lab.scenes.sizes import draw_sized, model_sizes
from diffprune_lab.scenes.world import Scene

NOT_HELD = frozenset({"text", "projected"})  # what is made where it is used, not held for each picture
ANY_QUESTION = "What is it?"


@dataclass(frozen=True, slots=True)
class Pictures:
    """Pictures encoded apart from any prompt, and what a prompt about one of them must know of it.

    Attributes:
        placeholders: The ids that stand for each picture in a prompt.
        features: What the numbering of a prompt reads of each picture (`Backbone.picture_features`), one row each.
    """

    tokens: VisualTokens
    placeholders: tuple[tuple[int, ...], ...]
    features: dict[str, Tensor]


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
) -> Pictures:
    """The pictures of scenes, drawn at their size where the model runs, and encoded.

    They go through the model's own processor where it does more to them than to cut and to normalise.

    Args:
        sizes: How pictures are sized (`scenes.sizes.WAYS`).
        seeds: Also the number made from each picture's pixels, for which these are brought to the CPU.
    """
    backbone, dtype = vlm.backbone, vlm.base.dtype
    drawn = draw_sized(scenes, sizes, vlm.base.get_input_embeddings().weight.device)
    if not takes_pixels(backbone, sizes):
        images = [Image.fromarray(to_bytes(picture)) for picture in drawn]
        batch = vlm.prepare(images, [ANY_QUESTION] * len(images))
        tokens, placeholders = backbone.encode(batch, needs), placeholder_ids(vlm, batch)
    else:
        made = make_features(backbone, drawn)
        batch = Batch(
            features={key: value.to(dtype) if value.is_floating_point() else value for key, value in made.items()},
            row_of_image=tuple(range(len(scenes))),
            sizes=tuple((picture.shape[2], picture.shape[1]) for picture in drawn),
            seeds=tuple(pixel_seed(to_bytes(picture)) for picture in drawn) if seeds else (),
        )
        tokens = backbone.encode(batch, needs)
        placeholders = tuple((backbone.image_token_id,) * length for length in num_placeholders(tokens))
    features = {key: batch.features[key] for key in backbone.picture_features}
    return Pictures(tokens if seeds else replace(tokens, seeds=None), placeholders, features)


def num_placeholders(tokens: VisualTokens) -> list[int]:
    """Placeholders of each picture, where each is one token or a newline."""
    if tokens.slots is not None:
        return (tokens.slots != -2).sum(-1).tolist()
    return [tokens.x.shape[1]] * len(tokens) if tokens.is_full else tokens.counts.tolist()


def placeholder_ids(vlm: PrunedVLM, batch: Batch) -> tuple[tuple[int, ...], ...]:
    """The ids that stand for each picture of a batch, which asks `ANY_QUESTION` of all: what is more than the text."""
    backbone = vlm.backbone
    (bare,) = prompt_ids(vlm, [ANY_QUESTION], [(backbone.image_token_id,)])
    place = bare.index(backbone.image_token_id)
    before, after = bare[:place], bare[place + 1 :]
    known: dict[tuple[int, ...], tuple[int, ...]] = {}  # many are alike: each is held once
    found = []
    for ids, mask in zip(*(batch.features[key].tolist() for key in ("input_ids", "attention_mask")), strict=True):
        row = tuple(ids[len(mask) - sum(mask) :])
        end = len(row) - len(after)
        if row[:place] != before or row[end:] != after:
            raise ValueError(
                f"the {backbone.family} family writes more than a picture's placeholders into a prompt, so questions "
                "cannot be asked of pictures encoded before; choose a model of another family"
            )
        found.append(known.setdefault(row[place:end], row[place:end]))
    return tuple(found)


def prompt_ids(
    vlm: PrunedVLM, prompts: Sequence[str], placeholders: Sequence[tuple[int, ...]] | None
) -> tuple[tuple[int, ...], ...]:
    """Prompts as the model reads them, each with the ids that stand for its picture, or all without a picture."""
    backbone = vlm.backbone
    image = backbone.image_token_id
    texts = [backbone._prompt(prompt, 0 if placeholders is None else 1, chat=True) for prompt in prompts]
    plain = [tuple(ids) for ids in backbone.tokenizer(texts)["input_ids"]]
    if placeholders is None:
        return tuple(plain)
    places = [ids.index(image) for ids in plain]
    return tuple(
        ids[:place] + filled + ids[place + 1 :] for ids, place, filled in zip(plain, places, placeholders, strict=True)
    )


def pad_left(ids: Sequence[Sequence[int]], pad_id: int) -> dict[str, Int[Tensor, "B T"]]:
    """Ids and mask of a batch as a processor gives them."""
    rows = [torch.tensor(prompt) for prompt in ids]
    real = [torch.ones_like(row) for row in rows]
    return {"input_ids": pad_rows(rows, pad_id, left=True), "attention_mask": pad_rows(real, left=True)}


def scene_images(scenes: Sequence[Scene], sizes: str) -> list[Image.Image]:
    """The pictures of scenes at their sizes, as pictures of PIL."""
    return [Image.fromarray(to_bytes(picture)) for picture in draw_sized(scenes, sizes)]


def to_images(pixels: UInt8[Tensor, "B 3 H W"]) -> list[Image.Image]:
    """Pixels as pictures of PIL."""
    return [Image.fromarray(to_bytes(picture)) for picture in pixels]


def to_bytes(picture: UInt8[Tensor, "3 H W"]) -> UInt8[np.ndarray, "H W 3"]:
    """Pixels as bytes [H, W, 3] on the CPU."""
    return picture.permute(1, 2, 0).contiguous().cpu().numpy()
