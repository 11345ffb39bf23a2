"""The tasks of the second world as `diffprune eval --tasks scarce` finds them: drawn on the device, with an oracle."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from PIL import Image

from diffprune.backbones.base import Batch
from diffprune.backbones.processors import pixel_seed
from diffprune.evaluate.pictures import EncodedPictures
from diffprune.evaluate.sources import Questions
from diffprune.model import PrunedVLM
from diffprune_lab.scarce.draw import pack, render
from diffprune_lab.scarce.oracle import Oracle
from diffprune_lab.scarce.tasks import TASKS, build_task
from diffprune_lab.scarce.world import SPLITS, Scene
from diffprune_lab.scenes.encode import to_bytes
from diffprune_lab.scenes.pixels import make_features, takes_pixels
from diffprune_lab.scenes.world import PICTURE


def encode_scenes(
    vlm: PrunedVLM, scenes: Sequence[Scene], needs: frozenset[str], *, seeds: bool = True
) -> EncodedPictures:
    """Scenes drawn and encoded where the model runs.

    Args:
        seeds: Also the number made from each picture's pixels, for which these are brought to the CPU.
    """
    if not takes_pixels(vlm.backbone, "fixed"):
        raise ValueError(
            f"The scarce world has pictures of {PICTURE} px, which this model would resize: use scarce-llava."
        )
    drawn = list(render(pack(scenes), vlm.base.get_input_embeddings().weight.device)[0])
    batch = Batch(
        features={key: value.to(vlm.base.dtype) for key, value in make_features(vlm.backbone, drawn).items()},
        row_of_image=tuple(range(len(scenes))),
        sizes=tuple((picture.shape[2], picture.shape[1]) for picture in drawn),
        seeds=tuple(pixel_seed(to_bytes(picture)) for picture in drawn) if seeds else (),
    )
    tokens = vlm.backbone.encode(batch, needs)
    placeholders = (vlm.backbone.image_token_id,) * tokens.x.shape[1]
    return EncodedPictures(tokens if seeds else replace(tokens, seeds=None), (placeholders,) * len(scenes), {})


@dataclass(frozen=True)
class ScarceQuestions(Questions):
    """Questions about the second world, whose pictures are drawn where the model runs."""

    @property
    def note(self) -> str:
        return "the scarce tasks are stand-ins"

    def encode(self, vlm: PrunedVLM, images: Sequence[Scene], needs: frozenset[str]) -> EncodedPictures:
        return encode_scenes(vlm, images, needs)

    def open(self, images: Sequence[Scene]) -> list[Image.Image]:
        return [Image.fromarray(to_bytes(picture)) for picture in render(pack(images))[0]]

    def sizes_of(self, images: Sequence[Scene]) -> list[tuple[int, int]]:
        return [(PICTURE, PICTURE)] * len(images)

    def identity(self, image: Scene) -> str:
        return repr(image)

    def oracle(self, images: Sequence[Scene], seeds: Sequence[int]) -> Oracle:
        return Oracle.of(seeds, images)


class ScarceTasks:
    """The source of the tasks of the second world."""

    def names(self) -> tuple[str, ...]:
        return TASKS

    def build(
        self, names: Sequence[str] = TASKS, *, split: str = "test", count: int = 500, sizes: str = "", seed: int = 0
    ) -> ScarceQuestions:
        """Tasks by name; `count` has the scored units of each: questions, or pairs."""
        if split not in SPLITS:
            raise ValueError(f"there is no split {split!r}; choose from {', '.join(SPLITS)}")
        if sizes:
            raise ValueError(f"sizes={sizes!r} is not for the second world, whose pictures have one size; leave it out")
        return ScarceQuestions(tuple(build_task(name, split, count, seed) for name in names))


SCARCE_TASKS = ScarceTasks()
