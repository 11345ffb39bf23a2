"""Backgrounds and grain: patterns that blend two ground colors, made of integers and so equal on every machine."""

import numpy as np

from diffprune_lab.scenes.atlas import BLEND, PICTURE


def _words(stream: int, count: int) -> np.ndarray:
    """Random 64-bit words, the same on every machine (SplitMix64 on arrays)."""
    word = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(stream << 40)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


def grain() -> np.ndarray:
    """Noise from -4 to 11, one number for each pixel of a picture, in one row."""
    return (_words(99, PICTURE * PICTURE) >> np.uint64(60)).astype(np.int32) - 4


def _value_noise(stream: int, spacing: int) -> np.ndarray:
    """Smooth noise from 0 to 64: random heights on a lattice, blended between lattice points."""
    nodes = PICTURE // spacing + 2
    lattice = (_words(stream, nodes * nodes) >> np.uint64(58)).astype(np.int64).reshape(nodes, nodes)
    place = np.arange(PICTURE)
    node, part = place // spacing, place % spacing
    weight = part * part * (3 * spacing - 2 * part)  # smooth step, times spacing cubed
    cube = spacing**3
    rows = (lattice[node] * (cube - weight)[:, None] + lattice[node + 1] * weight[:, None]) // cube
    return (rows[:, node] * (cube - weight) + rows[:, node + 1] * weight) // cube


def _gradients(x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    slopes = ((1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 2), (2, 1), (-2, -1))
    patterns = []
    for slope_x, slope_y in slopes:
        ramp = slope_x * x + slope_y * y
        patterns.append((ramp - ramp.min()) * BLEND // (ramp.max() - ramp.min()))
    for center_x, center_y in ((96, 96), (40, 60), (150, 50), (96, 190)):
        distance = (x - center_x) ** 2 + (y - center_y) ** 2
        patterns.append(distance * BLEND // distance.max())
    return patterns


def _horizons(x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    hills = (
        ((_value_noise(31 + i, 48)[96:97] - 32) // 4, height) for i, height in enumerate((70, 84, 96, 104, 112, 124))
    )
    return [np.where(y + bend > height, BLEND - abs(y - height) // 6, abs(height - y) // 12) for bend, height in hills]


def _tiles(x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    checks = [((x // side + y // side) % 2) * 30 for side in (16, 24, 32)]
    slabs = [np.where((x % side < 2) | (y % side < 2), 56, 8) for side in (24, 32, 48)]
    bricks = [
        np.where((y % 16 < 2) | ((x + y // 16 % 2 * half) % (2 * half) < 2), 50, y // 16 % 3 * 6) for half in (16, 24)
    ]
    return checks + slabs + bricks


def _stripes(x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    straight = [(x // width % 2) * 30 for width in (6, 10, 16)] + [(y // 12 % 2) * 30]
    slanted = [((x + sign * y) // 12 % 2) * 30 for sign in (1, -1)]
    pinned = [np.where(x % 20 < 3, 52, np.where(x % 20 == 10, 24, 0))]
    return straight + slanted + pinned


def _papers(x: np.ndarray, y: np.ndarray) -> list[np.ndarray]:
    fibre = _value_noise(71, 4) // 8
    return [
        fibre,
        np.where((x % 16 == 0) | (y % 16 == 0), 40, fibre),
        np.where(y % 12 == 6, 44, fibre),
        np.where((x % 12 == 6) & (y % 12 == 6), 64, fibre),
        np.where((x % 32 == 0) | (y % 32 == 0), 50, np.where((x % 8 == 0) | (y % 8 == 0), 18, 0)),
    ]


GROUND_PATTERNS = (range(0, 3), range(3, 15), range(15, 21), range(21, 29), range(29, 41), range(41, 48))  # by sort
PAPER_PATTERNS = range(48, 53)


def ground_weights() -> np.ndarray:
    """All background patterns [pattern, 192, 192], each a weight of the second ground from 0 to 64."""
    x, y = (axis + np.zeros((PICTURE, PICTURE), dtype=np.int64) for axis in np.ogrid[:PICTURE, :PICTURE][::-1])
    plain = [np.full_like(x, level) for level in (0, 24, 48)]
    clouds = [(2 * _value_noise(i, 48) + _value_noise(20 + i, 16)) // 3 for i in range(8)]
    mottles = [_value_noise(50 + i, 12) // 2 for i in range(4)]
    sorts = (plain, _gradients(x, y), _horizons(x, y), _tiles(x, y), clouds + mottles, _stripes(x, y), _papers(x, y))
    assert [len(sort) for sort in sorts] == [len(numbers) for numbers in (*GROUND_PATTERNS, PAPER_PATTERNS)]
    weights = np.stack([pattern for sort in sorts for pattern in sort])
    assert weights.min() >= 0 and weights.max() <= BLEND
    return weights
