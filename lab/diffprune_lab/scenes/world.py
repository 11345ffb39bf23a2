"""What a scene holds: things, a sign, tags and clutter, made from a seed in plain integers.

A scene is a small, exact description: what is where (`things`, `sign`) and the drawing program that puts it on the
picture (`sprites`, `ground`, `finish`). `draw.py` turns the program into pixels; language and tasks read the rest.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from diffprune.rng import Rng, mix
from diffprune_lab.scenes import atlas, grounds

PICTURE = atlas.PICTURE  # pixels along one side
CELL = 64  # the picture is 3 x 3 cells, at most one item in each
MARGIN = 3  # free pixels between an item and the border of its cell

SHAPES = atlas.SHAPES
COLORS = atlas.COLORS
SIZES = atlas.SIZES
PATTERNS = atlas.PATTERNS
ROWS = ("top", "middle", "bottom")
COLUMNS = ("left", "center", "right")
CELLS = ("top left", "top", "top right", "left", "center", "right", "bottom left", "bottom", "bottom right")

SPLITS = ("train", "validation", "test")
KINDS = ("plain", "sign", "diagram")
QUALITIES = ("clear", "dim", "soft", "ruined")
TAGS = "EFGHJKLMNPRSTUVWXYZ"  # never A-D, the letters of multiple choice; no I, O, Q, easily taken for others
WORDS = (
    "ANT", "ARM", "ART", "BAG", "BALL", "BANK", "BAR", "BARN", "BAT", "BATH", "BEAN", "BEAR", "BED", "BEE",
    "BELL", "BIKE", "BIRD", "BOAT", "BOOK", "BOOT", "BOWL", "BOX", "BUS", "CAFE", "CAKE", "CAMP", "CAP", "CAR",
    "CARD", "CART", "CASH", "CAT", "CITY", "CLUB", "COAT", "COIN", "COLD", "COOK", "CORN", "COW", "CUP", "DESK",
    "DISH", "DOCK", "DOG", "DOOR", "DRUM", "DUCK", "EAR", "EAST", "EGG", "EXIT", "EYE", "FARM", "FAST", "FILM",
    "FIRE", "FISH", "FLAG", "FLY", "FOOD", "FOOT", "FORK", "FOX", "FROG", "GAME", "GATE", "GIFT", "GOAT",
    "GOLD", "GOLF", "GYM", "HALL", "HAND", "HAT", "HILL", "HOME", "HOT", "HOUR", "ICE", "INN", "JAM", "JAR",
    "JET", "KEY", "KING", "KITE", "LAKE", "LAMB", "LAMP", "LAND", "LIFT", "LION", "LOCK", "MAIL", "MAP", "MEAL",
    "MEAT", "MENU", "MILK", "MINE", "NEST", "NEWS", "NOSE", "NUT", "OPEN", "OVEN", "OWL", "PARK", "PATH", "PEN",
    "PIE", "PIG", "PIN", "PLAY", "POOL", "PORT", "PUB", "RAIN", "RICE", "ROAD", "ROOM", "ROPE", "ROSE", "SAFE",
    "SALE", "SALT", "SAND", "SEA", "SHIP", "SHOE", "SHOP", "SLOW", "SNOW", "SOAP", "SOUP", "STOP", "SUN",
    "TAXI", "TEA", "TENT", "TOWN", "TOY", "TRAM", "VAN", "WALK", "WEST", "WIND", "WOLF", "WOOD", "YARD", "ZOO",
)  # fmt: skip

_KIND_WEIGHTS = (50, 35, 15)
_QUALITY_WEIGHTS = (84, 6, 6, 4)
_COUNT_WEIGHTS = (10, 25, 35, 30)  # 1, 2, 3, 4 things
_WORD_SHARE = (60, 40)  # a sign holds a word or a number
# What some of the things have in common: nothing in half of the scenes with several things, so that binding matters.
_SHARED = {
    1: ("nothing",),
    2: ("nothing", "nothing", "color", "shape"),
    3: ("nothing", "nothing", "nothing", "color", "shape", "both"),
    4: ("nothing", "nothing", "nothing", "color", "shape", "both"),
}
_SPLIT_OF_CLASS = ("train",) * 14 + ("validation", "test")
_BLOCK = 16  # clutter lives on a raster of blocks, one mark in each at most
_BLOCKS = PICTURE // _BLOCK
_CLUTTER = (4, 14)
_TAG_GAP = 4

Box = tuple[int, int, int, int]  # x0, y0, x1, y1 in pixels, x1 and y1 just outside
Sprite = tuple[int, int, int, int, int]  # mask, x, y, color, owner


@dataclass(frozen=True, slots=True)
class Thing:
    """One object: its attributes as indices into SHAPES, COLORS, SIZES, PATTERNS and CELLS, and where it is drawn."""

    shape: int
    color: int
    size: int
    pattern: int
    cell: int
    box: Box
    tag: str = ""
    tag_box: Box | None = None


@dataclass(frozen=True, slots=True)
class Sign:
    """A plate with upper-case text: one of WORDS or a number from 10 to 99."""

    text: str
    cell: int
    box: Box


@dataclass(frozen=True, slots=True)
class Scene:
    """One picture: what it shows, and the drawing program that shows it.

    Attributes:
        things: In raster order of their cells; thing i owns the pixels marked i + 1 in the owner map.
        sprites: Masks of the atlas to be painted; those of one layer never overlap.
        ground: Background pattern, and the two grounds it blends.
        finish: Blur (0 none, 1 soft, 2 ruined), gain in 256ths, and the shift of the grain (0 is no grain).
    """

    split: str
    index: int
    kind: str
    quality: str
    things: tuple[Thing, ...]
    sign: Sign | None
    sprites: tuple[Sprite, ...]
    ground: tuple[int, int, int]
    finish: tuple[int, int, int]


def make_scene(split: str, index: int, *, kind: str | None = None, quality: str | None = None, seed: int = 0) -> Scene:
    """The scene with this number: the same on every machine, and never in two splits.

    The content (everything but background, jitter, clutter and quality) is drawn until a hash of it falls to the split
    asked for, so a content that was ever trained on cannot be met in validation or test, whatever the seed.

    Args:
        split: "train", "validation" or "test".
        index: Number of the scene in its split, from 0 without end.
        kind: "plain", "sign" or "diagram"; None draws from the natural mix.
        quality: "clear", "dim", "soft" or "ruined"; None draws from the natural mix.
        seed: Another seed is another world.
    """
    _check(split, index, kind, quality)
    rng = Rng(seed, "scene", split, index, kind or "", quality or "")
    drawn_kind = KINDS[rng.weighted(_KIND_WEIGHTS)] if kind is None else kind
    drawn_quality = QUALITIES[rng.weighted(_QUALITY_WEIGHTS)] if quality is None else quality
    subjects, styles, text, sign_cell = _content(rng, drawn_kind, split)

    sprites: list[Sprite] = []
    things = tuple(
        _place_thing(rng, slot, *pair, sprites) for slot, pair in enumerate(zip(subjects, styles, strict=True))
    )
    sign = _place_sign(rng, text, sign_cell, sprites) if text else None
    taken = _blocks(thing.box for thing in things)
    if sign is not None:
        taken |= _blocks((sign.box,))
    if drawn_kind == "diagram":
        taken |= _blocks(thing.tag_box for thing in things if thing.tag_box is not None)
        taken |= _blocks(_connect(rng, things, sprites))
    _scatter_clutter(rng, taken, sprites)
    return Scene(
        split=split,
        index=index,
        kind=drawn_kind,
        quality=drawn_quality,
        things=things,
        sign=sign,
        sprites=tuple(sprites),
        ground=_ground(rng, drawn_kind),
        finish=_finish(rng, drawn_quality),
    )


def content_hash(scene: Scene) -> int:
    """A 64-bit hash of what the scene shows; its class modulo 16 decides the split."""
    subjects = [(thing.cell, thing.shape, thing.color, thing.tag) for thing in scene.things]
    text, cell = (scene.sign.text, scene.sign.cell) if scene.sign is not None else ("", 0)
    code = 0
    for thing in reversed(scene.things):
        code = (code * len(SIZES) + thing.size) * len(PATTERNS) + thing.pattern
    return mix(_subject_hash(subjects, text, cell) ^ code)


_Subject = tuple[int, int, int, str]  # cell, shape, color, tag


def _check(split: str, index: int, kind: str | None, quality: str | None) -> None:
    if split not in SPLITS:
        raise ValueError(f"There is no split {split!r}: choose one of {', '.join(SPLITS)}.")
    if index < 0:
        raise ValueError(f"A scene cannot have the number {index}: count from 0.")
    if kind is not None and kind not in KINDS:
        raise ValueError(f"There is no kind of scene {kind!r}: choose one of {', '.join(KINDS)}, or None for the mix.")
    if quality is not None and quality not in QUALITIES:
        raise ValueError(f"There is no quality {quality!r}: choose one of {', '.join(QUALITIES)}, or None for the mix.")


def _content(rng: Rng, kind: str, split: str) -> tuple[list[_Subject], list[tuple[int, int]], str, int]:
    """What the scene shows, drawn until it belongs to the split: subjects, size and pattern of each, sign, its cell."""
    sizes = 2 if kind == "diagram" else len(SIZES)
    while True:
        subjects, text, sign_cell = _subjects(rng, kind)
        state = _subject_hash(subjects, text, sign_cell)
        for _ in range(16):  # new sizes and patterns are cheaper than a new scene
            word = rng.word()
            styles, code, place = [], 0, 1
            for _ in subjects:
                word, size = divmod(word, sizes)
                word, pattern = divmod(word, len(PATTERNS))
                styles.append((size, pattern))
                code += (size * len(PATTERNS) + pattern) * place
                place *= len(SIZES) * len(PATTERNS)
            if _SPLIT_OF_CLASS[mix(state ^ code) % 16] == split:
                return subjects, styles, text, sign_cell


def _subjects(rng: Rng, kind: str) -> tuple[list[_Subject], str, int]:
    """Things in raster order but for size and pattern, the sign's text ("" for none) and its cell."""
    diagram = kind == "diagram"
    count = 3 + rng.below(2) if diagram else 1 + rng.weighted(_COUNT_WEIGHTS)
    cells = rng.distinct(9, count + 1)
    sign_cell = cells.pop()
    cells.sort()
    colors = rng.distinct(len(COLORS), count)
    shapes = rng.distinct(len(SHAPES), count)
    shared = rng.choice(_SHARED[count])
    if shared != "nothing":
        group = rng.distinct(count, min(count, 3))
        if shared != "shape":
            colors[group[1]] = colors[group[0]]
        if shared != "color":
            shapes[group[-1]] = shapes[group[0]]
    tags = [TAGS[i] for i in rng.distinct(len(TAGS), count)] if diagram else [""] * count
    text = ""
    if kind == "sign":
        text = rng.choice(WORDS) if rng.weighted(_WORD_SHARE) == 0 else str(10 + rng.below(90))
    return list(zip(cells, shapes, colors, tags, strict=True)), text, sign_cell if text else 0


def _subject_hash(subjects: list[_Subject], text: str, sign_cell: int) -> int:
    state = mix(len(subjects))
    for cell, shape, color, tag in subjects:
        state = mix(state ^ ((cell << 24) | (shape << 16) | (color << 8) | (ord(tag) if tag else 0)))
    return mix(state ^ (int.from_bytes(text.encode(), "big") << 8 | sign_cell))


def _place_thing(rng: Rng, slot: int, subject: _Subject, styles: tuple[int, int], sprites: list[Sprite]) -> Thing:
    """The thing, and its tag beside it, somewhere in its cell."""
    cell, shape, color, tag = subject
    size, pattern = styles
    mask = atlas.thing_mask(shape, size, pattern)
    width, height = atlas.EXTENTS[mask]
    if not tag:
        x, y = _jitter(rng, cell, width, height)
        sprites.append((mask, x, y, color, slot + 1))
        return Thing(shape, color, size, pattern, cell, (x, y, x + width, y + height))

    glyph = atlas.GLYPH_MASKS[tag]
    tag_width, tag_height = atlas.EXTENTS[glyph]
    tallest = max(height, tag_height)
    x, y = _jitter(rng, cell, width + _TAG_GAP + tag_width, tallest)
    tag_x = x + width + _TAG_GAP
    if rng.below(2):  # the tag on the left
        x, tag_x = x + tag_width + _TAG_GAP, x
    tag_y = y + (tallest - tag_height) // 2
    y += (tallest - height) // 2
    sprites.append((mask, x, y, color, slot + 1))
    sprites.append((glyph, tag_x, tag_y, atlas.INK, atlas.FIRST_GLYPH_OWNER + slot))
    tag_box = (tag_x, tag_y, tag_x + tag_width, tag_y + tag_height)
    return Thing(shape, color, size, pattern, cell, (x, y, x + width, y + height), tag, tag_box)


def _place_sign(rng: Rng, text: str, cell: int, sprites: list[Sprite]) -> Sign:
    """The plate somewhere in its cell, and its letters on it."""
    plate = atlas.PLATE_MASKS[len(text)]
    width, height = atlas.EXTENTS[plate]
    x, y = _jitter(rng, cell, width, height)
    sprites.append((plate, x, y, rng.choice(atlas.PLATES), atlas.PLATE_OWNER))
    for place, letter in enumerate(text):
        dx, dy = atlas.GLYPH_ORIGINS[letter]
        left = x + atlas.PLATE_BORDER[0] + place * atlas.GLYPH_CELL[0] + dx
        top = y + atlas.PLATE_BORDER[1] + dy
        sprites.append((atlas.GLYPH_MASKS[letter], left, top, atlas.INK, atlas.FIRST_GLYPH_OWNER + place))
    return Sign(text, cell, (x, y, x + width, y + height))


def _jitter(rng: Rng, cell: int, width: int, height: int) -> tuple[int, int]:
    """Upper left corner of a box of this size in a cell, at least MARGIN away from the cell's border."""
    word, dx = divmod(rng.word(), CELL - 2 * MARGIN - width + 1)
    dy = word % (CELL - 2 * MARGIN - height + 1)
    return cell % 3 * CELL + MARGIN + dx, cell // 3 * CELL + MARGIN + dy


def _connect(rng: Rng, things: tuple[Thing, ...], sprites: list[Sprite]) -> list[Box]:
    """Boxes of thin lines from each thing to the next, led through the gutters between the cells, where nothing is."""
    lines: list[Box] = []
    color = rng.choice(atlas.LINES)
    for one, two in pairwise(things):
        (row, column), (other_row, other_column) = divmod(one.cell, 3), divmod(two.cell, 3)
        if other_row - row <= 1:
            gutter = CELL * max(1, other_row) - 1
            if other_row == row and row < 2 and rng.below(2):
                gutter = CELL * (row + 1) - 1
            ends = [_stub(thing, gutter, vertical=True) for thing in (one, two)]
            left, right = sorted(x0 for x0, _, _, _ in ends)
            lines += [*ends, (left, gutter, right + atlas.LINE_WIDTH, gutter + atlas.LINE_WIDTH)]
        elif abs(other_column - column) <= 1:
            gutter = CELL * max(1, column, other_column) - 1
            ends = [_stub(thing, gutter, vertical=False) for thing in (one, two)]
            top, bottom = sorted(y0 for _, y0, _, _ in ends)
            lines += [*ends, (gutter, top, gutter + atlas.LINE_WIDTH, bottom + atlas.LINE_WIDTH)]
    lines = [box for box in lines if box[2] > box[0] and box[3] > box[1]]
    sprites.extend((atlas.line_mask(x1 - x0, y1 - y0), x0, y0, color, 0) for x0, y0, x1, y1 in lines)
    return lines


def _stub(thing: Thing, gutter: int, *, vertical: bool) -> Box:
    """The piece of a connector from near the thing (or its tag) straight to the gutter."""
    axis, across = (1, 0) if vertical else (0, 1)
    boxes = [thing.box] if vertical or thing.tag_box is None else [thing.box, thing.tag_box]
    near, far = min(box[axis] for box in boxes), max(box[axis + 2] for box in boxes)
    start, stop = (far + 2, gutter) if far < gutter else (gutter + atlas.LINE_WIDTH, near - 2)
    middle = (thing.box[across] + thing.box[across + 2]) // 2 - 1
    if vertical:
        return middle, start, middle + atlas.LINE_WIDTH, stop
    return start, middle, stop, middle + atlas.LINE_WIDTH


def _blocks(boxes: Iterable[Box]) -> int:
    """A bit set of the clutter blocks that these boxes, one pixel wider on each side, reach into."""
    taken = 0
    for x0, y0, x1, y1 in boxes:
        first, last = (x0 - 1) // _BLOCK, x1 // _BLOCK
        row = ((1 << (last - first + 1)) - 1) << first
        for block_row in range((y0 - 1) // _BLOCK, y1 // _BLOCK + 1):
            taken |= row << (block_row * _BLOCKS)
    return taken


def _scatter_clutter(rng: Rng, taken: int, sprites: list[Sprite]) -> None:
    """Small marks in free blocks, never two in one and never touching anything else."""
    fewest, most = _CLUTTER
    left = fewest + rng.below(most - fewest + 1)
    while left:
        word, block = divmod(rng.word(), _BLOCKS * _BLOCKS)
        if taken >> block & 1:
            continue
        taken |= 1 << block
        left -= 1
        word, mark = divmod(word, len(atlas.MARK_MASKS))
        word, color = divmod(word, len(atlas.MARKS))
        width, height = atlas.EXTENTS[atlas.MARK_MASKS[mark]]
        word, dx = divmod(word, _BLOCK - 1 - width)
        dy = word % (_BLOCK - 1 - height)
        x, y = block % _BLOCKS * _BLOCK + 1 + dx, block // _BLOCKS * _BLOCK + 1 + dy
        sprites.append((atlas.MARK_MASKS[mark], x, y, atlas.MARKS[color], 0))


def _ground(rng: Rng, kind: str) -> tuple[int, int, int]:
    """Background pattern and two colors that go together, either one first."""
    if kind == "diagram":
        return rng.choice(grounds.PAPER_PATTERNS), *rng.choice(atlas.PAPER_GROUNDS)
    pattern = rng.choice(rng.choice(grounds.GROUND_PATTERNS))
    one, two = rng.choice(atlas.GROUNDS)
    return (pattern, one, two) if rng.below(2) else (pattern, two, one)


def _finish(rng: Rng, quality: str) -> tuple[int, int, int]:
    """Blur, gain and grain of a quality."""
    if quality == "dim":
        return 0, 88 + rng.below(32), 0
    if quality == "soft":
        return 1, 256, 0
    if quality == "ruined":
        grain = 1 + rng.below(PICTURE * PICTURE - 1)
        return (2, 256, grain) if rng.below(2) else (0, 2 + rng.below(3), grain)
    return 0, 256, 0
