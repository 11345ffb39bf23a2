"""Captions of scenes as training data: `data.name: scenes`, joined by the entry-point group `diffprune.data`."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxtyping import Bool
from torch import Tensor

from diffprune.backbones.prompts import Batch
from diffprune.config import DataConfig
from diffprune.model import PrunedVLM
from diffprune.rng import Rng, hash_key
from diffprune.train.feed import Broken, Feed, Sample, prepare_pictures
from diffprune.types import VisualTokens
from diffprune_lab.scenes.captions import INSTRUCTION, caption_batch, item_regions
from diffprune_lab.scenes.encode import own_sizes, scene_images
from diffprune_lab.scenes.language import caption
from diffprune_lab.scenes.pixels import takes_pixels
from diffprune_lab.scenes.world import Scene, make_scene


class CaptionFeed(Feed):
    """Captions of scenes that are drawn on the fly, never the same one twice.

    Args:
        first: Number of the run's first scene; runs of different seeds lie far apart.
    """

    make_scene: Callable[..., Any]  # of a world: by split and number
    caption: Callable[..., str]  # of a scene, in words that are drawn

    def __init__(self, config: DataConfig, first: int) -> None:
        self.config, self.first = config, first

    @property
    def per_epoch(self) -> None:
        return None

    def validation(self) -> list[Sample | Broken]:
        return [self._sample("validation", number) for number in range(self.config.validation)]

    def read(self, positions: range, wanted: Sequence[int]) -> dict[int, Sample | Broken]:
        return {position: self._sample("train", self.first + position) for position in wanted}

    def _sample(self, split: str, number: int) -> Sample:
        scene = self.make_scene(split, number, seed=self.config.seed)
        text = self.caption(scene, Rng(self.config.seed, "captions", split, number))
        return Sample(id=number, picture=scene, question=self.config.prompt, answer=text)


class SceneFeed(CaptionFeed):
    """Captions of scenes of the first world.

    Pictures are drawn where the model runs, where its processor would leave their size alone; else they are pictures
    like any other.
    """

    make_scene, caption = staticmethod(make_scene), staticmethod(caption)

    def __init__(self, config: DataConfig, seed: int) -> None:
        super().__init__(config, hash_key(seed, "scenes") >> 24)

    def sizes(self, vlm: PrunedVLM) -> str:
        """How pictures are sized: as the config says; default: the model's own way."""
        return self.config.sizes or own_sizes(vlm)

    def prepare(self, vlm: PrunedVLM, samples: Sequence[Sample]) -> Batch | None:
        sizes = self.sizes(vlm)
        if takes_pixels(vlm.backbone, sizes) and all(sample.question == INSTRUCTION for sample in samples):
            return None
        return prepare_pictures(vlm, samples, scene_images(_scenes(samples), sizes))

    def encode(
        self, vlm: PrunedVLM, samples: Sequence[Sample], batch: Batch | None = None
    ) -> tuple[Batch, VisualTokens]:
        batch = self.prepare(vlm, samples) if batch is None else batch
        if batch is not None:
            return super().encode(vlm, samples, batch)
        return caption_batch(vlm, _scenes(samples), [sample.answer for sample in samples], self.sizes(vlm))

    def regions(self, vlm: PrunedVLM, tokens: VisualTokens, samples: Sequence[Sample]) -> Bool[Tensor, "B N"] | None:
        return item_regions(tokens, [sample.picture for sample in samples], self.sizes(vlm))


def _scenes(samples: Sequence[Sample]) -> list[Scene]:
    return [sample.picture for sample in samples]
