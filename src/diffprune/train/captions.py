"""Train a scorer on captions of scenes, with the reference model frozen. Pictures are drawn where the model runs."""

import math
import time
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from diffprune.backbones.base import Batch
from diffprune.config import OptimConfig, TauConfig
from diffprune.evaluate.native import encode_scenes, prompt_ids
from diffprune.methods.base import TrainablePruner
from diffprune.model import PrunedVLM
from diffprune.scenes import Rng, Scene, make_scene
from diffprune.scenes.language import caption
from diffprune.train.loop import train
from diffprune.types import VisualTokens

INSTRUCTION = "Describe the picture."
STREAM = "captions"  # key of the random numbers drawn here, so that no other part of the world shares them
TIMED_STEPS = 3


def caption_batch(vlm: PrunedVLM, scenes: Sequence[Scene], captions: Sequence[str]) -> tuple[Batch, VisualTokens]:
    """Scenes with their captions as answers, and their visual tokens."""
    backbone = vlm.backbone
    tokens = encode_scenes(vlm, scenes)
    ids = torch.tensor(prompt_ids(vlm, [INSTRUCTION], num_visual=tokens.x.shape[1])).expand(len(scenes), -1)
    features, labels = backbone._append(
        {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, [backbone._answer_ids(text) for text in captions]
    )
    device = tokens.x.device
    batch = Batch(
        features={key: value.to(device) for key, value in features.items()},
        row_of_image=tuple(range(len(scenes))),
        seeds=tokens.seeds or (),
        labels=labels.to(device),
    )
    return batch, tokens


def train_on_captions(
    vlm: PrunedVLM,
    *,
    steps: int,
    budgets: tuple[int, int],
    batch_size: int = 16,
    lr: float = 5e-4,
    tau: TauConfig | None = None,
    seed: int = 0,
    seconds: float | None = None,
    calibration: int = 256,
    on_step: Callable[[int, int, float], None] | None = None,
) -> list[float]:
    """Train the method of `vlm` on captions of fresh scenes; the loss of every step.

    K is drawn for each picture between the two budgets, evenly on a log scale, so that one scorer serves them all.
    What is drawn (scenes, captions, K, noise) follows from (seed, step, place in the batch) alone.

    Args:
        steps: Optimiser steps, or fewer where `seconds` would not suffice.
        budgets: The smallest and the largest K.
        seconds: Time to spend: a few steps are timed and the run is cut to fit before it starts.
        calibration: Pictures from which the scale of matched noise is taken, where the method has such noise.
        on_step: Called with (steps done, steps, loss).
    """
    method = vlm.method
    if not isinstance(method, TrainablePruner):
        raise ValueError(f"method {method.name!r} has nothing to train; choose a learned one")
    low, high = budgets
    if not 1 <= low <= high:
        raise ValueError(f"budgets={budgets} is no range of tokens; give (smallest, largest), from 1 on")
    start = time.perf_counter()
    device = vlm.base.get_input_embeddings().weight.device
    if getattr(method, "throttle_noise", None) is not None:
        scenes = [_training_scene(seed, index) for index in range(calibration)]
        chunks = (scenes[first : first + batch_size] for first in range(0, calibration, batch_size))
        method.calibrate(encode_scenes(vlm, chunk) for chunk in chunks)  # type: ignore[operator]

    def loss(step: int, temperature: float) -> Float[Tensor, ""]:
        places = range(step * batch_size, (step + 1) * batch_size)
        scenes = [_training_scene(seed, place) for place in places]
        draws = [Rng(seed, STREAM, place) for place in places]
        texts = [caption(scene, rng) for scene, rng in zip(scenes, draws, strict=True)]
        batch, tokens = caption_batch(vlm, scenes, texts)
        counts = torch.tensor([_draw_budget(rng, low, high) for rng in draws], device=device)
        noise = [torch.Generator(device).manual_seed(rng.word()) for rng in draws]
        return vlm.loss(batch, tokens=tokens, tau=temperature, keep=counts, generator=noise)

    if seconds is not None:
        each = _time_step(lambda step: loss(step, 1.0).backward(), device)
        method.zero_grad(set_to_none=True)
        left = seconds - (time.perf_counter() - start)
        steps = min(steps, max(1, int(left / each)))
    return train(
        method.parameters(),
        loss,
        steps=steps,
        optim=OptimConfig(lr=lr, warmup=0.05),
        tau=tau or TauConfig(anneal_steps=0.8),
        on_step=None if on_step is None else lambda step, value: on_step(step + 1, steps, value),
    )


def _training_scene(seed: int, place: int) -> Scene:
    return make_scene("train", place, seed=seed + 1)  # another world than the one the reference model was trained in


def _draw_budget(rng: Rng, low: int, high: int) -> int:
    """K between the two, evenly on a log scale."""
    share = rng.below(1 << 16) / ((1 << 16) - 1)
    return min(high, max(low, round(low * math.exp(share * math.log(high / low)))))


def _time_step(step: Callable[[int], object], device: torch.device) -> float:
    """Seconds that a step takes, after one that warms up."""
    step(0)
    start = time.perf_counter()
    for number in range(TIMED_STEPS):
        step(number)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / TIMED_STEPS
