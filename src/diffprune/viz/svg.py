"""The same drawing as vectors: each token a rectangle with its number, the picture once inside the file."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from PIL import Image

from diffprune.types import ImageSelection
from diffprune.viz.tokens import HEAT, PERIOD, STRIPE, STRIPES, dimmed, require_scores, score_colours, seen_box


@dataclass(frozen=True, slots=True)
class Cell:
    """One picture of a drawing.

    Args:
        title: The line above it, where there are several.
        picture: In the size that it is drawn in.
        selection: Kept tokens and boxes, of one view, in that picture's pixels.
        tokens: The number of each token of the view among all of the picture.
        span: Of a heat map, the scores with the first and the last colour; None: kept tokens are lit.
    """

    title: str
    picture: Image.Image
    selection: ImageSelection
    tokens: tuple[int, ...]
    span: tuple[float, float] | None


def svg_document(cells: Sequence[Cell], columns: int, *, margin: int, line: int) -> str:
    """An SVG file that needs nothing beside it.

    Args:
        columns: Pictures side by side.
        margin: Between pictures.
        line: Height of the line above each; there is none above a single one.
    """
    width, height = cells[0].picture.size
    if len(cells) == 1:
        margin = line = 0
    rows = -(-len(cells) // columns)
    across, down = columns * (width + margin) + margin, rows * (height + line + margin) + margin
    body, clips = [], []
    for number, cell in enumerate(cells):
        x, y = margin + number % columns * (width + margin), margin + number // columns * (height + line + margin)
        title = escape(cell.title)
        above = f'<text x="0" y="{line * 0.6:g}" font-family="sans-serif" font-size="{line * 0.55:g}">{title}</text>'
        drawn = _lit(cell, number) if cell.span is None else _heated(cell)
        if cell.span is None:
            clips.append(f'<clipPath id="kept-{number}">{_kept_boxes(cell)}</clipPath>')
        body.append(
            f'<g transform="translate({x},{y})"><title>{title}</title>{above if line else ""}'
            f'<g transform="translate(0,{line})">{drawn}{_unseen(cell)}</g></g>'
        )
    dark, light = (f"rgb{colour}" for colour in STRIPES)
    pictures = _image("picture", cells[0].picture)
    if cells[0].span is None:
        pictures += _image("dimmed", Image.fromarray(dimmed(cells[0].picture)))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{across}" height="{down}" viewBox="0 0 {across} {down}">\n'
        f'<defs>{pictures}<pattern id="unseen" width="{PERIOD}" height="{PERIOD}" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><rect width="{PERIOD}" height="{PERIOD}" fill="{dark}"/>'
        f'<rect width="{STRIPE}" height="{PERIOD}" fill="{light}"/></pattern>\n' + "\n".join(clips) + "</defs>\n"
        f'<rect width="{across}" height="{down}" fill="white"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _image(name: str, picture: Image.Image) -> str:
    buffer = io.BytesIO()
    picture.convert("RGB").save(buffer, "PNG")
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<image id="{name}" width="{picture.width}" height="{picture.height}" href="data:image/png;base64,{data}"/>'


def _lit(cell: Cell, number: int) -> str:
    """The dimmed picture, and the picture itself where a kept token looks."""
    return f'<use href="#dimmed"/><use href="#picture" clip-path="url(#kept-{number})"/>'


def _kept_boxes(cell: Cell) -> str:
    return "".join(_rect(cell, index) for index in cell.selection.keep.tolist())


def _heated(cell: Cell) -> str:
    """The picture under the colours of the scores, kept tokens with a white line around them."""
    kept, scores = set(cell.selection.keep.tolist()), require_scores(cell.selection).tolist()
    colours = score_colours(cell.selection, cell.span).tolist()
    out = ['<use href="#picture"/>']
    for index in sorted(range(len(colours)), key=lambda index: index in kept):  # no line under a neighbour
        line = ' stroke="white"' if index in kept else ""
        look = f' fill="rgb{tuple(colours[index])}" fill-opacity="{HEAT}"{line}'
        out.append(_rect(cell, index, look, f"{scores[index]:.4g}"))
    return "".join(out)


def _rect(cell: Cell, index: int, look: str = "", title: str = "") -> str:
    assert cell.selection.boxes is not None
    x0, y0, x1, y1 = cell.selection.boxes[index].tolist()
    place = f'x="{x0:.6g}" y="{y0:.6g}" width="{x1 - x0:.6g}" height="{y1 - y0:.6g}"'
    end = f"><title>{title}</title></rect>" if title else "/>"
    return f'<rect data-token="{cell.tokens[index]}" {place}{look}{end}'


def _unseen(cell: Cell) -> str:
    """Stripes over what no token looks at; nothing where all is looked at."""
    assert cell.selection.boxes is not None
    width, height = cell.picture.size
    x0, y0, x1, y1 = seen_box(cell.picture.size, cell.selection.boxes)
    if (x0, y0, x1, y1) == (0, 0, width, height):
        return ""
    hole = f"M{x0:.6g} {y0:.6g}V{y1:.6g}H{x1:.6g}V{y0:.6g}Z"
    return f'<path fill="url(#unseen)" fill-rule="evenodd" d="M0 0H{width}V{height}H0Z{hole}"/>'
