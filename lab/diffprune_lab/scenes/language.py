"""What can be said of a scene: captions, and questions with the one right answer.

Everything here follows from the description of a scene alone, draws from a named stream of integers, and is therefore
the same text on every machine. A question maker takes a scene, a stream and the words of a language, and gives None
where the scene does not allow the question: a question is only asked where its answer is unique and clear.

Two rules hold everywhere. Asked whether a missing thing is there, the answer is "no"; asked for anything else about
it, or for anything in a ruined picture, the answer is "unanswerable" (counts and yes-or-no questions are not asked of
ruined pictures).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from diffprune.rng import Rng
from diffprune_lab.scenes import chinese
from diffprune_lab.scenes.world import (
    CELLS,
    COLORS,
    PATTERNS,
    SHAPES,
    SIZES,
    TAGS,
    WORDS,
    Box,
    Scene,
    Thing,
    make_scene,
)

UNANSWERABLE = "unanswerable"
LETTERS = "ABCD"  # of the options in multiple choice
ATTRIBUTES = ("color", "shape", "size", "pattern", "place")
COUNTS = (1, 2, 3, 4)  # how many things a scene can hold
CLEAR = 24  # pixels between two centers from which one thing counts as left of (above, ...) the other
LEVEL = 8  # pixels up to which it counts as not left of it; in between nothing is asked


@dataclass(frozen=True, slots=True)
class Words:
    """A language: the words for what scenes hold, the ways to refer to a thing, and the wordings of each question.

    Two languages with as many wordings for each question turn the same stream into translations of one another.
    """

    shapes: tuple[str, ...]
    plurals: tuple[str, ...]
    colors: tuple[str, ...]
    sizes: tuple[str, ...]
    patterns: tuple[str, ...]
    places: tuple[str, ...]
    directions: tuple[str, ...]  # left of, right of, above, below
    refer: dict[str, str]
    ask: dict[str, tuple[str, ...]]
    by_letter: str  # the last line of a multiple-choice question

    def values(self, attribute: str) -> tuple[str, ...]:
        """The words for each value of an attribute."""
        return getattr(self, attribute + "s")

    def name(self, color: int, shape: int) -> str:
        """A color and a shape, as in "red star"."""
        return self.refer["name"].format(self.colors[color], self.shapes[shape])

    def question(self, kind: str, rng: Rng, *slots: str | int) -> str:
        """One wording of a question of this kind, its slots filled."""
        return rng.choice(self.ask[kind]).format(*slots)


ENGLISH = Words(
    shapes=SHAPES,
    plurals=tuple(shape + ("es" if shape.endswith("s") else "s") for shape in SHAPES),
    colors=COLORS,
    sizes=SIZES,
    patterns=PATTERNS,
    places=CELLS,
    directions=("left of", "right of", "above", "below"),
    refer={
        "name": "{} {}",
        "pair": "the {} {}",
        "shape": "the {}",
        "color": "the {} thing",
        "place": "the thing at the {}",
        "tag": "the thing marked {}",
        "beside": "the thing {0} {1}",
    },
    ask={
        "color": ("What color is {}?", "What is the color of {}?", "Which color does {} have?"),
        "shape": ("What shape is {}?", "What is the shape of {}?", "Which shape does {} have?"),
        "size": ("How big is {}?", "What size is {}?", "What is the size of {}?"),
        "pattern": ("What pattern does {} have?", "What is the pattern of {}?", "Which pattern is on {}?"),
        "place": ("Where is {}?", "In which place is {}?"),
        "count": ("How many things are there?", "What is the number of things?"),
        "count_some": ("How many {} are there?", "What is the number of {}?"),
        "sign": ("What does the sign say?", "What is written on the sign?", "What is on the sign?"),
        "sign_word": ("What word is on the sign?", "Which word does the sign show?"),
        "sign_number": ("What number is on the sign?", "Which number does the sign show?"),
        "exists": ("Is there {} in the picture?", "Does the picture show {}?", "Is there {}?"),
        "is": ("Is {} {}?", "Is it true that {} is {}?"),
        "is_beside": ("Is {} {} {}?", "Is it true that {} is {} {}?"),
        "same_color": ("Is {} the same color as {}?", "Do {} and {} have the same color?"),
        "is_count": ("Is the number of things {}?", "Are there exactly {} things?"),
        "is_sum": ("Is the number of things plus {} equal to {}?", "Do the things and {} more make {}?"),
        "is_sign": ("Does the sign say {}?", "Is {} written on the sign?"),
        "tag_of": ("Which tag marks {}?", "What is the tag of {}?"),
        "marked": ("What is marked {}?", "Which thing has the tag {}?"),
        "identity": ("Which thing is in the picture?", "Which thing is there?"),
    },
    by_letter="Answer with the letter.",
)
CHINESE = Words(
    shapes=chinese.SHAPES,
    plurals=chinese.SHAPES,
    colors=chinese.COLORS,
    sizes=chinese.SIZES,
    patterns=chinese.PATTERNS,
    places=chinese.PLACES,
    directions=chinese.DIRECTIONS,
    refer=chinese.REFER,
    ask=chinese.ASK,
    by_letter=chinese.BY_LETTER,
)

CAPTION_PROMPTS = (
    "Describe the picture.",
    "What is in the picture?",
    "Write a caption.",
    "Tell me what you see.",
    "Give a full description.",
)
_RUINED_CAPTIONS = (
    "The picture is too dark or blurred to make anything out.",
    "Nothing can be made out in this picture.",
    "This picture cannot be made out.",
)


class Asked(NamedTuple):
    """A question, its answer, and what the answer is about: a value (an index) of an attribute, where there is one."""

    text: str
    answer: str
    value: int = -1


class Pair(NamedTuple):
    """Two questions about one scene, answered "yes" and "no"; `key` is what they ask about, to balance questions by."""

    yes: str
    no: str
    key: str


def boxes(scene: Scene) -> tuple[Box, ...]:
    """The boxes of everything that texts speak of: all things, their tags, and the sign."""
    things = [thing.box for thing in scene.things]
    tags = [thing.tag_box for thing in scene.things if thing.tag_box is not None]
    signs = [] if scene.sign is None else [scene.sign.box]
    return (*things, *tags, *signs)


def value_of(thing: Thing, attribute: str) -> int:
    """The index of a thing's value of an attribute."""
    return thing.cell if attribute == "place" else getattr(thing, attribute)


def a(noun: str) -> str:
    """The noun with its indefinite article."""
    return ("an " if noun[0] in "aeiou" else "a ") + noun


# Captions ------------------------------------------------------------------------------------------------------------


def caption(scene: Scene, rng: Rng) -> str:
    """A description with every thing's size, pattern, color, shape and place, its tag, and the sign's text."""
    if scene.quality == "ruined":
        return rng.choice(_RUINED_CAPTIONS)
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


# Referring to a thing ------------------------------------------------------------------------------------------------


def refer(scene: Scene, thing: Thing, rng: Rng, words: Words, hide: str = "") -> str:
    """Words that fit this thing alone and do not give the hidden attribute away."""
    forms = []
    if hide != "place":
        forms.append("place")
    if hide not in ("color", "shape"):
        forms.append("pair")
    if hide != "shape" and sum(other.shape == thing.shape for other in scene.things) == 1:
        forms.append("shape")
    if hide != "color" and sum(other.color == thing.color for other in scene.things) == 1:
        forms.append("color")
    form = rng.choice(forms)
    if form == "pair":
        return words.refer[form].format(words.colors[thing.color], words.shapes[thing.shape])
    return words.refer[form].format(words.values(form)[value_of(thing, form)])


def refer_to_missing(scene: Scene, rng: Rng, words: Words, hide: str) -> str:
    """Words for a thing that is not there, of the same form as those for things that are."""
    if hide == "color":
        return words.refer["shape"].format(words.shapes[missing_value(scene, rng, "shape")])
    if hide == "shape":
        return words.refer["color"].format(words.colors[missing_value(scene, rng, "color")])
    color, shape = missing_pair(scene, rng, near=rng.below(2) == 0)
    return words.refer["pair"].format(words.colors[color], words.shapes[shape])


def missing_value(scene: Scene, rng: Rng, attribute: str) -> int:
    """A shape or color that no thing of the scene has."""
    count = len(SHAPES) if attribute == "shape" else len(COLORS)
    present = {value_of(thing, attribute) for thing in scene.things}
    while True:
        value = rng.below(count)
        if value not in present:
            return value


def missing_pair(scene: Scene, rng: Rng, *, near: bool) -> tuple[int, int]:
    """A (color, shape) that no thing has; a near one takes both from the scene where two things allow it, else one."""
    things = scene.things
    present = {(thing.color, thing.shape) for thing in things}
    if near:
        crossed = [
            (one.color, other.shape)
            for one in things
            for other in things
            if one is not other and (one.color, other.shape) not in present
        ]
        if crossed:
            return rng.choice(crossed)
        thing = rng.choice(things)
    while True:
        color, shape = rng.below(len(COLORS)), rng.below(len(SHAPES))
        if near:
            color, shape = (thing.color, shape) if rng.below(2) else (color, thing.shape)
        if (color, shape) not in present:
            return color, shape


def _ahead(thing: Thing, anchor: Thing, direction: int) -> int:
    """Twice the pixels by which the center of `thing` lies left of (right of, above, below) that of `anchor`."""
    axis = direction >> 1
    offset = thing.box[axis] + thing.box[axis + 2] - anchor.box[axis] - anchor.box[axis + 2]
    return offset if direction & 1 else -offset


def find_beside(scene: Scene, rng: Rng) -> tuple[Thing, Thing, int] | None:
    """(thing, anchor, direction) such that this thing, clearly, and no other lies in that direction of the anchor."""
    things = scene.things
    total = 4 * len(things)
    start = rng.below(total)
    for step in range(total):
        place, direction = divmod((start + step) % total, 4)
        anchor, found = things[place], None
        for thing in things:
            ahead = _ahead(thing, anchor, direction)
            if thing is anchor or ahead <= 2 * LEVEL:
                continue
            if found is not None or ahead < 2 * CLEAR:
                break
            found = thing
        else:
            if found is not None:
                return found, anchor, direction
    return None


# Questions with an open answer ---------------------------------------------------------------------------------------


def ask_attribute(scene: Scene, rng: Rng, words: Words, attribute: str) -> Asked:
    """An attribute of a thing that is referred to by what else is known of it."""
    thing = rng.choice(scene.things)
    value = value_of(thing, attribute)
    text = words.question(attribute, rng, refer(scene, thing, rng, words, hide=attribute))
    return Asked(text, words.values(attribute)[value], value)


def ask_beside(scene: Scene, rng: Rng, words: Words, attribute: str) -> Asked | None:
    """An attribute of the only thing left of (right of, above, below) another."""
    found = find_beside(scene, rng)
    if found is None:
        return None
    thing, anchor, direction = found
    value = value_of(thing, attribute)
    reference = words.refer["beside"].format(words.directions[direction], _refer_to_anchor(scene, anchor, rng, words))
    return Asked(words.question(attribute, rng, reference), words.values(attribute)[value], value)


def _refer_to_anchor(scene: Scene, anchor: Thing, rng: Rng, words: Words) -> str:
    # By its look and never by its place: "left of the thing at the top" would give much of the relation away.
    return refer(scene, anchor, rng, words, hide="place")


def ask_marked(scene: Scene, rng: Rng, words: Words, attribute: str) -> Asked | None:
    """An attribute of a thing of a diagram that is referred to by its tag."""
    thing = rng.choice(scene.things)
    if not thing.tag:
        return None
    value = value_of(thing, attribute)
    return Asked(
        words.question(attribute, rng, words.refer["tag"].format(thing.tag)), words.values(attribute)[value], value
    )


def ask_tag_of(scene: Scene, rng: Rng, words: Words) -> Asked | None:
    """The tag of a thing of a diagram."""
    thing = rng.choice(scene.things)
    return Asked(words.question("tag_of", rng, refer(scene, thing, rng, words)), thing.tag) if thing.tag else None


def ask_name_of_tag(scene: Scene, rng: Rng, words: Words) -> Asked | None:
    """The color and shape of what a tag of a diagram marks."""
    thing = rng.choice(scene.things)
    if not thing.tag:
        return None
    return Asked(words.question("marked", rng, thing.tag), words.name(thing.color, thing.shape))


def ask_count(scene: Scene, rng: Rng, words: Words) -> Asked:
    """How many things there are; the sign is not a thing."""
    count = len(scene.things)
    return Asked(words.question("count", rng), str(count), count)


def ask_count_some(scene: Scene, rng: Rng, words: Words) -> Asked:
    """How many things have a color or a shape: two times in three one that is there."""
    attribute = "color" if rng.below(2) else "shape"
    there = rng.below(3) > 0
    value = value_of(rng.choice(scene.things), attribute) if there else missing_value(scene, rng, attribute)
    count = sum(value_of(thing, attribute) == value for thing in scene.things)
    some = words.plurals[value] if attribute == "shape" else f"{words.colors[value]} things"
    return Asked(words.question("count_some", rng, some), str(count), count)


def ask_sign(scene: Scene, rng: Rng, words: Words, kind: str = "sign") -> Asked | None:
    """What the sign says; as a word or number (`sign_word`, `sign_number`) only where it is one."""
    if scene.sign is None or (kind != "sign" and scene.sign.text.isdigit() != (kind == "sign_number")):
        return None
    return Asked(words.question(kind, rng), scene.sign.text)


def ask_missing(scene: Scene, rng: Rng, words: Words) -> Asked:
    """An attribute of a thing that is not there."""
    attribute = rng.choice(ATTRIBUTES)
    return Asked(words.question(attribute, rng, refer_to_missing(scene, rng, words, attribute)), UNANSWERABLE)


def ask_missing_sign(scene: Scene, rng: Rng, words: Words) -> Asked | None:
    """What the sign says, where there is no sign."""
    if scene.sign is not None:
        return None
    return Asked(words.question(rng.choice(("sign", "sign_word", "sign_number")), rng), UNANSWERABLE)


def ask_ruined(scene: Scene, rng: Rng, words: Words) -> Asked | None:
    """Any attribute, or the sign, in a picture that nothing can be told from."""
    if scene.quality != "ruined":
        return None
    attribute = rng.choice((*ATTRIBUTES, "sign"))
    if attribute == "sign":
        return Asked(words.question("sign", rng), UNANSWERABLE)
    return Asked(ask_attribute(scene, rng, words, attribute).text, UNANSWERABLE)


# Questions answered yes or no ----------------------------------------------------------------------------------------


def pair_exists(scene: Scene, rng: Rng, words: Words) -> Pair:
    """Is there a shape or a color: one that is there, one that is not."""
    attribute = "shape" if rng.below(2) else "color"
    there = value_of(rng.choice(scene.things), attribute)
    missing = missing_value(scene, rng, attribute)
    noun = "{}" if attribute == "shape" else "{} thing"
    values = words.values(attribute)
    kind = words.ask["exists"][rng.below(len(words.ask["exists"]))]
    return Pair(kind.format(a(noun.format(values[there]))), kind.format(a(noun.format(values[missing]))), values[there])


def ask_presence(color: int, shape: int, rng: Rng, words: Words) -> str:
    """Is there a thing of this color and shape?"""
    return words.question("exists", rng, a(words.name(color, shape)))


def pair_is(scene: Scene, rng: Rng, words: Words, attribute: str) -> Pair:
    """Does a thing have a value of an attribute: the right one, and a wrong one, often another thing's."""
    thing = rng.choice(scene.things)
    right = value_of(thing, attribute)
    wrong = distractors(scene, rng, words, attribute, right, 1)[0]
    reference, values = refer(scene, thing, rng, words, hide=attribute), words.values(attribute)
    return Pair(
        words.question("is", rng, reference, values[right]),
        words.question("is", rng, reference, values[wrong]),
        values[right],
    )


def pair_beside(scene: Scene, rng: Rng, words: Words) -> Pair | None:
    """Is one thing left of (right of, above, below) another: the true relation, and its opposite."""
    if len(scene.things) < 2:
        return None
    one, other = rng.sample(scene.things, 2)
    directions = [direction for direction in range(4) if _ahead(one, other, direction) >= 2 * CLEAR]
    if not directions:
        return None
    direction = rng.choice(directions)
    first, second = _refer_to_anchor(scene, one, rng, words), _refer_to_anchor(scene, other, rng, words)
    wording = rng.choice(words.ask["is_beside"])
    return Pair(
        wording.format(first, words.directions[direction], second),
        wording.format(first, words.directions[direction ^ 1], second),
        words.directions[direction],
    )


def ask_same_color(scene: Scene, rng: Rng, words: Words) -> Asked | None:
    """Have two things the same color?"""
    things, same = scene.things, rng.below(2) == 0
    pairs = [(x, y) for x in things for y in things if x is not y and (x.color == y.color) == same]
    if not pairs or (not same and rng.below(3)):  # about a third of the scenes have two things of one color
        return None
    one, other = rng.choice(pairs)
    first, second = (refer(scene, thing, rng, words, hide="color") for thing in (one, other))
    return Asked(words.question("same_color", rng, first, second), "yes" if same else "no")


def pair_count(scene: Scene, rng: Rng, words: Words) -> Pair:
    """Is this the number of things?"""
    right = len(scene.things)
    wrong = _other_count(right, rng)
    return Pair(words.question("is_count", rng, right), words.question("is_count", rng, wrong), str(right))


def pair_sum(scene: Scene, rng: Rng, words: Words) -> Pair:
    """Do the things and a few more make this number?"""
    right, more = len(scene.things), 1 + rng.below(4)
    wrong = _other_count(right, rng)
    return Pair(
        words.question("is_sum", rng, more, right + more), words.question("is_sum", rng, more, wrong + more), str(right)
    )


def _other_count(right: int, rng: Rng) -> int:
    return rng.choice([count for count in COUNTS if count != right])


def pair_sign(scene: Scene, rng: Rng, words: Words) -> Pair | None:
    """Does the sign say this: its text, and another of the same kind and length."""
    if scene.sign is None:
        return None
    right = scene.sign.text
    wrong = other_texts(right, rng, 1)[0]
    return Pair(words.question("is_sign", rng, right), words.question("is_sign", rng, wrong), right)


# Multiple choice -----------------------------------------------------------------------------------------------------


def with_options(text: str, options: tuple[str, ...], words: Words) -> str:
    """A question with lettered options, to be answered with a letter."""
    lines = "\n".join(f"{letter}. {option}" for letter, option in zip(LETTERS, options, strict=False))
    return f"{text}\n{lines}\n{words.by_letter}"


def distractors(scene: Scene, rng: Rng, words: Words, attribute: str, right: int, count: int) -> list[int]:
    """Wrong values of an attribute, first those of the other things in the picture."""
    total = len(words.values(attribute))
    others = list({value_of(thing, attribute): None for thing in scene.things if value_of(thing, attribute) != right})
    wrong = rng.shuffle(others)[:count]
    while len(wrong) < count:
        value = rng.below(total)
        if value != right and value not in wrong:
            wrong.append(value)
    return wrong


def other_texts(right: str, rng: Rng, count: int) -> list[str]:
    """Wrong texts for a sign: numbers for a number, words of the same length for a word."""
    pool = NUMBERS if right.isdigit() else _WORDS_BY_LENGTH[len(right)]
    wrong: list[str] = []
    while len(wrong) < count:
        text = rng.choice(pool)
        if text != right and text not in wrong:
            wrong.append(text)
    return wrong


def other_names(scene: Scene, rng: Rng, words: Words, right: str, count: int) -> list[str]:
    """Wrong color and shape pairs: first the other things of the picture, then things that are not there."""
    others = [words.name(thing.color, thing.shape) for thing in scene.things]
    others.remove(right)
    wrong = rng.shuffle(others)[:count]
    while len(wrong) < count:
        name = words.name(*missing_pair(scene, rng, near=False))
        if name not in wrong:
            wrong.append(name)
    return wrong


def grid_of_names(scene: Scene, rng: Rng, words: Words) -> tuple[str, list[str]] | None:
    """A thing of the scene, and three that are not there: two colors times two shapes.

    Each color and each shape occurs twice, so that the options alone do not tell which one is right.
    """
    present = {(thing.color, thing.shape) for thing in scene.things}
    thing = rng.choice(scene.things)
    color = distractors(scene, rng, words, "color", thing.color, 1)[0]
    shape = distractors(scene, rng, words, "shape", thing.shape, 1)[0]
    wrong = [(thing.color, shape), (color, thing.shape), (color, shape)]
    if any(pair in present for pair in wrong):
        return None
    return words.name(thing.color, thing.shape), [words.name(*pair) for pair in wrong]


NUMBERS = tuple(str(number) for number in range(10, 100))
_WORDS_BY_LENGTH = {length: tuple(word for word in WORDS if len(word) == length) for length in {len(w) for w in WORDS}}


# Vocabulary ----------------------------------------------------------------------------------------------------------


def all_texts(scenes: int = 100) -> Iterator[str]:
    """Texts with every word that can occur, English and Chinese, each in the places where it occurs.

    Wordings are filled with every word, and captions are those of the first training scenes in every sentence plan.
    An answer follows a space, so that answers come with one.
    """
    others = (*WORDS, *NUMBERS, *map(str, range(10)), *TAGS)
    for words in (ENGLISH, CHINESE):
        values = [value for attribute in ATTRIBUTES for value in words.values(attribute)]
        options = [*values, *others, *words.plurals]
        slots = [*options, *words.directions, *(a(value) for value in values)]
        slots += [form.format(*values[:2]) for form in words.refer.values()]
        for wording in (wording for wordings in words.ask.values() for wording in wordings):
            yield from (wording.format(slot, slot, slot) for slot in slots)
        yield from (with_options("", (option,) * len(LETTERS), words) for option in options)
        yield from (f" {value}" for value in values)
    yield from (f" {answer}" for answer in (*others, *LETTERS, "yes", "no", UNANSWERABLE))
    yield from CAPTION_PROMPTS
    yield from (f" {text}" for text in _RUINED_CAPTIONS)
    for index in range(scenes):
        for kind in ("plain", "sign", "diagram"):
            scene = make_scene("train", index, kind=kind, quality="clear")
            yield from (f" {plan(scene)}" for plan in PLANS)
