"""Grounds: textures, maps of regions and colors, built once from integers.

A picture's ground is a patchwork of 8 to 32 regions (`region_maps`), each with a texture of its own (`textures`) that
blends two colors. Textures are made of several octaves of noise, of tiles, of stripes and of scattered strokes, so that
patches of the ground differ from one another about as much as patches of things do.
"""

from functools import cache

import numpy as np

PICTURE = 192
SIDE = 256  # pixels along one side of a texture; it repeats
BLEND = 64  # a texture is a weight from 0 (first color) to 64 (second color)
REGIONS = 32  # most regions of a ground

Rgb = tuple[int, int, int]

# As saturated as the colors of things, and some the very same.
GROUND_COLORS: tuple[Rgb, ...] = (
    (196, 72, 60), (222, 40, 38), (238, 150, 70), (250, 132, 18), (226, 202, 110), (252, 220, 40),
    (92, 160, 84), (34, 156, 56), (150, 190, 130), (84, 130, 200), (36, 92, 224), (150, 190, 226),
    (150, 96, 190), (132, 46, 178), (206, 150, 200), (120, 86, 56), (176, 140, 104), (220, 196, 164),
    (60, 66, 74), (110, 116, 122), (160, 166, 168), (206, 208, 206), (40, 90, 96), (110, 170, 170),
)  # fmt: skip


def _words(stream: int, count: int) -> np.ndarray:
    """Random 64-bit words, the same on every machine (SplitMix64 on arrays)."""
    word = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(stream << 40)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


def _noise(stream: int, spacing: int) -> np.ndarray:
    """Smooth noise from 0 to 64 that repeats after SIDE: random heights on a lattice, blended in between."""
    nodes = SIDE // spacing
    lattice = (_words(stream, nodes * nodes) % np.uint64(BLEND + 1)).astype(np.int64).reshape(nodes, nodes)
    place = np.arange(SIDE)
    node, part = place // spacing, place % spacing
    weight, cube = part * part * (3 * spacing - 2 * part), spacing**3
    after = (node + 1) % nodes
    rows = (lattice[node] * (cube - weight)[:, None] + lattice[after] * weight[:, None]) // cube
    return (rows[:, node] * (cube - weight) + rows[:, after] * weight) // cube


def _stretch(weights: np.ndarray) -> np.ndarray:
    """The weights spread over the whole range from 0 to 64."""
    low, high = int(weights.min()), int(weights.max())
    return (weights - low) * BLEND // max(1, high - low)


@cache
def textures() -> np.ndarray:
    """All textures [T, 256, 256], weights from 0 to 64."""
    x, y = (axis + np.zeros((SIDE, SIDE), dtype=np.int64) for axis in np.ogrid[:SIDE, :SIDE][::-1])
    clouds = [_stretch(4 * _noise(i, 64) + 2 * _noise(20 + i, 32) + _noise(40 + i, 16)) for i in range(2)]
    rough = [_stretch(2 * _noise(60 + i, 16) + 2 * _noise(70 + i, 8) + _noise(80 + i, 4)) for i in range(3)]
    rock = [np.where(_noise(90 + i, 16) + _noise(95 + i, 8) // 2 > 48, 60, _noise(98 + i, 4) // 2) for i in range(2)]
    grass = [
        _stretch(np.roll(_noise(100, 4), 3, 0) + _noise(101, 32) + np.where((x * 5 + _noise(102, 8)) % 7 < 2, 40, 0))
    ]
    sand = [_stretch(3 * _noise(110, 4) + _noise(111, 64))]
    waves = [
        _stretch(((y * 4 + _noise(120, 32)) % 64 - 32).__abs__() + _noise(121, 8) // 4),
        _stretch(((x * 4 + y * 2 + _noise(122, 32)) % 64 - 32).__abs__() + _noise(123, 8) // 4),
    ]
    wood = [_stretch(((x * 2 + 2 * _noise(130, 64) + _noise(131, 16) // 4) % 32) + _noise(132, 8) // 6)]
    shade = _noise(140, 64) // 4
    checks = [((x // side + y // side) % 2) * 44 + shade for side in (8, 16)]
    slabs = [np.where((x % 32 < 3) | (y % 32 < 3), 62, _noise(141, 32) // 2)]
    bricks = [np.where((y % 16 < 2) | ((x + y // 16 % 2 * 16) % 32 < 2), 60, (x // 32 * 7 + y // 16 * 11) % 5 * 7)]
    stripes = [
        (x // 8 % 2) * 44 + shade,
        (y // 16 % 2) * 44 + shade,
        ((x + y) // 8 % 2) * 44 + shade,
        ((x - y) // 16 % 2) * 44 + shade,
    ]
    zigzag = [np.where((y + abs(x % 32 - 16)) % 16 < 6, 56, shade)]
    dots = [
        np.where((x % 16 - 8) ** 2 + (y % 16 - 8) ** 2 < 22, 60, shade),
        np.where(((x + y // 32 % 2 * 16) % 32 - 16) ** 2 + (y % 32 - 16) ** 2 < 70, 60, shade),
    ]
    plaid = [(x // 16 % 2) * 24 + (y // 16 % 2) * 24 + np.where((x % 16 < 2) | (y % 16 < 2), 14, 0)]
    mesh = [np.where(((x + y) % 16 < 2) | ((x - y) % 16 < 2), 58, shade)]
    made = [*clouds, *rough, *rock, *grass, *sand, *waves, *wood, *checks, *slabs, *bricks, *stripes, *zigzag, *dots]
    weights = np.stack([*made, *plaid, *mesh]).clip(0, BLEND)
    assert len(weights) == TEXTURES, len(weights)
    return weights


TEXTURES = 25


_PIECES = (8, 12, 16, 20, 24, 28, 32, 32)  # regions of a map, in turn


@cache
def region_maps() -> np.ndarray:
    """Which region each pixel belongs to [R, 192, 192]: patchworks of land with bent borders."""
    x, y = (axis + np.zeros((PICTURE, PICTURE), dtype=np.int64) for axis in np.ogrid[:PICTURE, :PICTURE][::-1])
    maps = []
    for number in range(REGION_MAPS):
        pieces = _PIECES[number % len(_PIECES)]
        bend_x, bend_y = ((_noise(200 + 2 * number + i, 32)[:PICTURE, :PICTURE] - BLEND // 2) // 2 for i in range(2))
        places = (_words(300 + number, 2 * pieces) % np.uint64(PICTURE)).astype(np.int64).reshape(pieces, 2)
        stretch = 1 + number % 3  # wide, even or tall pieces
        away = [
            (x + bend_x - px) ** 2 * (2 if stretch == 3 else 1) + (y + bend_y - py) ** 2 * (3 if stretch == 1 else 1)
            for px, py in places
        ]
        maps.append(np.stack(away).argmin(0))
    regions = np.stack(maps)
    assert regions.max() < REGIONS
    return regions


REGION_MAPS = 48
