"""Questions about a scene, each with its one right answer.

Everything here follows from the description of a scene alone, draws from a named stream of integers, and is therefore
the same text on every machine. A question maker takes a scene, a stream and the words of a language, and gives None
where the scene does not allow the question: a question is only asked where its answer is unique and clear.

Two rules hold everywhere. Asked whether a missing thing is there, the answer is "no"; asked for anything else about
it, or for anything in a ruined picture, the answer is "unanswerable" (counts and yes-or-no questions are not asked of
ruined pictures).
"""

from diffprune.rng import Rng
from diffprune_lab.scenes.language.words import (
    ATTRIBUTES,
    CLEAR,
    COUNTS,
    LETTERS,
    LEVEL,
    UNANSWERABLE,
    Asked,
    Pair,
    Words,
    a,
    value_of,
)
from diffprune_lab.scenes.world import COLORS, SHAPES, WORDS, Scene, Thing

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
    """Any attribute, or the sign, in a picture that shows nothing recognisable."""
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

    Each color and each shape occurs twice, so that the options alone do not give away which one is right.
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
