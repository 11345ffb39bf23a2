"""What Idefics3 and SmolVLM share: a picture as tiles and an overview, s x s patches to a language token.

Each tile stands in the prompt behind a text token that names its row and column; the overview comes last. Text tokens
stay, tiles are pruned: even a tile that keeps nothing leaves its name. All have side x side tokens, so `grid` is
(tiles * side, side): the tiles one below the other. Positions are plain.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn

from diffprune.backbones._clip import layer_attention
from diffprune.backbones._tiled import num_tiles, stacked_tiles, tile_grids
from diffprune.backbones.base import Backbone, with_needs
from diffprune.backbones.features import Layout
from diffprune.backbones.forms import Form
from diffprune.backbones.prompts import Batch
from diffprune.types import Grid, VisualTokens

SIDES = range(1, 16)  # tiles that a name may count each way
MAX_SIDE = 4096  # of the scaled picture, fixed in the image processor


class ShuffledTiles(Backbone):
    """Everything but the sizes of Idefics3 and SmolVLM."""

    provides: ClassVar[frozenset[str]] = frozenset({"projected", "text", "cls_attention", "keys"})

    def vision_modules(self) -> dict[str, nn.Module]:
        return {"vision_model": self.model.model.vision_model, "connector": self.model.model.connector}

    @property
    def language_model(self) -> Any:
        return self.model.model.text_model

    def process(self, pictures: list[list[Image.Image]], prompts: list[str]) -> dict[str, Tensor]:
        """By prompt, not in one flat list: the processor pads the tiles of each prompt."""
        kwargs: dict[str, Any] = {"images": pictures} if any(pictures) else {}
        return dict(self.processor(text=prompts, padding=True, padding_side="left", return_tensors="pt", **kwargs))

    def picture_layout(self, features: Mapping[str, Tensor]) -> Layout:
        """A picture ends with its overview, and the name of the tile before that says how many rows and columns."""
        per_tile, tile = int(self.processor.image_seq_len), features["pixel_values"].shape[-1]
        overview = self.tokenizer.convert_tokens_to_ids("<global-img>")
        names = {self.tokenizer.convert_tokens_to_ids(f"<row_{r}_col_{c}>"): (r, c) for r in SIDES for c in SIDES}
        grids: list[Grid] = []
        last = (1, 1)
        for token in features["input_ids"].flatten().tolist():
            if token == overview:
                grids.append(last)
                last = (1, 1)
            else:
                last = names.get(token, last)
        sizes = [(columns * tile, rows * tile) for rows, columns in grids]
        return Layout([num_tiles(grid) * per_tile for grid in grids], sizes, grids)

    def pictures_of(self, batch: Batch, images: Sequence[int]) -> Batch:
        """One row of tiles: those that are real come one after the other over all prompts."""
        real = batch.features["pixel_attention_mask"].flatten(0, 1).flatten(1).any(-1)
        counts = [num_tiles(grid) for grid in tile_grids(batch, self.tile_grid)]
        own: dict[str, Tensor] = {}
        for key in ("pixel_values", "pixel_attention_mask"):
            tiles = batch.features[key].flatten(0, 1)[real].split(counts)
            own[key] = torch.cat([tiles[image] for image in images])[None]
        return batch.only(images, own)

    @torch.no_grad()
    def encode(self, batch: Batch, needs: frozenset[str] = frozenset()) -> VisualTokens:
        tower = self.model.model.vision_model
        pixels = batch.features["pixel_values"].flatten(0, 1)
        real = batch.features["pixel_attention_mask"].flatten(0, 1).flatten(1).any(-1)  # the rest pads the batch
        out = tower(pixel_values=pixels[real], output_hidden_states=True)
        extra: dict[str, Tensor] = {}
        if needs & {"cls_attention", "keys"}:
            attention, keys = layer_attention(tower, out.hidden_states, -1, has_cls=False)
            if "cls_attention" in needs:
                extra["cls_attention"] = self.group(attention[..., None]).mean(-1)
            if "keys" in needs:
                extra["keys"] = self.group(keys).unflatten(-1, (self.config.scale_factor**2, -1)).mean(2)
        grids = tile_grids(batch, self.tile_grid)
        group = self.config.scale_factor**2
        tokens = stacked_tiles(self.group(out.last_hidden_state), grids, batch, group=group, extra=extra)
        return with_needs(self, batch, tokens, needs)

    def project(self, x: Float[Tensor, "B K D"]) -> Float[Tensor, "B K L"]:
        return self.model.model.connector.modality_projection(x)

    def group(self, patches: Float[Tensor, "tiles P D"]) -> Float[Tensor, "tiles N E"]:
        """The patches of each language token side by side, E = G * D, by the model's own pixel shuffle."""
        return self.model.model.connector.pixel_shuffle(patches, self.config.scale_factor)

    def tile_grid(self, size: tuple[int, int]) -> Grid:
        """(rows, columns) of a picture's tiles: scaled to the longest edge, then up to whole tiles."""
        return self._tile_grid(size, self.processor.image_processor.size["longest_edge"])

    def _tile_grid(self, size: tuple[int, int], longest: int) -> Grid:
        processor = self.processor.image_processor
        if not processor.do_image_splitting:
            return 1, 1
        width, height = size
        if processor.do_resize:
            width, height = _scaled(width, height, longest)
        tile = processor.max_image_size["longest_edge"]
        if width >= height:
            columns = math.ceil(width / tile)
            return math.ceil(int(columns * tile / (width / height)) / tile), columns
        rows = math.ceil(height / tile)
        return rows, math.ceil(int(rows * tile * (width / height)) / tile)

    def forms(self, size: tuple[int, int], *, alone: bool = True) -> Iterator[Form]:
        """A shorter longest edge: every picture is scaled to it, up or down, before it is cut."""
        processor = self.processor.image_processor
        longest, tile = processor.size["longest_edge"], processor.max_image_size["longest_edge"]
        kind = type(processor.size)
        for edge in [longest, *range((longest - 1) // tile * tile, 0, -tile)]:
            tiles = num_tiles(self._tile_grid(size, edge))
            yield Form(size, tiles * self.processor.image_seq_len, ("size", kind(longest_edge=edge)))


def _scaled(width: int, height: int, longest: int) -> tuple[int, int]:
    """(width, height) with the longer edge `longest`, the other one even, and neither above what is allowed."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        width, height = int(longest * ratio), longest
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    ratio = width / height
    if width >= height and width > MAX_SIDE:
        width, height = MAX_SIDE, int(MAX_SIDE / ratio)
    elif height > width and height > MAX_SIDE:
        width, height = int(MAX_SIDE * ratio), MAX_SIDE
    return max(width, 1), max(height, 1)
