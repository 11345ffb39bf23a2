"""What is measured: a model with a method around it, and prompts of one picture and a fixed number of text tokens."""

from dataclasses import replace

import numpy as np
import torch
from PIL import Image
from torch import nn

from diffprune.backbones.prompts import Batch
from diffprune.evaluate.downscale import DOWNSCALE, no_form, shrink, with_form
from diffprune.loading import load_base
from diffprune.methods.naming import split_methods
from diffprune.methods.options import parse_method
from diffprune.model import PrunedVLM
from diffprune.shapes import SHAPES, build, is_preset, require_gpu


def load_subject(name: str, *, random_weights: bool, tiny: bool, device: str, dtype: torch.dtype) -> PrunedVLM:
    """The full model on the device: a preset at its real size with random weights, or whatever `load_base` loads."""
    if not random_weights:
        model, processor = load_base(name, dtype=dtype)
        return PrunedVLM(model.to(device), processor)
    if name not in SHAPES:
        what = "is known, but its size cannot be built with random weights yet" if is_preset(name) else "is not known"
        way_out = "take one of them, or leave --random-weights out to load it"
        raise ValueError(f"backbone {name!r} {what}; random weights are there for {', '.join(SHAPES)}: {way_out}")
    config, processor = SHAPES[name](tiny)
    require_gpu(name, config, dtype, device, what="measuring it", way_out="; give --size tiny or a smaller --backbone")
    return PrunedVLM(build(config, device, dtype), processor)


def with_method(subject: PrunedVLM, name: str, *, keep: int | float, dtype: torch.dtype) -> PrunedVLM:
    """The model with that method in the model's own precision; a scorer without weights is given random ones.

    Args:
        name: Of the method, its options in brackets.
    """
    backbone = subject.backbone
    built = parse_method(name).build(block=backbone.block, language=backbone.language)
    vlm = subject.with_method(built, keep=keep)
    randomise(vlm.method)
    vlm.method.to(dtype)
    return vlm


def deployed(
    subject: PrunedVLM, name: str, *, keep: int | float, dtype: torch.dtype, size: tuple[int, int]
) -> tuple[PrunedVLM, tuple[int, int]]:
    """The model that a row measures, and the size of the pictures that it is given: for `downscale` a smaller one."""
    if name != DOWNSCALE:
        return with_method(subject, name, keep=keep, dtype=dtype), size
    form = shrink(subject, size, keep)
    if form is None:
        raise ValueError(no_form(subject, size, keep))
    return with_method(with_form(subject, form), "full", keep=1.0, dtype=dtype), form.size


@torch.no_grad()
def randomise(method: nn.Module) -> None:
    """Numbers in place of zero weights: an untrained head gives every token the same logit, and ties need no sort."""
    generator = torch.Generator().manual_seed(0)
    for parameter in method.parameters():
        if parameter.ndim >= 2 and not bool(parameter.any()):
            drawn = torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
            parameter.copy_(drawn)


def picture_size(text: str) -> tuple[int, int]:
    """(width, height) in pixels from "1344x896"."""
    sides = text.lower().split("x")
    if len(sides) != 2 or not all(side.isdigit() and int(side) > 0 for side in sides):
        raise ValueError(f"image {text!r} is no size; write width x height in pixels, for example 336x336")
    return int(sides[0]), int(sides[1])


def picture(seed: int, size: tuple[int, int]) -> Image.Image:
    """Random pixels, (width, height)."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8))


def make_batch(vlm: PrunedVLM, *, size: tuple[int, int], num_text: int, batch: int, seed: int = 0) -> Batch:
    """Prompts of one picture and exactly `num_text` text tokens each, on the device."""
    pictures = [picture(seed + row, size) for row in range(batch)]
    made = vlm.prepare(pictures, [""] * batch)
    ids = made.features["input_ids"]
    present = int((ids[0] != vlm.backbone.image_token_id).sum())
    missing = num_text - present
    if missing < 0:
        raise ValueError(f"{num_text} text tokens are fewer than the prompt's own {present}; give {present} or more")
    tail = torch.tensor(plain_ids(vlm)).to(ids)
    drawn = torch.randint(len(tail), (batch, missing), generator=torch.Generator().manual_seed(seed)).to(ids.device)
    features = {
        **made.features,
        "input_ids": torch.cat([ids, tail[drawn]], dim=1),
        "attention_mask": torch.cat([made.features["attention_mask"], ids.new_ones(batch, missing)], dim=1),
    }
    for key in vlm.backbone.sequence_features:
        if key in features:
            features[key] = torch.cat([features[key], features[key].new_zeros(batch, missing)], dim=1)
    return replace(made, features=features)


def plain_ids(vlm: PrunedVLM) -> list[int]:
    """Ids of ordinary tokens: nothing that opens or closes a picture or a text."""
    tokenizer = vlm.backbone.tokenizer
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder, vlm.backbone.image_token_id}
    return [index for index in range(len(tokenizer)) if index not in special]


def check_methods(text: str) -> list[str]:
    """The methods of a comma-separated text, each once; an error where one, or an option of it, is not known."""
    wanted = split_methods(text)
    if not wanted:
        raise ValueError("no method was named; give some, for example --methods full,diffprune")
    for name in wanted:
        if name != DOWNSCALE:
            parse_method(name)
    return wanted
