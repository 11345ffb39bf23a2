"""The few data types every part of the library speaks, and the one legend of axis letters.

B images (rows), N visual tokens, K kept tokens, D vision width, L language width, T sequence length,
S placeholder slots of an image, G patches in one scoring unit, V vocabulary, H heads.

One row is one image. Rows of different length are padded; `mask` is True where a token is real. Index tensors of kept
tokens are padded with -1 at the end of rows that keep fewer, and ascending unless it is a release's own order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffprune.budget import Budget as Budget
from diffprune.budget import parse_budgets as parse_budgets
from diffprune.budget import refuse_full_budget as refuse_full_budget
from diffprune.budget import require_distinct as require_distinct

Grid = tuple[int, int]
Keep = int | float | Sequence[int | float]  # a budget, or one for each picture


@dataclass(frozen=True, slots=True, kw_only=True)
class VisualTokens:
    """What a vision encoder gives for each image, and whatever else a pruning method asked for.

    Only `x` is required, so a method can be tried on plain tensors: `VisualTokens(x=torch.randn(2, 576, 1024))`.

    Args:
        x: Encoder features, as the projector takes them. Where one language token is made of G patches, their
            features are concatenated: D = G * width.
        mask: True where a token is real. Default: all are.
        grid: (rows, columns) of each image's tokens; one pair serves all rows.
        group: G, the number of patches in one scoring unit.
        coords: (row, column) of each patch on the encoder's grid, for encoders with rotary positions.
        segment: Which tile each token comes from; a scorer attends within a tile. Default: one tile.
        seeds: One number per image made from its pixels, for methods that draw at random.
        slots: Token index behind each placeholder of the prompt, -1 for a placeholder that carries no picture content
            (a newline), -2 for padding. Default: placeholder i is token i.
        boxes: Where each token looks, x0 y0 x1 y1 in pixels of the original picture.
        planes: Further features of the same tokens that are kept and dropped with them (DeepStack).
        cls_attention: Attention the encoder pays to each token: its [CLS] row, or the column mean where there is none.
        keys: Key vectors of the same encoder layer.
        projected: The tokens after the projector.
        text: Embeddings of the prompt's text, one row per image, L wide as backbones give them; `text_mask` is True
            where a text token is real.
        regions: True at tokens that show what the text speaks of, where the data says so; for training alone.
    """

    x: Float[Tensor, "B N D"]
    mask: Bool[Tensor, "B N"] = None  # type: ignore[assignment]  # filled in __post_init__
    grid: tuple[Any, ...] = ()  # Grid for each row, once made
    group: int = 1
    coords: Int[Tensor, "B N G 2"] | None = None
    segment: Int[Tensor, "B N"] | None = None
    seeds: tuple[int, ...] | None = None
    slots: Int[Tensor, "B S"] | None = None
    boxes: Float[Tensor, "B N 4"] | None = None
    planes: tuple[Tensor, ...] = ()
    cls_attention: Float[Tensor, "B N"] | None = None
    keys: Float[Tensor, "B N E"] | None = None
    projected: Float[Tensor, "B N L"] | None = None
    text: Float[Tensor, "B M W"] | None = None
    text_mask: Bool[Tensor, "B M"] | None = None
    regions: Bool[Tensor, "B N"] | None = None
    made_mask: Tensor | None = field(default=None, repr=False)  # the mask, where none was given

    def __post_init__(self) -> None:
        if self.mask is None:  # pyright: ignore[reportUnnecessaryComparison]
            made = torch.ones(self.x.shape[:2], dtype=torch.bool, device=self.x.device)
            object.__setattr__(self, "mask", made)
            object.__setattr__(self, "made_mask", made)
        if len(self.grid) == 2 and isinstance(self.grid[0], int):  # one pair for all rows
            object.__setattr__(self, "grid", (self.grid,) * len(self))

    def __len__(self) -> int:
        return self.x.shape[0]

    @property
    def counts(self) -> Int[Tensor, " B"]:
        """Real tokens in each row."""
        return self.mask.sum(-1)

    @property
    def is_full(self) -> bool:
        """No token is padding, as far as that is known without waiting for the device: no mask was given."""
        return self.mask is self.made_mask

    @property
    def padding_mask(self) -> Bool[Tensor, "B N"] | None:
        """`mask`, or None where no token is padding: attention without a mask is faster."""
        return None if self.is_full else self.mask

    @property
    def everything(self) -> Int[Tensor, "B N"]:
        """The index that keeps all real tokens."""
        return torch.where(self.mask, torch.arange(self.x.shape[1], device=self.x.device), -1)

    def take(self, rows: Sequence[int]) -> "VisualTokens":
        """The tokens of some of the images, in the order given."""
        index = torch.tensor(list(rows), dtype=torch.int64, device=self.x.device)
        changes: dict[str, object] = {
            "grid": tuple(self.grid[row] for row in rows) if self.grid else (),
            "seeds": None if self.seeds is None else tuple(self.seeds[row] for row in rows),
            "planes": tuple(plane[index] for plane in self.planes),
        }
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Tensor):
                changes[item.name] = value[index]
        if self.is_full:  # and so are some of its rows
            changes["made_mask"] = changes["mask"]
        return replace(self, **changes)  # type: ignore[arg-type]

    @property
    def patches(self) -> Float[Tensor, "B P W"]:
        """The features with one row per patch, P = N * G."""
        num_images, num_tokens, width = self.x.shape
        return self.x.reshape(num_images, num_tokens * self.group, width // self.group)


def counts_of_each(
    keeps: Sequence[int | float], mask: Bool[Tensor, "B N"], rounding: str = "nearest"
) -> Int[Tensor, " B"]:
    """Tokens to keep in each row of a padded batch, each row with a budget of its own."""
    if len(keeps) != len(mask):
        raise ValueError(f"keep={list(keeps)} holds {len(keeps)} budgets for {len(mask)} pictures; give one each")
    counts = [Budget(keep, rounding).count(int(num)) for keep, num in zip(keeps, mask.sum(-1).cpu(), strict=True)]
    return torch.tensor(counts, dtype=torch.int64, device=mask.device)


def check_counts(keep: Tensor, num_images: int) -> None:
    """An error where these are no tokens to keep of each image, at least one of each."""
    if keep.is_floating_point() or keep.dtype == torch.bool:
        raise ValueError(f"keep={_listed(keep)} is no count of tokens; give whole numbers, or one share as a float")
    if keep.shape != (num_images,):
        raise ValueError(f"keep={_listed(keep)} names {keep.numel()} images, and there are {num_images}; give one each")
    if int(keep.min()) < 1:
        raise ValueError(f"keep={_listed(keep)} keeps nothing of an image; give at least 1 token for each")


def _listed(keep: Tensor) -> list[int | float | bool]:
    return [value.item() for value in keep.reshape(-1)]


@dataclass(frozen=True, slots=True)
class ImageSelection:
    """What was kept of one image.

    Args:
        keep: Raster indices of the kept tokens, ascending.
        logits: The method's score of every token, or None where it has no ranking.
        grid: (rows, columns) of the tokens.
        boxes: Where each token looks, x0 y0 x1 y1 in pixels of the picture, or None where it is not known.
    """

    keep: Int[Tensor, " K"]
    logits: Float[Tensor, " N"] | None
    grid: Grid
    boxes: Float[Tensor, "N 4"] | None


@dataclass(frozen=True, slots=True)
class Selection(Sequence[ImageSelection]):
    """One `ImageSelection` per image. `selection[0].keep` and `selection.keep[0]` are the same tensor."""

    images: tuple[ImageSelection, ...]

    @classmethod
    def of(
        cls, tokens: VisualTokens, keep: Int[Tensor, "B K"], logits: Float[Tensor, "B N"] | None = None
    ) -> "Selection":
        """What indices, padded with -1, keep of each image, with the score of every real token."""
        entries: list[ImageSelection] = []
        for row, grid in enumerate(tokens.grid):
            real = int(tokens.mask[row].sum())
            entries.append(
                ImageSelection(
                    keep=keep[row][keep[row] >= 0].clone(),
                    logits=None if logits is None else logits[row, :real].float().clone(),
                    grid=grid,
                    boxes=None if tokens.boxes is None else tokens.boxes[row, :real].clone(),
                )
            )
        return cls(tuple(entries))

    def __getitem__(self, index: int) -> ImageSelection:  # type: ignore[override]
        return self.images[index]

    def __len__(self) -> int:
        return len(self.images)

    def __iter__(self) -> Iterator[ImageSelection]:
        return iter(self.images)

    @property
    def keep(self) -> list[Tensor]:
        return [image.keep for image in self.images]

    @property
    def logits(self) -> list[Tensor | None]:
        return [image.logits for image in self.images]

    @property
    def grid(self) -> list[Grid]:
        return [image.grid for image in self.images]

    @property
    def boxes(self) -> list[Tensor | None]:
        return [image.boxes for image in self.images]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where the visual tokens of a sequence come from.

    Args:
        tokens: Of the images, as encoded.
        index: For each position b * N + n, the token n of image b that stands there, -1 where none does.
    """

    tokens: VisualTokens
    index: Int[Tensor, "B T"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LMInputs:
    """What the language model is given: text and visual tokens in one sequence, left-padded.

    Args:
        input_ids: Token ids; a placeholder id where a visual token stands.
        inputs_embeds: The embeddings that are run.
        attention_mask: 1 where a position is real.
        position_ids: Original indices, so with gaps where tokens were dropped; one leading axis of 3 for M-RoPE.
        visual: True where a visual token stands.
        source: Column of the unpruned sequence each position comes from.
        labels: Targets for the loss, -100 where there is none.
        num_targets: How many these are, where that is known without waiting for the device.
        extra: Whatever else the family's forward takes.
        origin: Of the visual tokens, None where there are none.
        soft_mask: How much other positions attend to each one, from 0 (as if it were not there) to 1; default: all.
            In training alone.
    """

    input_ids: Int[Tensor, "B T"]
    inputs_embeds: Float[Tensor, "B T L"]
    attention_mask: Int[Tensor, "B T"]
    position_ids: Int[Tensor, "*R B T"]
    visual: Bool[Tensor, "B T"]
    source: Int[Tensor, "B T"]
    labels: Int[Tensor, "B T"] | None = None
    num_targets: int | None = None
    extra: dict[str, object] = field(default_factory=dict[str, object])
    origin: Origin | None = None
    soft_mask: Float[Tensor, "B T"] | None = None
