"""Captions of the second world as training data: `data.name: scarce`, by the entry-point group `diffprune.data`."""

from collections.abc import Sequence

from jaxtyping import Bool
from torch import Tensor

from diffprune.backbones.pictures import MADE_LATER
from diffprune.backbones.prompts import Batch
from diffprune.config import DataConfig
from diffprune.model import PrunedVLM
from diffprune.rng import hash_key
from diffprune.train.feed import Sample
from diffprune.types import VisualTokens
from diffprune_lab.scarce.draw import pack, render
from diffprune_lab.scarce.language import caption
from diffprune_lab.scarce.source import encode_scenes
from diffprune_lab.scarce.tokens import read_tokens
from diffprune_lab.scarce.world import make_scene
from diffprune_lab.scenes.captions import INSTRUCTION, captioned
from diffprune_lab.scenes.data import CaptionFeed

PRETRAINING = 1 << 38  # scenes of the model's own training have smaller numbers


class ScarceFeed(CaptionFeed):
    """Captions of scenes of the second world, drawn where the model runs.

    The caption speaks of every thing and of the sign, not of litter and ground.
    """

    make_scene, caption = staticmethod(make_scene), staticmethod(caption)

    def __init__(self, config: DataConfig, seed: int) -> None:
        if config.prompt != INSTRUCTION:
            raise ValueError(
                f"data.prompt is {config.prompt!r}: captions of this world are asked for by {INSTRUCTION!r}"
            )
        if config.sizes not in (None, "", "fixed"):
            raise ValueError(f"data.sizes is {config.sizes!r}: pictures of this world have one size; leave it out")
        super().__init__(config, PRETRAINING + (hash_key(seed, "scarce") >> 27))

    def prepare(self, vlm: PrunedVLM, samples: Sequence[Sample]) -> Batch | None:
        return None

    def encode(
        self, vlm: PrunedVLM, samples: Sequence[Sample], batch: Batch | None = None
    ) -> tuple[Batch, VisualTokens]:
        scenes = [sample.picture for sample in samples]
        pictures = encode_scenes(vlm, scenes, vlm.method.needs - MADE_LATER, seeds=False)
        return captioned(vlm, pictures, [sample.answer for sample in samples])

    def regions(self, vlm: PrunedVLM, tokens: VisualTokens, samples: Sequence[Sample]) -> Bool[Tensor, "B N"] | None:
        labels = render(pack([sample.picture for sample in samples]), tokens.x.device)[1]
        return (read_tokens(labels).item > 0) & tokens.mask
