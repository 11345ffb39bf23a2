"""Train a scorer on captions of scenes, with the reference model frozen. Pictures are drawn as training goes."""

import time
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from diffprune.backbones.base import with_needs
from diffprune.backbones.pictures import MADE_LATER
from diffprune.backbones.prompts import Batch
from diffprune.config import OptimConfig, TauConfig
from diffprune.evaluate.pictures import EncodedPictures, pad_left, prompt_ids
from diffprune.methods.base import TrainablePruner
from diffprune.model import PrunedVLM
from diffprune.rng import Rng
from diffprune.train.loop import train
from diffprune.train.sampler import between
from diffprune.types import VisualTokens
from diffprune_lab.scenes.encode import encode_scenes, own_sizes, scene_images
from diffprune_lab.scenes.language import caption
from diffprune_lab.scenes.oracle import items
from diffprune_lab.scenes.pixels import takes_pixels
from diffprune_lab.scenes.sizes import picture_size
from diffprune_lab.scenes.world import Scene, make_scene

INSTRUCTION = "Describe the picture."
STREAM = "captions"  # key of the random numbers drawn here, so that no other part of the world shares them


def caption_batch(
    vlm: PrunedVLM, scenes: Sequence[Scene], captions: Sequence[str], sizes: str = "fixed"
) -> tuple[Batch, VisualTokens]:
    """Scenes with their captions as answers, and their visual tokens.

    Args:
        sizes: How pictures are sized (`scenes.sizes.SIZES`).
    """
    backbone = vlm.backbone
    if not takes_pixels(backbone, sizes):
        batch = vlm.prepare(scene_images(scenes, sizes), [INSTRUCTION] * len(scenes), captions)
        tokens = vlm.encode(batch)
        assert tokens is not None
        return batch, tokens
    # Noise is drawn from the sample, not from its pixels.
    pictures = encode_scenes(vlm, scenes, vlm.method.needs - MADE_LATER, sizes=sizes, seeds=False)
    return captioned(vlm, pictures, captions)


def captioned(vlm: PrunedVLM, pictures: EncodedPictures, captions: Sequence[str]) -> tuple[Batch, VisualTokens]:
    """Encoded pictures with their captions as answers, and their visual tokens with all that the method needs."""
    backbone, count = vlm.backbone, len(captions)
    ids = prompt_ids(vlm, [INSTRUCTION] * count, [[ids] for ids in pictures.placeholders])
    answers = [backbone._answer_ids(text) for text in captions]
    features, labels = backbone._append(pad_left(ids, backbone.pad_id), answers)
    device = pictures.tokens.x.device
    batch = Batch(
        features={key: value.to(device) for key, value in features.items()} | pictures.features,
        row_of_image=tuple(range(count)),
        labels=labels.to(device),
    )
    return batch, with_needs(backbone, batch, pictures.tokens, vlm.method.needs & MADE_LATER)


def item_regions(tokens: VisualTokens, pictures: Sequence[object], sizes: str = "fixed") -> Bool[Tensor, "B N"] | None:
    """True at tokens that see a part of anything the captions speak of; None where the pictures are no scenes.

    Args:
        sizes: How the pictures were sized, as the tokens' boxes are in pixels of these.
    """
    scenes = [picture for picture in pictures if isinstance(picture, Scene)]
    if len(scenes) < len(pictures) or tokens.boxes is None:
        return None
    where = tokens.boxes.cpu()
    seen = torch.zeros(where.shape[:2], dtype=torch.bool)
    for row, scene in enumerate(scenes):
        for x0, y0, x1, y1 in items(scene, picture_size(scene, sizes)):
            left, top, right, bottom = where[row].unbind(-1)
            seen[row] |= (left < x1) & (right > x0) & (top < y1) & (bottom > y0)
    return seen.to(tokens.x.device) & tokens.mask


def train_on_captions(
    vlm: PrunedVLM,
    *,
    budgets: tuple[int, int],
    steps: int,
    seconds: float | None = None,
    batch_size: int = 16,
    lr: float = 1e-3,
    tau: TauConfig | None = None,
    remove_below: float = 0.0,
    seed: int = 0,
    calibration: int = 256,
    on_step: Callable[[float, float], None] | None = None,
) -> list[float]:
    """Train the method of `vlm` on captions of fresh scenes; the loss of every step.

    K is drawn for each picture between the two budgets, evenly on a log scale, so that one scorer serves them all.
    What is drawn (scenes, captions, K, noise) follows from (seed, step, place in the batch) alone.

    Args:
        budgets: The smallest and the largest K.
        steps: Optimiser steps; with `seconds`, at most so many.
        seconds: Time to spend, instead of a number of steps.
        remove_below: Tokens whose weight has become smaller are taken out of the sequence (`PrunedVLM.loss`).
        calibration: Pictures from which the scale of matched noise is taken, where the method has such noise.
        on_step: Called with (share of the run that is done, loss).
    """
    method = vlm.method
    if not isinstance(method, TrainablePruner):
        raise ValueError(f"method {method.name!r} has nothing to train; choose a learned one")
    low, high = budgets
    if not 1 <= low <= high:
        raise ValueError(f"budgets={budgets} is no range of tokens; give (smallest, largest), from 1 on")
    start = time.perf_counter()
    device = vlm.base.get_input_embeddings().weight.device
    sizes = own_sizes(vlm)
    if getattr(method, "throttle_noise", None) is not None:
        scenes = [_training_scene(seed, index) for index in range(calibration)]
        chunks = (scenes[first : first + batch_size] for first in range(0, calibration, batch_size))
        method.calibrate(encode_scenes(vlm, chunk, sizes=sizes).tokens for chunk in chunks)  # type: ignore[operator]

    def loss(step: int, temperature: float) -> Float[Tensor, ""]:
        places = range(step * batch_size, (step + 1) * batch_size)
        scenes = [_training_scene(seed, place) for place in places]
        draws = [Rng(seed, STREAM, place) for place in places]
        texts = [caption(scene, rng) for scene, rng in zip(scenes, draws, strict=True)]
        batch, tokens = caption_batch(vlm, scenes, texts, sizes)
        shares = [rng.below(1 << 16) / ((1 << 16) - 1) for rng in draws]
        counts = torch.tensor([between(low, high, share) for share in shares], device=device)
        noise = [torch.Generator(device).manual_seed(rng.word()) for rng in draws]
        return vlm.loss(batch, tokens=tokens, tau=temperature, keep=counts, generator=noise, remove_below=remove_below)

    def report(step: int, value: float) -> None:
        if on_step is not None:
            spent = 0.0 if seconds is None else (time.perf_counter() - start) / seconds
            on_step(min(1.0, max(spent, (step + 1) / steps)), value)

    return train(
        method.parameters(),
        loss,
        steps=steps,
        seconds=None if seconds is None else seconds - (time.perf_counter() - start),
        optim=OptimConfig(lr=lr, warmup=0.05),
        tau=tau or TauConfig(anneal_steps=0.8),
        on_step=report,
    )


def _training_scene(seed: int, place: int) -> Scene:
    return make_scene("train", place, seed=seed + 1)  # another world than the one the reference model was trained in
