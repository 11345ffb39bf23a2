"""Masks of everything drawn on a ground: things with their parts, litter, plates and glyphs, built once from integers.

A thing is named after its head and its base: a pointed head on a flat base is a house, a flat head on a round base a
cup. A part of its outline therefore never tells its name; head and base together do. Each texel of a mask says how much
of the pixel is covered, with which tone, and which part of the thing it shows.
"""

from typing import NamedTuple

import numpy as np

from diffprune_lab.scenes import atlas

FULL = 16
HEADS = ("pointed", "round", "flat", "notched")
BASES = ("flat", "round", "pointed")
NOUNS = (
    "house", "drop", "diamond", "bell", "ball", "cone", "block", "cup", "shield", "castle", "basket", "tulip",
)  # of head * 3 + base  # fmt: skip
SIZES = ("small", "medium", "large", "huge")
SIZE_PIXELS = (16, 26, 40, 56)
COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "black", "white")
LITTER = ("star", "ring", "cross", "moon", "heart", "arrow", "tree")  # never spoken of

TOP, BOTTOM, TOP_RIM, BOTTOM_RIM = range(4)  # tones: whose color, and whether dark
UPPER, LOWER, HEAD, BASE, UPPER_SIDE, LOWER_SIDE = range(1, 7)  # parts of a thing; HEAD and BASE are outline that tells

LETTER_CELL = (10, 14)
BADGE_CELL = (11, 15)
PLATE_BORDER = 3
LETTERS = "ABCDEFGHKLMNPRSTUVXZ"
DIGITS = "0123456789"
SIGN_LENGTHS = range(4, 9)

Rgb = tuple[int, int, int]
_INKS: tuple[Rgb, ...] = ((24, 22, 30), (240, 236, 222), (222, 234, 244), (246, 230, 180), (252, 252, 252))
INK, PLATES, BADGE = len(COLORS), range(len(COLORS) + 1, len(COLORS) + 4), len(COLORS) + 4
_BODIES: tuple[Rgb, ...] = (
    (222, 40, 38), (250, 132, 18), (252, 220, 40), (34, 156, 56), (36, 92, 224), (132, 46, 178), (30, 30, 34),
    (246, 246, 246), *_INKS,
)  # fmt: skip
PALETTE = np.array(
    [(body, tuple(channel * 3 // 8 for channel in body)) for body in _BODIES], dtype=np.int64
)  # [C, 2, 3]

_POINTS = 4  # sample points along one side of a pixel


class Mask(NamedTuple):
    """Texels of a sprite."""

    coverage: np.ndarray  # 0 to 16
    tone: np.ndarray
    part: np.ndarray


def _grid(pixels: int) -> tuple[np.ndarray, np.ndarray]:
    """x [1, P] and y [P, 1] of the sample points, from -1000 to 1000."""
    place = (2 * np.arange(pixels * _POINTS, dtype=np.int64) + 1 - pixels * _POINTS) * 1000 // (pixels * _POINTS)
    return place[None, :], place[:, None]


def _end(kind: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Where the head lies, of points above the shoulder (y below -300); a base is a head upside down."""
    if kind == "pointed":
        return abs(x) * 700 <= 900 * (y + 1000)
    if kind == "round":
        return (x * 7) ** 2 + ((y + 300) * 9) ** 2 <= 6300**2
    if kind == "notched":
        return (abs(x) <= 900) & ((abs(x) > 380) | (y > -560))
    return (abs(x) <= 900) & (y >= -960)


def thing(head: str, base: str, pixels: int) -> Mask:
    """A silhouette with a dark rim; the upper half has one color, the lower half another."""
    x, y = _grid(pixels)
    body = (abs(x) <= 900) & (abs(y) <= 300)
    inside = body | ((y < -300) & _end(head, x, y)) | ((y > 300) & _end(base, x, -y))
    inside = inside & (abs(y) <= 1000)
    hits = inside.reshape(pixels, _POINTS, pixels, _POINTS).sum((1, 3), dtype=np.int64)
    coverage = hits * FULL // (_POINTS * _POINTS)
    width = 1 if pixels < 20 else 2
    deep = np.pad(coverage >= FULL // 2, width)
    core = np.ones_like(coverage, dtype=bool)
    for dy in range(2 * width + 1):
        for dx in range(2 * width + 1):
            if abs(dy - width) + abs(dx - width) <= width:
                core &= deep[dy : dy + pixels, dx : dx + pixels]
    level = (2 * np.arange(pixels) + 1 - pixels) * 1000 // pixels + 0 * np.arange(pixels)
    level = np.broadcast_to(level[:, None], coverage.shape)
    tone = np.where(core, np.where(level < 0, TOP, BOTTOM), np.where(level < 0, TOP_RIM, BOTTOM_RIM))
    reach = {"pointed": 300, "round": 480, "flat": 640, "notched": 480}
    part = np.where(core, np.where(level < 0, UPPER, LOWER), np.where(level < 0, UPPER_SIDE, LOWER_SIDE))
    part = np.where(~core & (level < -reach[head]), HEAD, part)
    part = np.where(~core & (level > reach[base]), BASE, part)
    return Mask(coverage, tone, part)


def _litter(kind: str, size: int) -> Mask:
    """A shape of the first world, as salient as a thing."""
    texels = atlas.MASKS[atlas.thing_mask(atlas.SHAPES.index(kind), size, 1)]
    tone = np.array((TOP, BOTTOM, TOP_RIM))[texels % atlas.TONES]
    return Mask(texels // atlas.TONES, tone, np.full_like(texels, UPPER))


def _rectangle(width: int, height: int, rim: bool) -> Mask:
    tone = np.full((height, width), TOP)
    if rim:
        tone[[0, -1]], tone[:, [0, -1]] = TOP_RIM, TOP_RIM
    return Mask(np.full_like(tone, FULL), tone, np.full_like(tone, UPPER))


def _glyph(letter: str) -> Mask:
    texels = atlas.MASKS[atlas.GLYPH_MASKS[letter]]
    return Mask(texels // atlas.TONES, np.full_like(texels, TOP), np.full_like(texels, UPPER))


_things = [thing(head, base, pixels) for head in HEADS for base in BASES for pixels in SIZE_PIXELS]
_litters = [_litter(kind, size) for kind in LITTER for size in range(2)]
_plates = [
    _rectangle(length * LETTER_CELL[0] + 2 * PLATE_BORDER, LETTER_CELL[1] + 2 * PLATE_BORDER, True)
    for length in SIGN_LENGTHS
]
_cells = [_rectangle(*LETTER_CELL, False), _rectangle(*BADGE_CELL, True)]
_glyphs = [_glyph(letter) for letter in LETTERS + DIGITS]

MASKS: tuple[Mask, ...] = (*_things, *_litters, *_plates, *_cells, *_glyphs)
EXTENTS = tuple((mask.coverage.shape[1], mask.coverage.shape[0]) for mask in MASKS)  # width, height
FIRST_LITTER = len(_things)
FIRST_PLATE = FIRST_LITTER + len(_litters)
LETTER_TILE = FIRST_PLATE + len(_plates)  # from here on: the second layer
BADGE_TILE = LETTER_TILE + 1
FIRST_GLYPH = BADGE_TILE + 1  # from here on: the third layer
GLYPHS = {letter: FIRST_GLYPH + place for place, letter in enumerate(LETTERS + DIGITS)}


def thing_mask(head: int, base: int, size: int) -> int:
    """Number of the mask of a thing."""
    return (head * len(BASES) + base) * len(SIZES) + size


def noun(head: int, base: int) -> int:
    """What a thing with this head and base is called, as an index into NOUNS."""
    return head * len(BASES) + base


def _rows() -> tuple[np.ndarray, ...]:
    """Texels of all masks in one row: offset in the picture, coverage, tone, part; first texel and length of each."""
    columns: list[list[np.ndarray]] = [[], [], [], []]
    for mask in MASKS:
        y, x = np.nonzero(mask.coverage > 0)
        for column, values in zip(columns, (y * atlas.PICTURE + x, *(plane[y, x] for plane in mask)), strict=True):
            column.append(values)
    lengths = np.array([len(values) for values in columns[0]])
    return *(np.concatenate(column) for column in columns), np.cumsum(lengths) - lengths, lengths


OFFSETS, COVERAGES, TONES, PARTS, STARTS, LENGTHS = _rows()
