"""LLaVA-NeXT (1.6): a picture at any resolution, as one overview and several tiles, with newline tokens between rows.

The tower sees the whole picture scaled to a square (tile 0) and tiles 1.. of the picture scaled, padded and cut. In the
prompt the overview comes first; then the tiles joined to one large view, row by row over all of them, the padding cut
away, a newline token behind each row. N counts the tokens of overview and large view; newlines are no tokens here but
slots. `grid` is (rows, columns) of the large view: the tokens after the first side x side.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int, UInt8
from PIL import Image
from torch import Tensor
from transformers.image_processing_utils import select_best_resolution

from diffprune.backbones._anyres import View, joined_boxes, num_tiles_of, real_tiles, sizes_of, unpadded
from diffprune.backbones._clip import layer_attention
from diffprune.backbones._presets import clip_and_llama
from diffprune.backbones._tower import TowerBackbone
from diffprune.backbones.base import Preset, with_needs
from diffprune.backbones.features import Layout
from diffprune.backbones.forms import Form, smaller_sizes
from diffprune.backbones.processors import Picture, by_size, normalise, resize
from diffprune.backbones.prompts import Batch
from diffprune.ops import pad_rows
from diffprune.registry import BACKBONES
from diffprune.types import VisualTokens


def describe(size: str, tiny: bool) -> tuple[Any, Any]:
    """Configuration and processor of LLaVA-1.6: the parts of LLaVA-1.5, over an overview and up to four tiles."""
    from transformers import LlavaNextConfig, LlavaNextImageProcessorPil, LlavaNextProcessor

    tiles = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336}, image_grid_pinpoints=tiles
    )
    return clip_and_llama(LlavaNextConfig, LlavaNextProcessor, images, size, tiny, image_grid_pinpoints=tiles)


@BACKBONES.register("llava_next")
class LlavaNext(TowerBackbone):
    family: ClassVar[str] = "llava_next"
    provides: ClassVar[frozenset[str]] = frozenset({"projected", "text", "cls_attention", "keys"})
    presets: ClassVar[dict[str, Preset]] = {
        "llava-next-7b": Preset(
            hub_id="llava-hf/llava-v1.6-vicuna-7b-hf", num_visual="at most 2880", describe=partial(describe, "7b")
        ),
        "llava-next-13b": Preset(
            hub_id="llava-hf/llava-v1.6-vicuna-13b-hf", num_visual="at most 2880", describe=partial(describe, "13b")
        ),
    }

    compiled_tower: ClassVar[str | None] = "diffprune.fast.towers:TileTower"

    @property
    def newline(self) -> Float[Tensor, " L"]:
        return self.model.model.image_newline

    def rows_of_slots(self, slots: Int[Tensor, "I S"]) -> Int[Tensor, "I S"]:
        """As for any family, but the overview stands before the first row and is no part of it."""
        rows = super().rows_of_slots(slots) + 1
        rows[:, : self.side**2] = 0
        return rows

    @torch.no_grad()
    def encode(self, batch: Batch, needs: frozenset[str] = frozenset()) -> VisualTokens:
        tower, layer = self.model.model.vision_tower, self.config.vision_feature_layer
        pixels, num_tiles = real_tiles(batch.features, self.config)
        hidden = tower(pixels, output_hidden_states=True).hidden_states
        packed = self.packed_index(num_tiles, batch.features["image_sizes"])
        content = [row[row >= 0] for row in packed]

        def rows(per_patch: Float[Tensor, "tiles P ..."]) -> Tensor:
            """Values of every patch of every tile as padded rows of tokens, in the order of the prompt."""
            images = per_patch.split(num_tiles)
            return pad_rows([image.flatten(0, 1)[index] for image, index in zip(images, content, strict=True)])

        extra: dict[str, Any] = {}
        if needs & {"cls_attention", "keys"}:
            attention, keys = layer_attention(tower, hidden, layer)
            extra = {
                name: rows(value[:, 1:])
                for name, value in (("cls_attention", attention), ("keys", keys))
                if name in needs
            }
        tokens = VisualTokens(
            x=rows(hidden[layer][:, 1:]),
            mask=pad_rows([torch.ones_like(row, dtype=torch.bool) for row in content]),
            seeds=batch.seeds,
            **self.layout(batch, packed),
            **extra,
        )
        return with_needs(self, batch, tokens, needs)

    def picture_layout(self, features: Mapping[str, Tensor]) -> Layout:
        _, num_tiles = real_tiles(features, self.config)
        packed = self.packed_index(num_tiles, features["image_sizes"])
        return Layout([len(row) for row in packed], sizes_of(features))

    def layout(self, batch: Batch, packed: list[Int[Tensor, " _"]]) -> dict[str, Any]:
        """What `VisualTokens` holds of where the tokens of these pictures come from."""
        views = [
            unpadded(size, self.config.image_grid_pinpoints, self.config.vision_config.image_size, self.side)
            for size in batch.sizes or sizes_of(batch.features)
        ]
        return {
            "grid": tuple((view.rows, view.columns) for view in views),
            "segment": pad_rows([row[row >= 0] // self.side**2 for row in packed], -1),
            "slots": pad_rows([torch.where(row >= 0, (row >= 0).cumsum(0) - 1, -1) for row in packed], -2),
            "boxes": self.boxes(batch.sizes, views).to(packed[0].device) if batch.sizes else None,
        }

    def packed_index(self, num_tiles: list[int], image_sizes: Int[Tensor, "I 2"]) -> list[Int[Tensor, " _"]]:
        """For each placeholder of each picture the patch behind it, counted over the picture's tiles; -1 is a newline.

        The model's own packing run on numbers instead of features, so that the order is the model's and not ours.
        """
        numbers = [torch.arange(n * self.side**2, dtype=torch.float64).view(n, -1, 1) for n in num_tiles]
        newline = torch.tensor([-1.0], dtype=torch.float64)
        packed, _ = self.model.model.pack_image_features(numbers, image_sizes.cpu(), "default", image_newline=newline)
        return [row[:, 0].long().to(image_sizes.device) for row in packed]

    def boxes(self, sizes: tuple[tuple[int, int], ...], views: list[View]) -> Float[Tensor, "B N 4"]:
        """Overview first, then the large view, in the pixels of each picture."""
        return pad_rows([joined_boxes(size, view, self.side) for size, view in zip(sizes, views, strict=True)])

    @classmethod
    def num_newlines(cls, config: Any, size: tuple[int, int]) -> int:
        """One behind each row of the large view."""
        vision = config.vision_config
        side = vision.image_size // vision.patch_size
        return unpadded(size, config.image_grid_pinpoints, vision.image_size, side).rows

    @classmethod
    def num_encoded(cls, config: Any, size: tuple[int, int], num_visual: int) -> int:
        """Whole tiles, the overview included."""
        vision = config.vision_config
        side = vision.image_size // vision.patch_size
        return num_tiles_of(size, config.image_grid_pinpoints, vision.image_size) * side**2

    def forms(self, size: tuple[int, int], *, alone: bool = True) -> Iterator[Form]:
        def count(size: tuple[int, int]) -> int:
            view = unpadded(size, self.config.image_grid_pinpoints, self.config.vision_config.image_size, self.side)
            return self.side**2 + view.rows * view.columns

        return smaller_sizes(size, count)

    def keeps_size(self, size: tuple[int, int]) -> bool:
        """Whether a picture is cut into whole tiles as it is; the overview is always made smaller."""
        processor, (width, height) = self.processor.image_processor, size
        tile: int = dict(processor.crop_size)["height"]
        lengths = {*dict(processor.size).values(), *dict(processor.crop_size).values()}
        if lengths != {tile} or processor.resample != Image.Resampling.BICUBIC:
            return False
        best = select_best_resolution((height, width), [list(point) for point in processor.image_grid_pinpoints])
        return tuple(best) == (height, width) and height % tile == width % tile == 0

    def pixel_features(self, pictures: Sequence[Picture]) -> dict[str, Tensor]:
        processor = self.processor.image_processor
        tile = dict(processor.crop_size)["height"]

        def cut(pixels: UInt8[Tensor, "B 3 H W"]) -> Float[Tensor, "B X 3 tile tile"]:
            overview = resize(pixels, tile, tile, "bicubic")
            tiles = pixels.unfold(2, tile, tile).unfold(3, tile, tile)  # [B, 3, rows, columns, tile, tile]
            return normalise(processor, torch.cat([overview[:, None], tiles.flatten(2, 3).transpose(1, 2)], dim=1))

        sizes = [list(picture.shape[-2:]) for picture in pictures]
        return {
            "pixel_values": pad_rows(by_size(pictures, cut)),
            "image_sizes": torch.tensor(sizes, device=pictures[0].device),
        }
