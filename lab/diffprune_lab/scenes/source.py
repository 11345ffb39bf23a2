"""The ten scenes tasks as `diffprune eval --tasks scenes` finds them: drawn on the device, with an oracle."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from PIL import Image

from diffprune.evaluate.pictures import EncodedPictures
from diffprune.evaluate.sources import Questions
from diffprune.model import PrunedVLM
from diffprune_lab.scenes.encode import encode_scenes, own_sizes, scene_images
from diffprune_lab.scenes.oracle import Oracle
from diffprune_lab.scenes.sizes import picture_size, require_sizes
from diffprune_lab.scenes.tasks import PREFIX, TASKS, build_task
from diffprune_lab.scenes.world import SPLITS, Scene


@dataclass(frozen=True)
class ScenesQuestions(Questions):
    """Questions about scenes, whose pictures are drawn where the model runs.

    Attributes:
        sizes: How pictures are sized (`scenes.sizes.SIZES`); empty: the model's own way.
    """

    sizes: str = ""

    @property
    def note(self) -> str:
        sized = "" if self.sizes in ("", "fixed") else f"; pictures of sizes {self.sizes}"
        return f"the scenes tasks are stand-ins{sized}"

    def for_model(self, vlm: PrunedVLM) -> "ScenesQuestions":
        return replace(self, sizes=self.sizes or own_sizes(vlm))

    def encode(self, vlm: PrunedVLM, images: Sequence[Scene], needs: frozenset[str]) -> EncodedPictures:
        return encode_scenes(vlm, images, needs, sizes=self.sizes)

    def open(self, images: Sequence[Scene]) -> list[Image.Image]:
        return scene_images(images, self.sizes)

    def sizes_of(self, images: Sequence[Scene]) -> list[tuple[int, int]]:
        return [(width, height) for height, width in (picture_size(scene, self.sizes) for scene in images)]

    def identity(self, image: Scene) -> str:
        return f"{image!r} {self.sizes}"

    def oracle(self, images: Sequence[Scene], seeds: Sequence[int]) -> Oracle:
        return Oracle.of(zip(seeds, images, strict=True), self.sizes)


class ScenesTasks:
    """The source of the scenes tasks."""

    def names(self) -> tuple[str, ...]:
        return tuple(PREFIX + kind for kind in TASKS)

    def build(
        self, names: Sequence[str] = TASKS, *, split: str = "test", count: int = 500, sizes: str = "", seed: int = 0
    ) -> ScenesQuestions:
        """Tasks by name; `count` has the scored units of each: questions, sets of four rotations, or pairs."""
        if split not in SPLITS:
            raise ValueError(f"there is no split {split!r}; choose from {', '.join(SPLITS)}")
        if sizes:
            require_sizes(sizes)
        return ScenesQuestions(tuple(build_task(name, split, count, seed) for name in names), sizes)


SCENES_TASKS = ScenesTasks()
