"""SmolVLM: built as Idefics3, in small sizes."""

from typing import ClassVar

from diffprune.backbones._idefics import ShuffledTiles
from diffprune.backbones.base import Preset
from diffprune.registry import BACKBONES


@BACKBONES.register("smolvlm")
class SmolVLM(ShuffledTiles):
    family: ClassVar[str] = "smolvlm"
    unserved: ClassVar[str | None] = (
        "a picture's placeholders stand in groups between other tokens, one group for each of its tiles"
    )
    presets: ClassVar[dict[str, Preset]] = {
        "smolvlm2-256m": Preset(
            hub_id="HuggingFaceTB/SmolVLM2-256M-Video-Instruct", num_visual="64 a tile, at most 17 tiles"
        ),
        "smolvlm2-500m": Preset(
            hub_id="HuggingFaceTB/SmolVLM2-500M-Video-Instruct", num_visual="64 a tile, at most 17 tiles"
        ),
        "smolvlm2-2.2b": Preset(
            hub_id="HuggingFaceTB/SmolVLM2-2.2B-Instruct", num_visual="81 a tile, at most 17 tiles"
        ),
    }
