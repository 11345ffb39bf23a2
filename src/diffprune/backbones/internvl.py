"""InternVL: a picture as tiles and an overview, 2 x 2 patches to a language token, plain positions.

Tiles stand in the prompt one after the other, row by row of the picture, the overview last (a picture of one tile has
none). All have side x side tokens, so `grid` is (tiles * side, side): the tiles one below the other.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

from diffprune.backbones._clip import layer_attention
from diffprune.backbones._tiled import num_tiles, stacked_tiles, tile_grids
from diffprune.backbones._tower import TowerBackbone
from diffprune.backbones.base import Preset, with_needs
from diffprune.backbones.features import Layout
from diffprune.backbones.forms import Form
from diffprune.backbones.prompts import Batch
from diffprune.registry import BACKBONES
from diffprune.types import Grid, VisualTokens


@BACKBONES.register("internvl")
class InternVL(TowerBackbone):
    family: ClassVar[str] = "internvl"
    provides: ClassVar[frozenset[str]] = frozenset({"projected", "text", "cls_attention", "keys"})
    presets: ClassVar[dict[str, Preset]] = {
        "internvl3-1b": Preset(hub_id="OpenGVLab/InternVL3-1B-hf", num_visual="256 a tile, at most 13 tiles"),
        "internvl3-8b": Preset(hub_id="OpenGVLab/InternVL3-8B-hf", num_visual="256 a tile, at most 13 tiles"),
    }

    @classmethod
    def has_class_token(cls, config: Any) -> bool:
        return True

    @torch.no_grad()
    def encode(self, batch: Batch, needs: frozenset[str] = frozenset()) -> VisualTokens:
        tower, layer = self.model.model.vision_tower, self.config.vision_feature_layer
        out = tower(pixel_values=batch.features["pixel_values"], output_hidden_states=True)
        features = out.last_hidden_state if layer == -1 else out.hidden_states[layer]
        extra: dict[str, Tensor] = {}
        if needs & {"cls_attention", "keys"}:
            attention, keys = layer_attention(tower, out.hidden_states, layer)
            if "cls_attention" in needs:
                extra["cls_attention"] = self.group(attention[:, 1:, None]).mean(-1)
            if "keys" in needs:
                extra["keys"] = self.group(keys[:, 1:]).unflatten(-1, (self.group_size, -1)).mean(2)
        grids = tile_grids(batch, self.tile_grid)
        tokens = stacked_tiles(self.group(features[:, 1:]), grids, batch, group=self.group_size, extra=extra)
        return with_needs(self, batch, tokens, needs)

    def picture_layout(self, features: Mapping[str, Tensor]) -> Layout:
        """A picture is a run of placeholders; how its tiles lie is not told, so they count as one below the other."""
        is_image = functional.pad(features["input_ids"] == self.image_token_id, (1, 1))
        starts, ends = ((is_image[:, :-1] != is_image[:, 1:]).nonzero()[:, 1].view(-1, 2)).unbind(-1)
        placeholders = (ends - starts).tolist()
        counts = [count // int(self.processor.image_seq_length) for count in placeholders]
        grids = [(max(1, count - 1), 1) for count in counts]
        tile = features["pixel_values"].shape[-1]
        return Layout(placeholders, [(tile, rows * tile) for rows, _ in grids], grids)

    def pictures_of(self, batch: Batch, images: Sequence[int]) -> Batch:
        counts = [num_tiles(grid) for grid in tile_grids(batch, self.tile_grid)]
        tiles = batch.features["pixel_values"].split(counts)
        return batch.only(images, {"pixel_values": torch.cat([tiles[image] for image in images])})

    @property
    def group_size(self) -> int:
        return int(1 / self.config.downsample_ratio) ** 2

    def group(self, patches: Float[Tensor, "tiles P D"]) -> Float[Tensor, "tiles N E"]:
        """The patches of each language token side by side, E = G * D, by the model's own pixel shuffle."""
        side = int(patches.shape[1] ** 0.5)
        shuffled = self.model.model.pixel_shuffle(
            patches.unflatten(1, (side, side)), scale_factor=self.config.downsample_ratio
        )
        return shuffled.flatten(1, 2)

    def tile_grid(self, size: tuple[int, int]) -> Grid:
        """(rows, columns) of a picture's tiles, by the image processor's rule."""
        return self._tile_grid(size, self.processor.image_processor.max_patches)

    def _tile_grid(self, size: tuple[int, int], most: int) -> Grid:
        processor = self.processor.image_processor
        tile = (processor.size["height"], processor.size["width"])
        columns, rows = get_optimal_tiled_canvas((size[1], size[0]), tile, processor.min_patches, most)
        return rows, columns

    def forms(self, size: tuple[int, int], *, alone: bool = True) -> Iterator[Form]:
        """Fewer tiles at the most: of a picture's shape alone depends how many it is cut into."""
        processor = self.processor.image_processor
        for most in range(processor.max_patches, processor.min_patches - 1, -1):
            tiles = num_tiles(self._tile_grid(size, most))
            yield Form(size, tiles * self.processor.image_seq_length, ("max_patches", most))
