"""Captions of scenes: what is there and where, in one of several sentence plans."""

from diffprune.rng import Rng
from diffprune_lab.scenes.world import CELLS, COLORS, PATTERNS, SHAPES, SIZES, Scene, Thing

CAPTION_PROMPTS = (
    "Describe the picture.",
    "What is in the picture?",
    "Write a caption.",
    "Tell me what you see.",
    "Give a full description.",
)
RUINED_CAPTIONS = (
    "The picture is too dark or blurred to make anything out.",
    "Nothing can be made out in this picture.",
    "This picture cannot be made out.",
)


def caption(scene: Scene, rng: Rng) -> str:
    """A description with every thing's size, pattern, color, shape and place, its tag, and the sign's text."""
    if scene.quality == "ruined":
        return rng.choice(RUINED_CAPTIONS)
    return rng.choice(PLANS)(scene)


def _noun(thing: Thing) -> str:
    marked = f" marked {thing.tag}" if thing.tag else ""
    return f"{SIZES[thing.size]} {PATTERNS[thing.pattern]} {COLORS[thing.color]} {SHAPES[thing.shape]}{marked}"


def _items(scene: Scene) -> str:
    """ "a ... at the ..., a ... at the ... and a sign at the ... saying ..." """
    items = [f"a {_noun(thing)} at the {CELLS[thing.cell]}" for thing in scene.things]
    if scene.sign is not None:
        items.append(f"a sign at the {CELLS[scene.sign.cell]} saying {scene.sign.text}")
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def _there_is(scene: Scene) -> str:
    return f"There is {_items(scene)}."


def _the_picture_shows(scene: Scene) -> str:
    return f"The picture shows {_items(scene)}."


def _counted(scene: Scene) -> str:
    count = len(scene.things)
    sign = "" if scene.sign is None else " and a sign"
    return f"{count} {'thing' if count == 1 else 'things'}{sign}: {_items(scene)}."


def _place_first(scene: Scene) -> str:
    sentences = [f"At the {CELLS[thing.cell]} is a {_noun(thing)}." for thing in scene.things]
    if scene.sign is not None:
        sentences.append(f"At the {CELLS[scene.sign.cell]} is a sign saying {scene.sign.text}.")
    return " ".join(sentences)


def _thing_first(scene: Scene) -> str:
    sentences = [f"A {_noun(thing)} is at the {CELLS[thing.cell]}." for thing in scene.things]
    if scene.sign is not None:
        sentences.append(f"A sign at the {CELLS[scene.sign.cell]} says {scene.sign.text}.")
    return " ".join(sentences)


def _attributes_last(scene: Scene) -> str:
    sentences = []
    for thing in scene.things:
        marked = f" marked {thing.tag}" if thing.tag else ""
        sentences.append(
            f"The {SHAPES[thing.shape]}{marked} at the {CELLS[thing.cell]} is "
            f"{SIZES[thing.size]}, {PATTERNS[thing.pattern]} and {COLORS[thing.color]}."
        )
    if scene.sign is not None:
        sentences.append(f"The sign at the {CELLS[scene.sign.cell]} says {scene.sign.text}.")
    return " ".join(sentences)


PLANS = (_there_is, _the_picture_shows, _counted, _place_first, _thing_first, _attributes_last)
