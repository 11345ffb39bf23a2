"""Where tasks come from: sources behind the door `diffprune.tasks`, each a package's own or one written for a test."""

import inspect
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from PIL import Image

from diffprune import doors
from diffprune.backbones.processors import open_image, pixel_seed
from diffprune.evaluate.pictures import EncodedPictures, encode_images
from diffprune.evaluate.task import Task
from diffprune.methods.base import Pruner
from diffprune.model import PrunedVLM


@dataclass(frozen=True)
class Questions:
    """The tasks that are asked together, and what their source knows of their pictures.

    A source whose pictures are files or images needs nothing more; another overrides what it does differently.
    """

    tasks: tuple[Task, ...]

    @property
    def note(self) -> str:
        """What the reader of a results file must know of these questions; may be empty."""
        return ""

    def for_model(self, vlm: PrunedVLM) -> "Questions":
        """The questions as that model is asked them: what follows from the model is settled here."""
        return self

    def encode(self, vlm: PrunedVLM, images: Sequence[Any], needs: frozenset[str]) -> EncodedPictures:
        """Pictures, as `Question.images` has them, encoded: by default through the model's own processor."""
        return encode_images(vlm, self.open(images), needs)

    def encode_together(self, vlm: PrunedVLM, images: Sequence[Any], needs: frozenset[str]) -> EncodedPictures:
        """Pictures that are not alone in their prompt, for families that encode such otherwise."""
        return encode_images(vlm, self.open(images), needs, together=True)

    def open(self, images: Sequence[Any]) -> list[Image.Image]:
        """Pictures, as `Question.images` has them, as pictures of PIL."""
        return [open_image(image) for image in images]

    def sizes_of(self, images: Sequence[Any]) -> list[tuple[int, int]]:
        """(width, height) of each picture."""
        return [self.open([image])[0].size for image in images]  # one in memory at a time

    def identity(self, image: Any) -> str:
        """A text that differs between two pictures, for the digest that tells questions apart."""
        return str(image) if isinstance(image, str | os.PathLike) else str(pixel_seed(open_image(image)))

    def oracle(self, images: Sequence[Any], seeds: Sequence[int]) -> Pruner:
        """A pruner that knows what matters in these pictures, whose `VisualTokens.seeds` are given."""
        raise ValueError("there is no oracle: the source of these questions does not know what matters in a picture")


@runtime_checkable  # the tests check types at run time
class TaskSource(Protocol):
    """Tasks that a package brings along, joined by the entry-point group `diffprune.tasks`."""

    def names(self) -> Sequence[str]:
        """Every task there is."""
        ...

    def build(self, names: Sequence[str], *, split: str = "test", count: int = 500, sizes: str = "") -> Questions:
        """Tasks by name; what a source has no split or size of, it refuses in a sentence.

        A source that draws its pictures may also take `seed`, 0 by default: another one draws others.

        Args:
            count: Scored units of each task: questions, pairs, sets of rotations.
            sizes: Of the pictures; empty takes the source's or the model's own.
        """
        ...


def task_sources() -> dict[str, TaskSource]:
    """Every source of tasks that can be imported, by name."""
    return doors.load_all(doors.TASKS)


def build_tasks(text: str, *, split: str, count: int, sizes: str, seed: int = 0) -> Questions:
    """The tasks that a comma-separated list names (`find_tasks`), of the world with that seed where it is not 0."""
    source, names = find_tasks(text)
    drawn: dict[str, Any] = {}
    if seed:
        if "seed" not in inspect.signature(source.build).parameters:
            raise ValueError(f"--world-seed {seed}: the questions of {text!r} are not drawn from a seed; leave it out")
        drawn["seed"] = seed
    return source.build(names, split=split, count=count, sizes=sizes, **drawn)


def find_tasks(text: str) -> tuple[TaskSource, tuple[str, ...]]:
    """The source and the tasks that a comma-separated list names: tasks, or a source's name for all of its tasks."""
    sources = task_sources()
    if not sources:
        raise ValueError(
            f"tasks {text!r} cannot be asked: no source of tasks is installed; install a package that brings one "
            f"(entry-point group {doors.TASKS}), such as the lab of a checkout of the repository: "
            "pip install -e . -e lab"
        )
    there_are = " or ".join(f"{name} (all) or from {', '.join(source.names())}" for name, source in sources.items())
    found: dict[str, str] = {}  # each task, and its source
    for name in filter(None, text.split(",")):
        if name in sources:
            found |= dict.fromkeys(sources[name].names(), name)
            continue
        holders = [key for key, source in sources.items() if name in source.names()]
        if not holders:
            raise ValueError(f"there is no task {name!r}; choose {there_are}")
        found[name] = holders[0]
    if not found:
        raise ValueError(f"no task was named; choose {there_are}")
    if len(set(found.values())) > 1:
        raise ValueError(f"tasks {text!r} come from {', '.join(dict.fromkeys(found.values()))}; measure them in turn")
    return sources[next(iter(found.values()))], tuple(found)
