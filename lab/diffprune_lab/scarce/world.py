"""What a picture of the second world holds: up to nine things, a sign, litter and a ground, made from a seed.

A scene is an exact description in plain integers. `sprites` and `draw.py` turn it into pixels; language, tasks and the
tower's targets read the description. Nothing here needs a device, and every machine makes the same scenes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from diffprune.rng import Rng, mix
from diffprune_lab.scarce import grounds, masks

CELL = 64  # the picture is 3 x 3 cells, one thing at most in each; a sign takes two cells of a row
MARGIN = 2
CELLS = ("top left", "top", "top right", "left", "center", "right", "bottom left", "bottom", "bottom right")
SPLITS = ("train", "validation", "test")
MOST_THINGS, MOST_LETTERS, MOST_LITTER = 9, 8, 12

# In the map of owners: 0 the ground, 1 to 9 things in order, then what follows.
PLATE_OWNER = MOST_THINGS + 1
FIRST_LETTER = PLATE_OWNER + 1
FIRST_BADGE = FIRST_LETTER + MOST_LETTERS  # + the place of the thing among things, from 0
FIRST_LITTER = FIRST_BADGE + MOST_THINGS
OWNERS = FIRST_LITTER + MOST_LITTER

_SPLIT_OF_CLASS = ("train",) * 14 + ("validation", "test")
_COUNT_WEIGHTS = (1, 1, 2, 2, 2, 2, 2)  # 3 to 9 things
_SIZE_WEIGHTS = (5, 6, 5, 4)
_LITTER = (6, 12)

Box = tuple[int, int, int, int]  # x0, y0, x1, y1 in pixels, x1 and y1 just outside
Sprite = tuple[int, int, int, int, int, int]  # mask, x, y, first color, second color, owner


@dataclass(frozen=True, slots=True)
class Thing:
    """One thing: indices into HEADS, BASES, COLORS (upper and lower half), SIZES and CELLS; a digit, or -1 for none."""

    cell: int
    head: int
    base: int
    top: int
    bottom: int
    size: int
    digit: int
    x: int
    y: int

    @property
    def noun(self) -> int:
        """What it is called, as an index into NOUNS."""
        return masks.noun(self.head, self.base)

    @property
    def box(self) -> Box:
        """Where it is drawn."""
        side = masks.SIZE_PIXELS[self.size]
        return self.x, self.y, self.x + side, self.y + side


@dataclass(frozen=True, slots=True)
class Sign:
    """A plate with four to eight letters in two cells of a row; `cell` is the left one."""

    text: str
    cell: int
    plate: int
    x: int
    y: int

    @property
    def box(self) -> Box:
        """Where it is drawn."""
        width, height = masks.EXTENTS[masks.FIRST_PLATE + len(self.text) - masks.SIGN_LENGTHS[0]]
        return self.x, self.y, self.x + width, self.y + height


Litter = tuple[int, int, int, int, int]  # mask, x, y, first color, second color
Region = tuple[int, int, int, int, int]  # texture, shift right, shift down, first color, second color


@dataclass(frozen=True, slots=True)
class Scene:
    """One picture: its things in raster order of their cells, its sign, its litter, and its ground of many regions."""

    split: str
    index: int
    things: tuple[Thing, ...]
    sign: Sign | None
    litter: tuple[Litter, ...]
    region_map: int
    regions: tuple[Region, ...]


def make_scene(split: str, index: int, *, sign: bool | None = None, seed: int = 0) -> Scene:
    """The scene with this number, never in two splits: its content is drawn until a hash of it falls to the split.

    Args:
        split: "train", "validation" or "test".
        index: Number of the scene in its split, from 0 without end.
        sign: Whether there is a sign; None leaves it to chance.
        seed: Another seed is another world.
    """
    if split not in SPLITS:
        raise ValueError(f"There is no split {split!r}: choose one of {', '.join(SPLITS)}.")
    if index < 0:
        raise ValueError(f"A scene cannot have the number {index}: count from 0.")
    rng = Rng(seed, "scarce", split, index, -1 if sign is None else int(sign))
    while True:
        shown = rng.below(3) < 2 if sign is None else sign
        text, cell = _draw_text(rng) if shown else ("", -1)
        things = _draw_things(rng, cell)
        if _SPLIT_OF_CLASS[content_hash(things, text) % 16] == split:
            break
    board = None if not text else _place_sign(rng, text, cell)
    boxes = [thing.box for thing in things] + ([] if board is None else [board.box])
    return Scene(
        split=split,
        index=index,
        things=tuple(things),
        sign=board,
        litter=_scatter(rng, boxes),
        region_map=rng.below(grounds.REGION_MAPS),
        regions=tuple(draw_region(rng) for _ in range(grounds.REGIONS)),
    )


def content_hash(things: Sequence[Thing], text: str) -> int:
    """A 64-bit hash of what a scene shows; its class modulo 16 decides the split."""
    state = mix(len(things))
    for thing in things:
        code = (thing.cell, thing.head, thing.base, thing.top, thing.bottom, thing.size, thing.digit + 1)
        state = mix(state ^ int.from_bytes(bytes(code), "big"))
    return mix(state ^ int.from_bytes(text.encode(), "big"))


def _draw_text(rng: Rng) -> tuple[str, int]:
    length = rng.choice(masks.SIGN_LENGTHS)
    row, column = divmod(rng.below(6), 2)
    return "".join(rng.choice(masks.LETTERS) for _ in range(length)), 3 * row + column


def _draw_things(rng: Rng, sign_cell: int) -> list[Thing]:
    free = [cell for cell in range(9) if sign_cell < 0 or cell not in (sign_cell, sign_cell + 1)]
    count = min(len(free), 3 + rng.weighted(_COUNT_WEIGHTS))
    cells = sorted(free[place] for place in rng.distinct(len(free), count))
    nouns = rng.distinct(len(masks.NOUNS), count)
    if count > 2 and rng.below(2):  # two of a kind
        nouns[1] = nouns[0]
        rng.shuffle(nouns)
    things = []
    for cell, noun in zip(cells, nouns, strict=True):
        head, base = divmod(noun, len(masks.BASES))
        size = rng.weighted(_SIZE_WEIGHTS)
        digit = rng.below(10) if size and rng.below(3) else -1
        top, bottom = rng.below(len(masks.COLORS)), rng.below(len(masks.COLORS))
        room = CELL - 2 * MARGIN - masks.SIZE_PIXELS[size] + 1
        x, y = cell % 3 * CELL + MARGIN + rng.below(room), cell // 3 * CELL + MARGIN + rng.below(room)
        things.append(Thing(cell, head, base, top, bottom, size, digit, x, y))
    return things


def _place_sign(rng: Rng, text: str, cell: int) -> Sign:
    width, height = masks.EXTENTS[masks.FIRST_PLATE + len(text) - masks.SIGN_LENGTHS[0]]
    x = cell % 3 * CELL + MARGIN + rng.below(2 * CELL - 2 * MARGIN - width + 1)
    y = cell // 3 * CELL + MARGIN + rng.below(CELL - 2 * MARGIN - height + 1)
    return Sign(text, cell, rng.choice(masks.PLATES), x, y)


def _scatter(rng: Rng, boxes: list[Box]) -> tuple[Litter, ...]:
    """Litter wherever there is room for it."""
    taken, found = list(boxes), []
    for _ in range(_LITTER[0] + rng.below(_LITTER[1] - _LITTER[0] + 1)):
        mask = masks.FIRST_LITTER + rng.below(masks.FIRST_PLATE - masks.FIRST_LITTER)
        width, height = masks.EXTENTS[mask]
        for _ in range(6):
            x, y = rng.below(grounds.PICTURE - width + 1), rng.below(grounds.PICTURE - height + 1)
            if all(x > x1 + 1 or y > y1 + 1 or x + width < x0 - 1 or y + height < y0 - 1 for x0, y0, x1, y1 in taken):
                taken.append((x, y, x + width, y + height))
                found.append((mask, x, y, rng.below(len(masks.COLORS)), rng.below(len(masks.COLORS))))
                break
    return tuple(found[:MOST_LITTER])


def draw_region(rng: Rng) -> Region:
    """A texture, its shift, and two different colors."""
    one, two = rng.distinct(len(grounds.GROUND_COLORS), 2)
    return rng.below(grounds.TEXTURES), rng.below(grounds.SIDE), rng.below(grounds.SIDE), one, two


def sprites(scene: Scene) -> list[Sprite]:
    """What is drawn over the ground; of one layer no two overlap."""
    found: list[Sprite] = []
    for place, thing in enumerate(scene.things):
        mask = masks.thing_mask(thing.head, thing.base, thing.size)
        found.append((mask, thing.x, thing.y, thing.top, thing.bottom, place + 1))
        if thing.digit >= 0:
            x0, y0, _, _ = badge_box(thing)
            owner = FIRST_BADGE + place
            found.append((masks.BADGE_TILE, x0, y0, masks.BADGE, masks.BADGE, owner))
            found.append(_center(str(thing.digit), x0, y0, masks.BADGE_CELL, owner))
    if scene.sign is not None:
        sign = scene.sign
        plate = masks.FIRST_PLATE + len(sign.text) - masks.SIGN_LENGTHS[0]
        found.append((plate, sign.x, sign.y, sign.plate, sign.plate, PLATE_OWNER))
        for place, letter in enumerate(sign.text):
            x = sign.x + masks.PLATE_BORDER + place * masks.LETTER_CELL[0]
            y = sign.y + masks.PLATE_BORDER
            found.append((masks.LETTER_TILE, x, y, sign.plate, sign.plate, FIRST_LETTER + place))
            found.append(_center(letter, x, y, masks.LETTER_CELL, FIRST_LETTER + place))
    for place, (mask, x, y, one, two) in enumerate(scene.litter):
        found.append((mask, x, y, one, two, FIRST_LITTER + place))
    return found


def badge_box(thing: Thing) -> Box:
    """Where the digit of a thing is."""
    side, (width, height) = masks.SIZE_PIXELS[thing.size], masks.BADGE_CELL
    x, y = thing.x + (side - width) // 2, thing.y + (side - height) // 2
    return x, y, x + width, y + height


def _center(letter: str, x: int, y: int, cell: tuple[int, int], owner: int) -> Sprite:
    mask = masks.GLYPHS[letter]
    width, height = masks.EXTENTS[mask]
    return mask, x + (cell[0] - width) // 2, y + (cell[1] - height) // 2, masks.INK, masks.INK, owner


def vary(scene: Scene, rng: Rng) -> Scene:
    """The scene with some of what it shows changed: parts of things, things gone, letters, litter, regions of ground.

    What stays where it was is drawn exactly as before.
    """
    things = [_vary_thing(thing, rng) if rng.below(2) else thing for thing in scene.things]
    sign = scene.sign
    if sign is not None and rng.below(2):
        text = "".join(rng.choice(masks.LETTERS) if rng.below(3) == 0 else letter for letter in sign.text)
        sign = replace(sign, text=text) if rng.below(4) else None
    litter = tuple(one for one in scene.litter if rng.below(3))
    regions = tuple(draw_region(rng) if rng.below(8) == 0 else region for region in scene.regions)
    left = tuple(thing for thing in things if thing is not None)
    return replace(scene, things=left, sign=sign, litter=litter, regions=regions)


def _vary_thing(thing: Thing, rng: Rng) -> Thing | None:
    what = rng.below(6)
    if what == 0:
        return None
    if what == 1:
        return replace(thing, head=rng.below(len(masks.HEADS)))
    if what == 2:
        return replace(thing, base=rng.below(len(masks.BASES)))
    if what == 3:
        return replace(thing, top=rng.below(len(masks.COLORS)))
    if what == 4:
        return replace(thing, bottom=rng.below(len(masks.COLORS)))
    return replace(thing, digit=rng.below(10)) if thing.digit >= 0 else replace(thing, head=rng.below(len(masks.HEADS)))
