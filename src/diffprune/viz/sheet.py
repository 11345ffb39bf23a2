"""One drawing of what is kept: a single picture, or a contact sheet of several methods, budgets and views.

    draw(picture, [Panel("divprune, 64", selection)], Path("kept.svg"))

The ending of the file's name says how: .svg, or pixels (.png, .jpg, .webp).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from diffprune.atomic import replacing, write_text
from diffprune.types import ImageSelection
from diffprune.viz.svg import Cell, svg_document
from diffprune.viz.tokens import heat_map, in_view, light_up, resized, score_span, views_of

PIXELS = (".png", ".jpg", ".jpeg", ".webp")
ENDINGS = (*PIXELS, ".svg")
MOST = 960  # pixels of the longer side of one picture among several
MARGIN, LINE = 12, 28  # between pictures, and for the line above each
ACROSS = 4  # pictures side by side at most, where nothing else says how many


@dataclass(frozen=True, slots=True)
class Panel:
    """What is kept of the picture by one method at one budget.

    Args:
        title: Its method, and its budget.
    """

    title: str
    selection: ImageSelection


def check_ending(path: Path) -> None:
    """A `ValueError` for a file that no drawing can be written to."""
    if path.suffix.lower() not in ENDINGS:
        raise ValueError(f"{path} does not end as a drawing does; name a file with {', '.join(ENDINGS)}")


def draw(
    picture: Image.Image, panels: Sequence[Panel], out: Path, *, heat: bool = False, across: int | None = None
) -> None:
    """Write the drawing of a picture's panels; several, or one of several views, become a sheet with a line above each.

    Args:
        heat: Scores as colours instead of kept tokens lit.
        across: Panels side by side; default: all views of a panel, or four panels.
    """
    check_ending(out)
    cells, columns = _cells(picture, panels, heat=heat, across=across)
    if out.suffix.lower() == ".svg":
        write_text(out, svg_document(cells, columns, margin=MARGIN, line=LINE))
        return
    images = [_painted(cell) for cell in cells]
    with replacing(out) as new:
        (images[0] if len(cells) == 1 else _sheet(images, [cell.title for cell in cells], columns)).save(new)


def _cells(picture: Image.Image, panels: Sequence[Panel], *, heat: bool, across: int | None) -> tuple[list[Cell], int]:
    """The pictures of a drawing, and how many stand side by side: one for each view of each panel."""
    views = views_of(panels[0].selection)  # the same for all: where tokens look is the model's business
    alone = len(panels) * len(views) == 1
    cells = []
    for panel in panels:
        made, selection = resized(picture, panel.selection, None if alone else MOST)
        span = score_span(selection) if heat else None  # over all views, so that their colours compare
        for view in views:
            part = in_view(selection, view)
            counts = f"{len(part.keep)} of {len(view.tokens)}"
            title = ", ".join(word for word in (panel.title, view.name, counts) if word)
            cells.append(Cell(title, made, part, tuple(view.tokens.tolist()), span))
    columns = len(views) * (across or max(1, ACROSS // len(views)))
    return cells, min(columns, len(cells))


def _painted(cell: Cell) -> Image.Image:
    if cell.span is None:
        return light_up(cell.picture, cell.selection)
    return heat_map(cell.picture, cell.selection, cell.span)


def _sheet(images: Sequence[Image.Image], titles: Sequence[str], columns: int) -> Image.Image:
    """Pictures of one size in rows, each with its title above it."""
    width, height = images[0].size
    rows = -(-len(images) // columns)
    sheet = Image.new("RGB", (columns * (width + MARGIN) + MARGIN, rows * (height + LINE + MARGIN) + MARGIN), "white")
    font, pen = ImageFont.load_default(LINE * 0.6), ImageDraw.Draw(sheet)
    for number, (image, title) in enumerate(zip(images, titles, strict=True)):
        x = MARGIN + number % columns * (width + MARGIN)
        y = MARGIN + number // columns * (height + LINE + MARGIN)
        while font.getlength(title) > width and len(title) > 4:
            title = title.removesuffix("...")[:-1] + "..."
        pen.text((x, y), title, "black", font)
        sheet.paste(image, (x, y + LINE))
    return sheet
