"""Everything a scene is drawn with, built once from integers: masks, colors and background patterns.

A mask is a small picture whose texels hold how much of the pixel is covered (0 to 16) and which tone of the sprite's
color is used there (body, pattern or rim). Shapes are inequalities on a grid of 8 x 8 points per pixel; glyphs come
from `assets/glyphs.png` (DejaVu Sans Mono Bold, see `runs/make_glyph_atlas.py`). No floating point anywhere, so every
machine builds the same atlas.
"""

from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
from PIL import Image

PICTURE = 192
FULL = 16  # coverage of a pixel that the sprite hides completely
TONES = 3  # body, pattern, rim
BODY, PATTERN, RIM = range(TONES)
BLEND = 64  # a background pattern is a weight from 0 (first ground) to 64 (second ground)

SHAPES = (
    "circle", "square", "triangle", "diamond", "cross", "ring", "star", "heart", "moon", "arrow", "house", "tree",
)  # fmt: skip
COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
SIZES = ("small", "medium", "large")
SIZE_PIXELS = (16, 22, 30)
PATTERNS = ("plain", "striped", "dotted")

GLYPHS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
GLYPH_CELL = (10, 16)
PLATE_BORDER = (5, 4)  # plate pixels left and right of the text, above and below it
LINE_WIDTH = 2

PLATE_OWNER = 5  # in the owner map: 0 nothing, 1-4 things, 5 plate, 6 and up the glyphs
FIRST_GLYPH_OWNER = 6

Rgb = tuple[int, int, int]


# ---------------------------------------------------------------------------------------------------------------------
# Colors


def _toned(body: Rgb, pattern: Rgb) -> tuple[Rgb, Rgb, Rgb]:
    """Body, pattern and a rim that is the body darkened."""
    red, green, blue = (channel * 5 // 9 for channel in body)
    return body, pattern, (red, green, blue)


_THING_COLORS = (
    _toned((222, 40, 38), (255, 206, 198)),  # red
    _toned((250, 132, 18), (255, 228, 176)),  # orange
    _toned((252, 220, 40), (152, 112, 0)),  # yellow
    _toned((34, 156, 56), (176, 238, 168)),  # green
    _toned((36, 92, 224), (168, 204, 255)),  # blue
    _toned((132, 46, 178), (226, 178, 250)),  # purple
    _toned((255, 120, 184), (255, 230, 242)),  # pink
    _toned((120, 70, 30), (226, 200, 170)),  # brown
    ((26, 26, 30), (150, 150, 156), (0, 0, 0)),  # black
    ((250, 250, 250), (148, 152, 164), (104, 106, 114)),  # white
)
_PLATE_COLORS = (
    ((240, 236, 220), (240, 236, 220), (92, 84, 70)),
    ((222, 234, 240), (222, 234, 240), (66, 86, 104)),
    ((238, 226, 190), (238, 226, 190), (108, 82, 40)),
    ((226, 238, 220), (226, 238, 220), (70, 96, 66)),
)
_INK_COLORS = (((28, 26, 34),) * 3,)
_LINE_COLORS = (((120, 116, 108),) * 3, ((104, 116, 128),) * 3)
_MARK_COLORS = (
    _toned((78, 76, 72), (206, 204, 196)),
    _toned((212, 208, 198), (96, 92, 86)),
    _toned((104, 110, 84), (190, 194, 160)),
    _toned((122, 104, 88), (208, 194, 176)),
    _toned((92, 100, 112), (196, 204, 214)),
    _toned((188, 184, 170), (84, 82, 78)),
    _toned((64, 68, 66), (178, 184, 178)),
    _toned((142, 132, 116), (60, 56, 50)),
)
_GROUND_PAIRS = (  # muted and mid-toned: black and white things stand out on both of a pair
    ((150, 164, 142), (176, 184, 160)),
    ((138, 154, 172), (168, 178, 188)),
    ((172, 152, 138), (192, 178, 160)),
    ((158, 146, 168), (180, 172, 186)),
    ((142, 160, 158), (176, 186, 176)),
    ((176, 164, 132), (158, 154, 136)),
    ((148, 148, 150), (176, 174, 172)),
    ((166, 142, 146), (186, 170, 168)),
    ((130, 146, 136), (156, 168, 150)),
    ((150, 162, 182), (178, 172, 160)),
    ((162, 172, 150), (148, 164, 176)),
    ((140, 138, 148), (168, 160, 158)),
    ((184, 172, 152), (156, 166, 160)),
    ((134, 150, 160), (160, 156, 142)),
    ((168, 158, 160), (146, 152, 164)),
    ((156, 150, 132), (182, 176, 158)),
)
_PAPER_PAIRS = (
    ((208, 202, 184), (180, 176, 164)),
    ((196, 204, 208), (164, 176, 188)),
    ((204, 208, 192), (176, 184, 166)),
    ((212, 200, 180), (186, 170, 150)),
)

_PALETTE: tuple[tuple[Rgb, ...], ...] = (
    *_THING_COLORS, *_PLATE_COLORS, *_INK_COLORS, *_LINE_COLORS, *_MARK_COLORS,
)  # fmt: skip
PALETTE = np.array(_PALETTE, dtype=np.int32)  # [color, tone, 3]
PLATES = range(len(COLORS), len(COLORS) + len(_PLATE_COLORS))
INK = PLATES.stop
LINES = range(INK + 1, INK + 1 + len(_LINE_COLORS))
MARKS = range(LINES.stop, LINES.stop + len(_MARK_COLORS))

GROUND_COLORS = np.array(_GROUND_PAIRS + _PAPER_PAIRS, dtype=np.int32).reshape(-1, 3)
GROUNDS = tuple((2 * i, 2 * i + 1) for i in range(len(_GROUND_PAIRS)))
PAPER_GROUNDS = tuple((2 * i, 2 * i + 1) for i in range(len(_GROUND_PAIRS), len(_GROUND_PAIRS) + len(_PAPER_PAIRS)))


# ---------------------------------------------------------------------------------------------------------------------
# Shapes

_POINTS = 8  # sample points along one side of a pixel
_UNIT = 1000  # a shape lives in the square from -1000 to 1000, y downwards

_POLYGONS = {
    "triangle": ((0, -930), (1000, 930), (-1000, 930)),
    "diamond": ((0, -1000), (820, 0), (0, 1000), (-820, 0)),
    "cross": (
        (-380, -1000), (380, -1000), (380, -380), (1000, -380), (1000, 380), (380, 380),
        (380, 1000), (-380, 1000), (-380, 380), (-1000, 380), (-1000, -380), (-380, -380),
    ),
    "star": (
        (0, -997), (278, -328), (1000, -270), (450, 201), (618, 906),
        (0, 528), (-618, 906), (-450, 201), (-1000, -270), (-278, -328),
    ),
    "arrow": ((-1000, -380), (0, -380), (0, -940), (1000, 0), (0, 940), (0, 380), (-1000, 380)),
    "house": (
        (0, -1000), (1000, -130), (780, -130), (780, 1000), (240, 1000), (240, 380), (-240, 380), (-240, 1000),
        (-780, 1000), (-780, -130), (-1000, -130),
    ),
    "tree": (
        (0, -1000), (640, -300), (380, -300), (900, 480), (240, 480), (240, 1000),
        (-240, 1000), (-240, 480), (-900, 480), (-380, -300), (-640, -300),
    ),
}  # fmt: skip


def _inside_polygon(x: np.ndarray, y: np.ndarray, corners: tuple[tuple[int, int], ...]) -> np.ndarray:
    """True where a point lies in the polygon (even-odd rule, all in integers)."""
    inside = np.zeros(np.broadcast(x, y).shape, dtype=bool)
    for (x1, y1), (x2, y2) in zip(corners, corners[1:] + corners[:1], strict=True):
        spans = (y1 > y) != (y2 > y)
        left_of_edge = (x - x1) * abs(y2 - y1) < (x2 - x1) * (y - y1) * (1 if y2 > y1 else -1)
        inside ^= spans & left_of_edge
    return inside


def _inside_shape(name: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """True where a point of the unit square lies in the shape."""
    distance = x * x + y * y  # squared, from the middle
    if name == "circle":
        return distance <= _UNIT * _UNIT
    if name == "square":
        return (abs(x) <= 880) & (abs(y) <= 880)
    if name == "ring":
        return (distance <= _UNIT * _UNIT) & (distance >= 450 * 450)
    if name == "moon":
        return (distance <= _UNIT * _UNIT) & ((x - 560) ** 2 + (y + 260) ** 2 > 820 * 820)
    if name == "heart":
        lobes = (abs(x) - 490) ** 2 + (y + 360) ** 2 <= 510 * 510
        between = (abs(x) <= 490) & (y >= -360) & (y <= -40)
        return lobes | between | _inside_polygon(x, y, ((-890, -40), (890, -40), (0, 930)))
    return _inside_polygon(x, y, _POLYGONS[name])


def _coverage(inside: np.ndarray) -> np.ndarray:
    """Coverage of each pixel, 0 to 16, from its sample points."""
    height, width = (side // _POINTS for side in inside.shape)
    hits = inside.reshape(height, _POINTS, width, _POINTS).sum((1, 3), dtype=np.int64)
    return (hits * FULL + _POINTS * _POINTS // 2) // (_POINTS * _POINTS)


def _grid(width: int, height: int) -> tuple[np.ndarray, np.ndarray]:
    """x [1, width] and y [height, 1] of the sample points of a picture, in the unit square of its longer side."""
    longest = max(width, height) * _POINTS
    across = (2 * np.arange(width * _POINTS, dtype=np.int64) + 1 - width * _POINTS) * _UNIT // longest
    down = (2 * np.arange(height * _POINTS, dtype=np.int64) + 1 - height * _POINTS) * _UNIT // longest
    return across[None, :], down[:, None]


def _interior(coverage: np.ndarray) -> np.ndarray:
    """True inside the rim: pixels covered completely whose neighbours are so too (on a small thing: covered at all)."""
    inner = np.pad(coverage >= (FULL if len(coverage) > SIZE_PIXELS[0] else 1), 1)
    return (coverage == FULL) & inner[:-2, 1:-1] & inner[2:, 1:-1] & inner[1:-1, :-2] & inner[1:-1, 2:]


def _texels(coverage: np.ndarray, tone: np.ndarray) -> np.ndarray:
    return coverage * TONES + tone


def _thing(shape: str, pixels: int, pattern: str) -> np.ndarray:
    """Texels of a thing: its silhouette with a dark rim, the pattern inside."""
    coverage = _coverage(_inside_shape(shape, *_grid(pixels, pixels)))
    x, y = np.arange(pixels)[None, :], np.arange(pixels)[:, None]
    if pattern == "striped":
        marked = (x + y + 1) % 6 < 3
    elif pattern == "dotted":
        row, column = (y + 1) % 5, (x + 1 + (y + 1) // 5 % 2 * 2) % 5
        marked = (row < 2) & (column < 2)
    else:
        marked = np.zeros((pixels, pixels), dtype=bool)
    return _texels(coverage, np.where(_interior(coverage), np.where(marked, PATTERN, BODY), RIM))


def _plate(letters: int) -> np.ndarray:
    """Texels of a sign's plate: a rectangle with cut corners and a rim."""
    width = letters * GLYPH_CELL[0] + 2 * PLATE_BORDER[0]
    height = GLYPH_CELL[1] + 2 * PLATE_BORDER[1]
    x, y = np.arange(width)[None, :], np.arange(height)[:, None]
    from_side = np.minimum(x, width - 1 - x) + 0 * y
    from_end = np.minimum(y, height - 1 - y) + 0 * x
    coverage = np.where(from_side + from_end >= 2, FULL, 0)
    rim = (np.minimum(from_side, from_end) == 0) | (from_side + from_end <= 2)
    return _texels(coverage, np.where(rim, RIM, BODY))


def _glyph(place: int) -> np.ndarray:
    """Texels of a glyph, as read from the committed picture."""
    width, _ = GLYPH_CELL
    grey = _glyph_sheet()[:, place * width : (place + 1) * width]
    return _texels((grey * FULL + 127) // 255, np.zeros_like(grey))


@cache
def _glyph_sheet() -> np.ndarray:
    with Image.open(Path(__file__).parents[1] / "assets/glyphs.png") as sheet:
        return np.asarray(sheet, dtype=np.int64)


# ---------------------------------------------------------------------------------------------------------------------
# Clutter

_SPECKS = (
    "22\n22",
    "022\n222\n220",
    "2022\n2000\n0002\n2200",
    "20002\n00200\n02000\n00020\n20200",
    "0200020\n0000000\n2000200\n0002000\n0200002\n0000200",
    "002\n220\n022\n200",
)  # 0 empty, 1 body, 2 pattern, 3 rim
_STROKES = (  # polylines in quarters of a pixel
    ((4, 24), (12, 8), (20, 24), (28, 8), (36, 24), (44, 8)),
    ((4, 16), (10, 6), (18, 8), (22, 18), (30, 22), (38, 14), (46, 6)),
    ((6, 6), (44, 10)),
    ((6, 6), (40, 36)),
    ((6, 10), (30, 6)),
    ((8, 8), (24, 4), (36, 12), (36, 24), (24, 30), (16, 22), (22, 16)),
    ((6, 8), (14, 28), (34, 30), (44, 8)),
)


def _speck(rows: str) -> np.ndarray:
    tones = np.array([[int(texel) for texel in row] for row in rows.split()], dtype=np.int64)
    return _texels(np.where(tones > 0, FULL, 0), np.maximum(tones - 1, 0))


def _stroke(points: tuple[tuple[int, int], ...]) -> np.ndarray:
    """A polyline about two pixels thick with round ends."""
    width, height = (max(point[axis] for point in points) // 4 + 2 for axis in (0, 1))
    x = (2 * np.arange(width * _POINTS, dtype=np.int64) + 1)[None, :]  # 16 units to a pixel, 4 to a quarter
    y = (2 * np.arange(height * _POINTS, dtype=np.int64) + 1)[:, None]
    inside = np.zeros((height * _POINTS, width * _POINTS), dtype=bool)
    for start, stop in pairwise(points):
        (x1, y1), (x2, y2) = [(4 * point[0], 4 * point[1]) for point in (start, stop)]
        length = (x2 - x1) ** 2 + (y2 - y1) ** 2  # squared
        along = np.clip((x - x1) * (x2 - x1) + (y - y1) * (y2 - y1), 0, length)
        aside = (length * (x - x1) - along * (x2 - x1)) ** 2 + (length * (y - y1) - along * (y2 - y1)) ** 2
        inside |= aside <= (13 * length) ** 2
    coverage = _coverage(inside)
    return _texels(coverage, np.full_like(coverage, BODY))


def _leaf(width: int, height: int) -> np.ndarray:
    """The overlap of two circles, half light and half dark, like a leaf with a fold."""
    x, y = _grid(width, height)
    reach = _UNIT * height // max(width, height)
    center = (_UNIT * _UNIT - reach * reach) // (2 * reach)
    radius = (center + reach) ** 2
    coverage = _coverage((x * x + (y - center) ** 2 <= radius) & (x * x + (y + center) ** 2 <= radius))
    lower = (np.arange(height)[:, None] * 2 >= height) & np.ones_like(coverage, dtype=bool)
    return _texels(coverage, np.where(lower, RIM, PATTERN))


def _turned(texels: np.ndarray) -> list[np.ndarray]:
    """The four quarter turns that look different."""
    turns: list[np.ndarray] = []
    for quarter in range(4):
        turn = np.rot90(texels, quarter)
        if not any(np.array_equal(turn, other) for other in turns):
            turns.append(turn)
    return turns


def _marks() -> list[np.ndarray]:
    plain = [_speck(rows) for rows in _SPECKS] + [_stroke(points) for points in _STROKES]
    plain += [_leaf(12, 6), _leaf(9, 6)]
    return [turn for mark in plain for turn in _turned(mark)]


# ---------------------------------------------------------------------------------------------------------------------
# The list of all masks, cut to their tight boxes, and its texels in one row


def _cut(texels: np.ndarray) -> tuple[np.ndarray, tuple[int, int]]:
    """The mask inside its tight box, and where that box began."""
    drawn = texels >= TONES  # coverage at least 1
    rows, columns = np.flatnonzero(drawn.any(1)), np.flatnonzero(drawn.any(0))
    box = texels[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    return box, (int(columns[0]), int(rows[0]))


_things = [_thing(shape, pixels, pattern) for shape in SHAPES for pixels in SIZE_PIXELS for pattern in PATTERNS]
_plates = [_plate(letters) for letters in (2, 3, 4)]
_lines = [np.full((LINE_WIDTH, length), FULL * TONES) for length in range(1, PICTURE + 1)]
_all_marks = _marks()
_glyphs = [_glyph(place) for place in range(len(GLYPHS))]
_cuts = [_cut(texels) for texels in _things + _plates + _lines + [line.T for line in _lines] + _all_marks + _glyphs]

_FIRST_PLATE = len(_things)
_FIRST_LINE = _FIRST_PLATE + len(_plates)
_FIRST_MARK = _FIRST_LINE + 2 * PICTURE
FIRST_GLYPH = _FIRST_MARK + len(_all_marks)  # masks from here on are painted over the others

MASKS = tuple(mask for mask, _ in _cuts)
EXTENTS = tuple((mask.shape[1], mask.shape[0]) for mask in MASKS)  # width, height
PLATE_MASKS = {letters: _FIRST_PLATE + letters - 2 for letters in (2, 3, 4)}
MARK_MASKS = range(_FIRST_MARK, FIRST_GLYPH)
GLYPH_MASKS = {glyph: FIRST_GLYPH + place for place, glyph in enumerate(GLYPHS)}
GLYPH_ORIGINS = {glyph: _cuts[mask][1] for glyph, mask in GLYPH_MASKS.items()}


def thing_mask(shape: int, size: int, pattern: int) -> int:
    """Number of the mask of a thing."""
    return (shape * len(SIZES) + size) * len(PATTERNS) + pattern


def line_mask(width: int, height: int) -> int:
    """Number of the mask of a straight line LINE_WIDTH thick; a line as long as it is thick counts as level."""
    assert LINE_WIDTH in (width, height)
    return _FIRST_LINE + (width - 1 if height == LINE_WIDTH else PICTURE + height - 1)


def _rows() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Texels of all masks in one row: offset in the picture and value of each, first texel and length of each mask."""
    offsets, values = [], []
    for mask in MASKS:
        y, x = np.nonzero(mask >= TONES)
        offsets.append(y * PICTURE + x)
        values.append(mask[y, x])
    lengths = np.array([len(value) for value in values])
    starts = np.cumsum(lengths) - lengths
    return np.concatenate(offsets), np.concatenate(values), starts, lengths


TEXEL_OFFSETS, TEXEL_VALUES, MASK_STARTS, MASK_LENGTHS = (row.astype(np.int32) for row in _rows())
