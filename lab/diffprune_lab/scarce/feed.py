"""Batches for training on the second world: scenes and text from worker processes, pictures drawn on the device."""

import torch

from diffprune.rng import Rng
from diffprune_lab.pretrain import feed
from diffprune_lab.pretrain.feed import Batch, SceneStream, Told, split_programs
from diffprune_lab.scarce import targets, tasks
from diffprune_lab.scarce.draw import pack, render
from diffprune_lab.scarce.world import Scene, make_scene, vary


def tower_batch(scenes: list[Scene]) -> Batch:
    """What the tower stage needs of the scenes: what they hold, and a twin of each picture with parts changed."""
    arrays = targets.scene_arrays(scenes) | {f"draw_{name}": array for name, array in pack(scenes).items()}
    twins = pack([vary(scene, Rng("twin", scene.index)) for scene in scenes])
    arrays |= {f"twin_{name}": array for name, array in twins.items()}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


class LanguageBatch(feed.LanguageBatch):
    """Makes what the language stage needs of scenes of this world."""

    default_weights, kinds = tasks.DEFAULT_WEIGHTS, tasks.KINDS_OF_TURN

    def mixed(self, scene: Scene, rng: Rng) -> list[Told]:
        return tasks.training_turns(scene, rng, self.count, self.weights)

    def one_each(self, scene: Scene, rng: Rng) -> list[Told]:
        asked = [tasks.draw_turn(scene, rng, kind) for kind in tasks.DEFAULT_WEIGHTS]
        return [turn for turn in asked if turn is not None]

    def pictures(self, scenes: list[Scene]) -> Batch:
        arrays = {f"draw_{name}": array for name, array in pack(scenes).items()}
        arrays["things"] = targets.scene_arrays(scenes)["things"]
        return {name: torch.from_numpy(array) for name, array in arrays.items()}


class ScarceStream(SceneStream):
    """Batches of training scenes in order of their numbers, without end."""

    def _scene(self, index: int) -> Scene:  # pyright: ignore[reportIncompatibleMethodOverride]
        return make_scene("train", index, seed=self.seed)


def draw_batch(batch: Batch, device: torch.device) -> Batch:
    """The batch on the device, with `pixels`, `labels`, `regions` and `twin` in place of the drawing programs."""
    programs, drawn = split_programs(batch, device)
    drawn["pixels"], drawn["labels"], drawn["regions"] = render(programs["draw"], device)
    if programs["twin"]:
        drawn["twin"] = render(programs["twin"], device)[0]
    return drawn
