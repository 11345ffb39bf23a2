"""A small world of procedural pictures, exact under a seed: scenes, their pixels, and text about them."""

from diffprune.rng import Rng
from diffprune_lab.scenes.draw import pack, render
from diffprune_lab.scenes.world import (
    CELLS,
    COLORS,
    COLUMNS,
    KINDS,
    PATTERNS,
    PICTURE,
    QUALITIES,
    ROWS,
    SHAPES,
    SIZES,
    SPLITS,
    TAGS,
    WORDS,
    Scene,
    Sign,
    Thing,
    make_scene,
)

__all__ = [
    "CELLS",
    "COLORS",
    "COLUMNS",
    "KINDS",
    "PATTERNS",
    "PICTURE",
    "QUALITIES",
    "ROWS",
    "SHAPES",
    "SIZES",
    "SPLITS",
    "TAGS",
    "WORDS",
    "Rng",
    "Scene",
    "Sign",
    "Thing",
    "make_scene",
    "pack",
    "render",
]
