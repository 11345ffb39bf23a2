"""Idefics3: a picture as tiles and an overview, s x s patches to a language token, plain positions."""

from typing import ClassVar

from diffprune.backbones._idefics import ShuffledTiles
from diffprune.backbones.base import Preset
from diffprune.registry import BACKBONES


@BACKBONES.register("idefics3")
class Idefics3(ShuffledTiles):
    family: ClassVar[str] = "idefics3"
    unserved: ClassVar[str | None] = (
        "a picture's placeholders stand in groups between other tokens, one group for each of its tiles"
    )
    presets: ClassVar[dict[str, Preset]] = {
        "idefics3-8b": Preset(hub_id="HuggingFaceM4/Idefics3-8B-Llama3", num_visual="169 a tile, at most 17 tiles"),
    }
