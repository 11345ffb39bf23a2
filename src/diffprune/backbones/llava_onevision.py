"""LLaVA-OneVision: tiles of any resolution like LLaVA-NeXT, but the connector scales them down after projecting.

So a language token has no patch of its own before the projector, and selection happens behind it: `x` holds projected
and scaled features (D = L) and `project` has nothing left to do. The overview (segment 0) comes first, then the large
view made of the tiles (segment 1), a newline behind each of its rows; `grid` is (rows, columns) of the large view. Of
several pictures in one prompt each is one square tile, padded.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from PIL import Image
from torch import Tensor

from diffprune.backbones._anyres import View, joined_boxes, real_tiles, sizes_of, unpadded, view_boxes
from diffprune.backbones._tower import TowerBackbone
from diffprune.backbones.base import Preset, with_needs
from diffprune.backbones.features import Layout
from diffprune.backbones.forms import Form, smaller_sizes
from diffprune.backbones.prompts import Batch
from diffprune.nn import BlockSpec
from diffprune.ops import pad_rows
from diffprune.registry import BACKBONES
from diffprune.types import VisualTokens


@BACKBONES.register("llava_onevision")
class LlavaOnevision(TowerBackbone):
    family: ClassVar[str] = "llava_onevision"
    unserved: ClassVar[str | None] = (
        "how it cuts a picture depends on the other pictures of the prompt, and the engine keeps each picture's tokens "
        "for every prompt"
    )
    provides: ClassVar[frozenset[str]] = frozenset({"projected", "text"})  # attention does not survive the scaling
    presets: ClassVar[dict[str, Preset]] = {
        "llava-onevision-0.5b": Preset(hub_id="llava-hf/llava-onevision-qwen2-0.5b-ov-hf", num_visual="at most 8019"),
        "llava-onevision-7b": Preset(hub_id="llava-hf/llava-onevision-qwen2-7b-ov-hf", num_visual="at most 8019"),
    }

    strategies: ClassVar[frozenset[str]] = frozenset({"default", "full"})  # "full": SigLIP has no [CLS]

    compiled_tower: ClassVar[str | None] = "diffprune.fast.towers:ScaledTileTower"

    @property
    def block(self) -> BlockSpec:
        """A block of the tower's kind, as wide as the language model: that is where tokens are scored."""
        return super().block.resized(self.config.text_config.hidden_size)

    @property
    def newline(self) -> Float[Tensor, " L"]:
        return self.model.model.image_newline

    def rows_of_slots(self, slots: Int[Tensor, "I S"]) -> Int[Tensor, "I S"]:
        """As for any family, but an overview stands before the first row and is no part of it."""
        rows = super().rows_of_slots(slots) + 1
        has_overview = ((slots == -1).sum(-1) > 1) | ((slots != -2).sum(-1) > self.side**2 + 1)
        rows[:, : self.side**2] *= ~has_overview[:, None]
        return rows

    def process(self, pictures: list[list[Image.Image]], prompts: list[str]) -> dict[str, Tensor]:
        """By prompt, not in one flat list: whether a picture is cut depends on whether it is alone in its prompt."""
        nested = [row for row in pictures if row]
        kwargs: dict[str, Any] = {"images": nested} if nested else {}
        return dict(self.processor(text=prompts, padding=True, padding_side="left", return_tensors="pt", **kwargs))

    @torch.no_grad()
    def encode(self, batch: Batch, needs: frozenset[str] = frozenset()) -> VisualTokens:
        tower, config = self.model.model.vision_tower, self.config
        whole = [batch.row_of_image.count(row) > 1 for row in batch.row_of_image]
        pixels, num_tiles = real_tiles(batch.features, config, whole)
        hidden = tower(pixels, output_hidden_states=True).hidden_states[config.vision_feature_layer]
        if config.vision_feature_select_strategy == "default":
            hidden = hidden[:, 1:]
        features = self.model.model.multi_modal_projector(hidden)
        packed = self.pack(features, num_tiles, batch.features["image_sizes"], None)
        # The same packing of zeros with newlines of one says where the newlines stand.
        marks = self.pack(
            torch.zeros_like(features[..., :1]), num_tiles, batch.features["image_sizes"], features.new_ones(1)
        )
        slots = [torch.where(mark[:, 0] == 0, (mark[:, 0] == 0).cumsum(0) - 1, -1) for mark in marks]
        sizes = batch.sizes or sizes_of(batch.features)
        views = [None if alone else self.view(size) for size, alone in zip(sizes, whole, strict=True)]
        boxes = [self.boxes(size, view) for size, view in zip(sizes, views, strict=True)] if batch.sizes else []
        overview = self.side**2
        tokens = VisualTokens(
            x=pad_rows(packed),
            mask=pad_rows([torch.ones(len(row), dtype=torch.bool, device=row.device) for row in packed]),
            grid=tuple((self.side, self.side) if view is None else (view.rows, view.columns) for view in views),
            segment=pad_rows([(torch.arange(len(row), device=row.device) >= overview).long() for row in packed], -1),
            seeds=batch.seeds,
            slots=pad_rows(slots, -2),
            boxes=pad_rows(boxes).to(pixels.device) if boxes else None,
        )
        return with_needs(self, batch, tokens, needs)

    def picture_layout(self, features: Mapping[str, Tensor]) -> Layout:
        """A prompt holds either one picture, cut, or several, each one square and a newline."""
        sizes, square = sizes_of(features), self.side**2 + 1
        placeholders: list[int] = []
        for held in (features["input_ids"] == self.image_token_id).sum(-1).tolist():
            if held == 0 or len(placeholders) == len(sizes):
                continue
            view = self.view(sizes[len(placeholders)])
            alone = held == self.side**2 + view.rows * (view.columns + 1)
            placeholders += [held] if alone else [square] * (held // square)
        return Layout(placeholders, sizes)

    def encode_some(self, batch: Batch, images: Sequence[int], needs: frozenset[str] = frozenset()) -> VisualTokens:
        """Of all: how a picture is cut depends on how many its prompt holds."""
        return self.encode(batch, needs).take(images)

    def picture_mode(self, batch: Batch, image: int) -> int:
        return int(batch.row_of_image.count(batch.row_of_image[image]) > 1)

    def project(self, x: Float[Tensor, "B K L"]) -> Float[Tensor, "B K L"]:
        return x

    def pack(
        self,
        features: Float[Tensor, "tiles P E"],
        num_tiles: list[int],
        image_sizes: Int[Tensor, "I 2"],
        newline: Float[Tensor, " E"] | None,
    ) -> list[Float[Tensor, "S E"]]:
        """The model's own packing: overview, then the tiles joined, unpadded, scaled down and closed row by row."""
        ratio = self.config.vision_aspect_ratio
        packed, _ = self.model.model.pack_image_features(
            features.split(num_tiles), image_sizes, image_newline=newline, vision_aspect_ratio=ratio
        )
        return packed

    def view(self, size: tuple[int, int]) -> View:
        """The large view of a picture that is alone in its prompt, scaled down where it is too large."""
        view = unpadded(size, self.config.image_grid_pinpoints, self.config.vision_config.image_size, self.side)
        most = int(self.config.vision_aspect_ratio.removeprefix("anyres_max_")) * self.side**2
        ratio = math.sqrt(view.rows * view.columns / most)
        if ratio <= 1.1:
            return view
        return View(rows=int(view.rows // ratio), columns=int(view.columns // ratio), x=view.x, y=view.y)

    def forms(self, size: tuple[int, int], *, alone: bool = True) -> Iterator[Form]:
        """One of several pictures of a prompt is always one tile."""
        if not alone:
            return iter([Form(size, self.side**2)])

        def count(size: tuple[int, int]) -> int:
            view = self.view(size)
            return self.side**2 + view.rows * view.columns

        return smaller_sizes(size, count)

    def boxes(self, size: tuple[int, int], view: View | None) -> Float[Tensor, "N 4"]:
        """Where each token looks; without a view the picture is centred in a square, with nothing to see beside it."""
        if view is not None:
            return joined_boxes(size, view, self.side)
        width, height = size
        square = float(max(size))
        left, top = (square - width) // 2, (square - height) // 2
        return view_boxes(
            size, View(rows=self.side, columns=self.side, x=(-left, square - left), y=(-top, square - top))
        )
