"""Batches for training the reference models: scenes and text from worker processes, pictures drawn on the device."""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from diffprune.rng import Rng
from diffprune_lab.pretrain import supervision, turns
from diffprune_lab.scenes.draw import pack, render
from diffprune_lab.scenes.tasks import TASKS
from diffprune_lab.scenes.training_turns import DEFAULT_WEIGHTS, training_turns_by_kind
from diffprune_lab.scenes.world import Scene, make_scene

SLOTS = 246  # text tokens for each picture; with the two in front of the picture a multiple of 8, which attention likes
KINDS_OF_TURN = ("caption", *TASKS)

Batch = dict[str, Tensor]
Told = tuple[str, str, str]  # kind, prompt and answer of a turn
Make = Callable[[list[Scene]], Batch]
Draw = Callable[[Batch, torch.device], Batch]


def picture_arrays(scenes: list[Scene]) -> Batch:
    """The drawing programs of the scenes, and where letters are tags."""
    arrays = {f"draw_{name}": torch.from_numpy(array) for name, array in pack(scenes).items()}
    return arrays | {"tagged": torch.tensor([scene.kind == "diagram" for scene in scenes])}


def tower_batch(scenes: list[Scene]) -> Batch:
    """What the tower stage needs of the scenes: targets, and a twin of each picture with some of its items gone."""
    items, summary, pairs = map(torch.from_numpy, supervision.scene_targets(scenes))
    twins = pack([supervision.without_items(scene, Rng("twin", scene.index)) for scene in scenes])
    arrays = picture_arrays(scenes) | {"items": items, "summary": summary, "pairs": pairs}
    return arrays | {f"twin_{name}": torch.from_numpy(array) for name, array in twins.items()}


class LanguageBatch:
    """Makes what the language stage needs of the scenes; another world says what is told of its own.

    Args:
        encode: Text to token ids.
        end: The id of `</s>`.
        count: Turns about each picture, as far as they fit.
        weights: Weights of kinds of turn that differ from the default.
        seed: Another seed asks other questions.
    """

    default_weights: ClassVar[Mapping[str, int]] = DEFAULT_WEIGHTS
    kinds: ClassVar[Sequence[str]] = KINDS_OF_TURN

    def __init__(
        self, encode: turns.PieceEncoder, end: int, *, count: int, weights: dict[str, int] | None = None, seed: int = 0
    ) -> None:
        self.encode, self.end, self.count, self.seed = encode, end, count, seed
        self.weights = {**self.default_weights, **(weights or {})}

    def __call__(self, scenes: list[Any]) -> Batch:
        """Turns of the mix of tasks about each scene."""
        return self._arrays(scenes, [self.mixed(scene, Rng(self.seed, "pretrain", scene.index)) for scene in scenes])

    def each_task(self, scenes: list[Any]) -> Batch:
        """One turn of each task that fits the scene, for checks."""
        return self._arrays(scenes, [self.one_each(scene, Rng(self.seed, "check", scene.index)) for scene in scenes])

    def mixed(self, scene: Any, rng: Rng) -> list[Told]:
        """Turns about a scene in the mix of training."""
        return training_turns_by_kind(scene, rng, self.count, self.weights, exercises=True)

    def one_each(self, scene: Any, rng: Rng) -> list[Told]:
        """A turn of each kind that fits the scene."""
        kinds = rng.shuffle(list(KINDS_OF_TURN))
        asked = [training_turns_by_kind(scene, rng, 1, {kind: 1})[0] for kind in kinds]
        return [turn for kind, turn in zip(kinds, asked, strict=True) if turn[0] == kind]

    def pictures(self, scenes: list[Any]) -> Batch:
        """What the pictures are drawn from."""
        return picture_arrays(scenes)

    def _arrays(self, scenes: list[Any], about: list[list[Told]]) -> Batch:
        listed = [[turns.Turn(*turn) for turn in turns_of_one] for turns_of_one in about]
        packed = turns.pack_turns(listed, self.encode, self.kinds, tokens=SLOTS, end=self.end)
        return self.pictures(scenes) | {name: torch.from_numpy(array) for name, array in packed._asdict().items()}


def parse_weights(text: str, known: Mapping[str, int] = DEFAULT_WEIGHTS) -> dict[str, int]:
    """Weights of turns from "gqa=20,mme=4"; an empty text changes none."""
    pairs = [part.partition("=") for part in text.split(",") if part]
    for name, _, number in pairs:
        if name not in known or not number.isdigit():
            example = ",".join(f"{kind}=20" for kind in list(known)[:2])
            raise ValueError(f"{name}={number} is not the weight of a turn: write for example {example}.")
    return {name: int(number) for name, _, number in pairs}


class SceneStream(IterableDataset):
    """Batches of training scenes in order of their numbers, whatever the number of workers, without end.

    Args:
        make: Makes a batch of scenes.
        first: Number of the first scene.
        size: Scenes in a batch.
        seed: Another seed is another world.
    """

    def __init__(self, make: Make, *, first: int, size: int, seed: int = 0) -> None:
        self.make, self.first, self.size, self.seed = make, first, size, seed

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        while True:
            start = self.first + number * self.size
            yield self.make([self._scene(index) for index in range(start, start + self.size)])
            number += workers

    def _scene(self, index: int) -> Scene:
        """Every fourth scene is a diagram: their questions are the hardest and their natural share is the smallest."""
        return make_scene("train", index, kind="diagram" if index % 4 == 0 else None, seed=self.seed)

    def start(self, workers: int) -> Iterator[Batch]:
        """The batches, made by this many processes (none: as they are asked for)."""
        if not workers:
            return iter(self)
        # Forked: the atlas and the vocabulary are there already.
        return iter(
            DataLoader(self, batch_size=None, num_workers=workers, prefetch_factor=4, multiprocessing_context="fork")
        )


def split_programs(batch: Batch, device: torch.device) -> tuple[dict[str, Batch], Batch]:
    """The drawing programs of the pictures ("draw") and of their twins ("twin"), and all else on the device."""
    programs: dict[str, Batch] = {"draw": {}, "twin": {}}
    drawn: Batch = {}
    for name, array in batch.items():
        what, _, part = name.partition("_")
        if what in programs:
            programs[what][part] = array
        else:
            drawn[name] = array.to(device, non_blocking=True)
    return programs, drawn


def draw_batch(batch: Batch, device: torch.device) -> Batch:
    """The batch on the device, with `pixels`, `owner` and `twin` (if there is one) in place of the drawing programs."""
    programs, drawn = split_programs(batch, device)
    drawn["pixels"], drawn["owner"] = render(programs["draw"], device, owner=True)
    if programs["twin"]:
        drawn["twin"] = cast(Tensor, render(programs["twin"], device))
    return drawn


class Feeder:
    """Batches with their pictures, made ahead by a thread of its own.

    Drawing waits for its copies to the device; on a stream beside that of the training this holds nothing up.
    """

    def __init__(
        self, batches: Iterator[Batch], device: torch.device, draw: Draw = draw_batch, *, ahead: int = 3
    ) -> None:
        self.waited = 0.0
        self._draw_on = draw
        self._batches, self._device = batches, device
        self._queue: queue.Queue = queue.Queue(maxsize=ahead)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._fill, daemon=True)
        self._thread.start()

    def next(self) -> Batch:
        """The next batch; the seconds spent waiting for it are added to `waited`."""
        start = time.perf_counter()
        ready = self._queue.get()
        self.waited += time.perf_counter() - start
        if isinstance(ready, Exception):
            raise ready
        batch, event = ready
        if event is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(event)
            for tensor in batch.values():
                tensor.record_stream(current)
        return batch

    def stop(self) -> None:
        """Ends the thread."""
        self._stopped.set()
        self._thread.join()

    def _fill(self) -> None:
        try:
            while not self._stopped.is_set():
                self._put(self._draw(next(self._batches)))
        except Exception as error:  # raised for whoever waits for the batch
            self._put(error)

    def _put(self, ready: object) -> None:
        while not self._stopped.is_set():
            try:
                return self._queue.put(ready, timeout=0.1)
            except queue.Full:
                continue

    def _draw(self, batch: Batch) -> tuple[Batch, torch.cuda.Event | None]:
        if self._stream is None:
            return self._draw_on(batch, self._device), None
        with torch.cuda.stream(self._stream):
            drawn = self._draw_on(batch, self._device)
            event = torch.cuda.Event()
            event.record(self._stream)
        return drawn, event
