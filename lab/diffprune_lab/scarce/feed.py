"""Batches for training on the second world: scenes and text from worker processes, pictures drawn on the device."""

import torch
from torch import Tensor

from diffprune.rng import Rng
from diffprune_lab.pretrain import turns
from diffprune_lab.pretrain.feed import Batch, SceneStream
from diffprune_lab.scarce import targets, tasks
from diffprune_lab.scarce.draw import pack, render
from diffprune_lab.scarce.world import Scene, make_scene, vary

SLOTS = 246  # text tokens for each picture; with the two in front of the picture a multiple of 8


def tower_batch(scenes: list[Scene]) -> Batch:
    """What the tower stage needs of the scenes: what they hold, and a twin of each picture with parts changed."""
    arrays = targets.scene_arrays(scenes) | {f"draw_{name}": array for name, array in pack(scenes).items()}
    twins = pack([vary(scene, Rng("twin", scene.index)) for scene in scenes])
    arrays |= {f"twin_{name}": array for name, array in twins.items()}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


class LanguageBatch:
    """Makes what the language stage needs of the scenes.

    Args:
        encode: Text to token ids.
        end: The id of `</s>`.
        count: Turns told of each picture, as far as they fit.
        weights: Weights of kinds of question that differ from the default.
        seed: Another seed asks other questions.
    """

    def __init__(
        self, encode: turns.PieceEncoder, end: int, *, count: int, weights: dict[str, int] | None = None, seed: int = 0
    ) -> None:
        self.encode, self.end, self.count, self.seed = encode, end, count, seed
        self.weights = {**tasks.DEFAULT_WEIGHTS, **(weights or {})}

    def __call__(self, scenes: list[Scene]) -> Batch:
        """A caption and questions of all kinds about each scene."""
        told = [
            tasks.training_turns(scene, Rng(self.seed, "pretrain", scene.index), self.count, self.weights)
            for scene in scenes
        ]
        return self._arrays(scenes, told)

    def each_task(self, scenes: list[Scene]) -> Batch:
        """One question of each kind that fits the scene, for checks."""
        told = []
        for scene in scenes:
            rng = Rng(self.seed, "check", scene.index)
            asked = [tasks.draw_turn(scene, rng, kind) for kind in tasks.DEFAULT_WEIGHTS]
            told.append([turn for turn in asked if turn is not None])
        return self._arrays(scenes, told)

    def _arrays(self, scenes: list[Scene], told: list[list[tuple[str, str, str]]]) -> Batch:
        listed = [[turns.Turn(*turn) for turn in about] for about in told]
        packed = turns.pack_turns(listed, self.encode, tasks.KINDS_OF_TURN, tokens=SLOTS, end=self.end)
        arrays = {f"draw_{name}": array for name, array in pack(scenes).items()} | packed._asdict()
        arrays["things"] = targets.scene_arrays(scenes)["things"]
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


def parse_weights(text: str) -> dict[str, int]:
    """Weights of questions from "sign=20,size=4"; an empty text changes none."""
    pairs = [part.partition("=") for part in text.split(",") if part]
    for name, _, number in pairs:
        if name not in tasks.DEFAULT_WEIGHTS or not number.isdigit():
            raise ValueError(f"{name}={number} is not the weight of a question: write for example sign=20,size=4.")
    return {name: int(number) for name, _, number in pairs}


class ScarceStream(SceneStream):
    """Batches of training scenes in order of their numbers, without end."""

    def _scene(self, index: int) -> Scene:  # pyright: ignore[reportIncompatibleMethodOverride]
        return make_scene("train", index, seed=self.seed)


def draw_batch(batch: Batch, device: torch.device) -> Batch:
    """The batch on the device, with `pixels`, `labels`, `regions` and `twin` in place of the drawing programs."""
    programs: dict[str, dict[str, Tensor]] = {"draw": {}, "twin": {}}
    drawn: Batch = {}
    for name, array in batch.items():
        what, _, part = name.partition("_")
        if what in programs:
            programs[what][part] = array
        else:
            drawn[name] = array.to(device, non_blocking=True)
    drawn["pixels"], drawn["labels"], drawn["regions"] = render(programs["draw"], device)
    if programs["twin"]:
        drawn["twin"] = render(programs["twin"], device)[0]
    return drawn
