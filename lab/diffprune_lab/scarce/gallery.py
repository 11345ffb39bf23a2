"""Questions about the second world with each picture encoded once, for the library's own evaluation."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from diffprune.backbones.base import Batch
from diffprune.backbones.images import pixel_seed
from diffprune.evaluate.native import NOT_HELD, Gallery, join, prompt_ids, to_bytes
from diffprune.evaluate.pixels import make_features
from diffprune.model import PrunedVLM
from diffprune.types import VisualTokens
from diffprune_lab.scarce.draw import pack, render
from diffprune_lab.scarce.oracle import Oracle
from diffprune_lab.scarce.tasks import TASKS, Task, build_task
from diffprune_lab.scarce.world import Scene


@dataclass(frozen=True, slots=True)
class ScarceGallery(Gallery):
    """Questions and pictures of the second world."""

    tasks: tuple[Task, ...]  # pyright: ignore[reportIncompatibleVariableOverride]
    scenes: tuple[Scene, ...]  # pyright: ignore[reportIncompatibleVariableOverride]


@torch.inference_mode()
def open_gallery(
    vlm: PrunedVLM,
    tasks: Sequence[str] = TASKS,
    *,
    split: str,
    count: int,
    needs: frozenset[str] = frozenset(),
    batch_size: int = 64,
) -> ScarceGallery:
    """Build the tasks and encode their pictures, with whatever the methods to come need.

    Args:
        count: Scored units of each task: questions, or pairs.
        needs: Of all the methods that will be run.
    """
    built = tuple(build_task(name, split, count) for name in tasks)
    rows: dict[Scene, int] = {}
    picture = tuple(rows.setdefault(question.scene, len(rows)) for task in built for question in task.questions)
    scenes = tuple(rows)
    chunks = [
        encode(vlm, scenes[start : start + batch_size], needs - NOT_HELD) for start in range(0, len(scenes), batch_size)
    ]
    prompts = tuple(question.prompt for task in built for question in task.questions)
    tokens = join(chunks)
    placeholders = (vlm.backbone.image_token_id,) * tokens.x.shape[1]
    return ScarceGallery(
        tasks=built,
        tokens=tokens,
        prompts=prompts,
        ids=prompt_ids(vlm, prompts, [placeholders] * len(prompts)),
        picture=picture,
        scenes=scenes,
        features={},
        sizes="fixed",
    )


def encode(vlm: PrunedVLM, scenes: Sequence[Scene], needs: frozenset[str]) -> VisualTokens:
    """The pictures of scenes, drawn where the model runs, and encoded."""
    drawn = list(render(pack(scenes), vlm.base.get_input_embeddings().weight.device)[0])
    features = {key: value.to(vlm.base.dtype) for key, value in make_features(vlm.backbone, drawn).items()}
    batch = Batch(
        features=features,
        row_of_image=tuple(range(len(scenes))),
        sizes=tuple((picture.shape[2], picture.shape[1]) for picture in drawn),
        seeds=tuple(pixel_seed(to_bytes(picture)) for picture in drawn),
    )
    return vlm.backbone.encode(batch, needs)


def oracle_of(gallery: ScarceGallery) -> Oracle:
    """The pruner that knows these pictures."""
    assert gallery.tokens.seeds is not None
    return Oracle.of(gallery.tokens.seeds, gallery.scenes, gallery.tokens.x.device)
