"""A picture with its tokens drawn over it: kept ones lit, or all coloured by their score.

What no token looks at, because the processor's crop cut it away, is striped. A picture that is seen twice, whole and in
tiles, has two views, each with tokens of its own; `views_of` tells them apart.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from PIL import Image
from torch import Tensor

from diffprune.types import ImageSelection

DIMMED = 0.25  # brightness of what was dropped
GREY = 0.8  # how much of its colour it loses
HEAT = 0.65  # how much of a pixel is its score's colour
STRIPE, PERIOD = 4, 16  # pixels of the stripes over what no token looks at
STRIPES = ((70, 70, 82), (150, 150, 166))  # their two colours
OUTLINE = (255, 255, 255)  # around kept tokens of a heat map
CHUNK = 512  # tokens that are compared with all before them at once
TOUCHING = 0.05  # of a token's width: neighbours share no more, by rounding
SMALLEST = 480  # pixels: a picture whose longer side is shorter is enlarged

Pixels = UInt8[np.ndarray, "H W 3"]


@dataclass(frozen=True, slots=True)
class View:
    """One layer of tokens over a picture, none of them over another.

    Args:
        name: "overview" for the coarse one of several, "tiles" for the others; empty where there is one alone.
        tokens: Their indices, ascending.
    """

    name: str
    tokens: Int[Tensor, " M"]


def light_up(image: Image.Image, selection: ImageSelection) -> Image.Image:
    """The picture with the kept tokens as they are and everything else dim and nearly grey.

    A pixel is lit where any kept token looks, so overlapping views (tiles beside the whole picture) add up. What no
    token looks at is striped.
    """
    boxes = _require_boxes(selection)
    pixels = _pixels(image)
    lit = covered(image.size, boxes[selection.keep.cpu()])
    return _striped(np.where(lit[..., None], pixels, dimmed(image)), boxes)


def dimmed(image: Image.Image) -> Pixels:
    """The picture as it is drawn where tokens were dropped."""
    pixels = _pixels(image).astype(np.float32)
    grey = pixels.mean(-1, keepdims=True)
    return (DIMMED * (GREY * grey + (1 - GREY) * pixels)).round().astype(np.uint8)


def heat_map(image: Image.Image, selection: ImageSelection, span: tuple[float, float] | None = None) -> Image.Image:
    """The picture with the colour of each token's score over it, and a white line around the kept ones.

    Args:
        span: The scores that get the first and the last colour; default: the lowest and highest of the selection.
    """
    boxes = _require_boxes(selection)
    colours = np.zeros((*image.size[::-1], 3), np.float32)
    order = require_scores(selection).argsort(stable=True)  # where tokens overlap the highest score shows
    for index, colour in zip(order.tolist(), score_colours(selection, span)[order.numpy()], strict=True):
        x0, y0, x1, y1 = _corners(boxes[index])
        colours[y0:y1, x0:x1] = colour
    pixels = _pixels(image).astype(np.float32)
    seen = covered(image.size, boxes)[..., None]
    out = np.where(seen, HEAT * colours + (1 - HEAT) * pixels, pixels).round().astype(np.uint8)
    for box in boxes[selection.keep.cpu()]:
        x0, y0, x1, y1 = _corners(box)
        out[y0:y1, x0 : x0 + 1] = out[y0:y1, max(x0, x1 - 1) : x1] = OUTLINE
        out[y0 : y0 + 1, x0:x1] = out[max(y0, y1 - 1) : y1, x0:x1] = OUTLINE
    return _striped(out, boxes)


def score_colours(selection: ImageSelection, span: tuple[float, float] | None = None) -> UInt8[np.ndarray, "N 3"]:
    """The colour of each token's score, dark for low ones and bright for high ones."""
    from matplotlib import colormaps

    low, high = span or score_span(selection)
    shares = (require_scores(selection).numpy() - low) / max(high - low, 1e-12)
    return (np.asarray(colormaps["inferno"](shares.clip(0, 1)))[:, :3] * 255).round().astype(np.uint8)


def score_span(selection: ImageSelection) -> tuple[float, float]:
    """The lowest and the highest score of the tokens."""
    scores = require_scores(selection)
    return float(scores.min()), float(scores.max())


def require_scores(selection: ImageSelection) -> Float[Tensor, " N"]:
    """The scores of all tokens; a `ValueError` where the method has none. Infinite ones are the nearest finite."""
    if selection.logits is None:
        raise ValueError("the method has no score for each token, so there is no heat map of it; leave --heat out")
    scores = selection.logits.detach().cpu().float()
    finite = scores[scores.isfinite()]
    if not len(finite):
        return torch.zeros_like(scores)
    return scores.nan_to_num(float(finite.min()), float(finite.max()), float(finite.min()))


def resized(
    image: Image.Image, selection: ImageSelection, most: int | None = None
) -> tuple[Image.Image, ImageSelection]:
    """A picture of a size that tokens can be drawn on, and what was kept of it in that picture's pixels.

    A small one is enlarged by a whole number, so that its pixels stay what they are.

    Args:
        most: Pixels of its longer side at most; default: as many as there are.
    """
    longer = max(image.size)
    if most is not None and longer > most:
        size = (max(1, image.width * most // longer), max(1, image.height * most // longer))
        made = image.resize(size, Image.Resampling.LANCZOS)
    else:
        factor = -(-SMALLEST // longer)
        size = (image.width * factor, image.height * factor)
        made = image if factor == 1 else image.resize(size, Image.Resampling.NEAREST)
    scale = torch.tensor([size[0] / image.width, size[1] / image.height]).repeat(2)
    return made, replace(selection, boxes=_require_boxes(selection) * scale)


def views_of(selection: ImageSelection) -> list[View]:
    """The layers of tokens over a picture, in the order of the prompt: a view ends where a token would cover another.

    Told by the boxes alone, so it holds for every family: LLaVA-NeXT has its overview first, Idefics3 last.
    """
    boxes = _require_boxes(selection)
    starts = [0]
    while (later := _first_over(boxes, starts[-1])) is not None:
        starts.append(later)
    parts = [torch.arange(first, last) for first, last in zip(starts, [*starts[1:], len(boxes)], strict=True)]
    if len(parts) == 1:
        return [View("", parts[0])]
    areas = [float((boxes[part, 2:] - boxes[part, :2]).prod(-1).median()) for part in parts]
    return [View("overview" if area == max(areas) else "tiles", part) for area, part in zip(areas, parts, strict=True)]


def _first_over(boxes: Float[Tensor, "N 4"], start: int) -> int | None:
    """The first token that looks at what an earlier one of its view looks at, which begins at `start`; or None."""
    for first in range(start, len(boxes), CHUNK):  # never a whole N x N map
        rows = torch.arange(first, min(first + CHUNK, len(boxes)))
        later, earlier = boxes[rows, None], boxes[None, start : int(rows[-1])]
        shared = torch.minimum(later[..., 2:], earlier[..., 2:]) - torch.maximum(later[..., :2], earlier[..., :2])
        over = (shared > TOUCHING * (later[..., 2:] - later[..., :2])).all(-1) & (shared > 0).all(-1)
        over &= torch.arange(start, int(rows[-1])) < rows[:, None]
        if len(found := rows[over.any(-1)]):
            return int(found[0])
    return None


def in_view(selection: ImageSelection, view: View) -> ImageSelection:
    """What was kept among the tokens of one view."""
    place = torch.full((len(_require_boxes(selection)),), -1)
    place[view.tokens] = torch.arange(len(view.tokens))
    kept = place[selection.keep.cpu()]
    return replace(
        selection,
        keep=kept[kept >= 0],
        logits=None if selection.logits is None else require_scores(selection)[view.tokens],
        boxes=_require_boxes(selection)[view.tokens],
    )


def seen_box(size: tuple[int, int], boxes: Float[Tensor, "N 4"]) -> tuple[float, float, float, float]:
    """The part of a picture of (width, height) that tokens look at, x0 y0 x1 y1; less than half a pixel is not cut."""
    width, height = size
    x0, y0 = (max(0.0, float(value)) for value in boxes[:, :2].amin(0))
    x1, y1 = float(boxes[:, 2].max()), float(boxes[:, 3].max())
    return (
        0.0 if x0 < 0.5 else x0,
        0.0 if y0 < 0.5 else y0,
        float(width) if x1 > width - 0.5 else x1,
        float(height) if y1 > height - 0.5 else y1,
    )


def covered(size: tuple[int, int], boxes: Float[Tensor, "K 4"]) -> Bool[np.ndarray, "H W"]:
    """True at the pixels of a picture of (width, height) that any of the boxes covers."""
    out = np.zeros(size[::-1], dtype=bool)
    for box in boxes:
        x0, y0, x1, y1 = _corners(box)
        out[y0:y1, x0:x1] = True
    return out


def _corners(box: Tensor) -> list[int]:
    """A box in whole pixels, nothing left of or above the picture."""
    return [max(0, value) for value in box.round().int().tolist()]


def _striped(pixels: Pixels, boxes: Float[Tensor, "N 4"]) -> Image.Image:
    """The picture with stripes over what no token looks at."""
    height, width, _ = pixels.shape
    x0, y0, x1, y1 = (round(value) for value in seen_box((width, height), boxes))
    rows, columns = np.mgrid[:height, :width]
    unseen = (columns < x0) | (columns >= x1) | (rows < y0) | (rows >= y1)
    stripes = np.array(STRIPES, np.uint8)[((rows + columns) % PERIOD < STRIPE).astype(int)]
    return Image.fromarray(np.where(unseen[..., None], stripes, pixels))


def _pixels(image: Image.Image) -> Pixels:
    return np.asarray(image.convert("RGB"))


def _require_boxes(selection: ImageSelection) -> Float[Tensor, "N 4"]:
    if selection.boxes is None:
        raise ValueError("this backbone does not say where its tokens look, so there is nothing to draw")
    return selection.boxes.cpu().float()
