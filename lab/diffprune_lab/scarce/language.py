"""What can be said of a scene of the second world: captions, and questions with one right answer.

A question maker takes a scene and a stream and gives None where the scene does not allow the question. A thing is
referred to by what it is called where it alone is called so, else by its place.
"""

from collections.abc import Iterator
from typing import NamedTuple

from diffprune.rng import Rng
from diffprune_lab.scarce.masks import COLORS, DIGITS, LETTERS, NOUNS, SIZES
from diffprune_lab.scarce.world import CELLS, Scene, Thing, make_scene

DIRECTIONS = ("left of", "right of", "above", "below")
ROWS = ("top row", "middle row", "bottom row")
COLUMNS = ("left column", "middle column", "right column")
CAPTION_PROMPTS = ("Describe the picture.", "What is in the picture?", "Write a caption.")


class Asked(NamedTuple):
    """A question, its answer, and what answers are balanced by."""

    text: str
    answer: str
    key: str


class Pair(NamedTuple):
    """Two questions about one scene, answered "yes" and "no"."""

    yes: str
    no: str
    key: str


def a(noun: str) -> str:
    """The noun with its indefinite article."""
    return ("an " if noun[0] in "aeiou" else "a ") + noun


# Captions ------------------------------------------------------------------------------------------------------------


def describe(thing: Thing) -> str:
    """A thing in full, but for its place."""
    marked = f" marked {thing.digit}" if thing.digit >= 0 else ""
    return f"a {SIZES[thing.size]} {NOUNS[thing.noun]}{marked}, {COLORS[thing.top]} over {COLORS[thing.bottom]}"


def caption(scene: Scene, rng: Rng) -> str:
    """Every thing's place, size, name, digit and colors, and the sign's text."""
    sentences = [f"At the {CELLS[thing.cell]} is {describe(thing)}." for thing in scene.things]
    if scene.sign is not None:
        sentences.insert(0 if rng.below(2) else len(sentences), f"A sign says {scene.sign.text}.")
    return " ".join(sentences)


# Questions -----------------------------------------------------------------------------------------------------------


def unique(scene: Scene) -> list[Thing]:
    """The things that share their name with no other."""
    nouns = [thing.noun for thing in scene.things]
    return [thing for thing in scene.things if nouns.count(thing.noun) == 1]


def _pick(scene: Scene, rng: Rng) -> tuple[Thing, str]:
    """A thing and words that fit it alone: what it is called, or in one case of three its place."""
    named = unique(scene)
    if not named or rng.below(3) == 0:
        thing = rng.choice(scene.things)
        return thing, f"the thing at the {CELLS[thing.cell]}"
    thing = rng.choice(named)
    return thing, f"the {NOUNS[thing.noun]}"


def ask_name(scene: Scene, rng: Rng) -> Asked:
    """What is at a place."""
    thing = rng.choice(scene.things)
    wording = rng.choice(("What is at the {}?", "Which thing is at the {}?"))
    return Asked(wording.format(CELLS[thing.cell]), NOUNS[thing.noun], NOUNS[thing.noun])


def ask_marked(scene: Scene, rng: Rng) -> Asked | None:
    """What bears a digit."""
    digits = [thing.digit for thing in scene.things]
    able = [thing for thing in scene.things if thing.digit >= 0 and digits.count(thing.digit) == 1]
    if not able:
        return None
    thing = rng.choice(able)
    return Asked(f"What is marked {thing.digit}?", NOUNS[thing.noun], NOUNS[thing.noun])


def ask_color(scene: Scene, rng: Rng, half: str) -> Asked:
    """The color of the upper ("top") or lower ("bottom") half of a thing."""
    thing, words = _pick(scene, rng)
    color = COLORS[thing.top if half == "top" else thing.bottom]
    return Asked(f"What color is the {half} of {words}?", color, color)


def ask_where(scene: Scene, rng: Rng) -> Asked | None:
    """The place of a thing."""
    able = unique(scene)
    if not able:
        return None
    thing = rng.choice(able)
    wording = rng.choice(("Where is the {}?", "In which place is the {}?"))
    return Asked(wording.format(NOUNS[thing.noun]), CELLS[thing.cell], CELLS[thing.cell])


def ask_count(scene: Scene, rng: Rng) -> Asked:
    """How many things there are."""
    count = str(len(scene.things))
    return Asked(rng.choice(("How many things are there?", "What is the number of things?")), count, count)


def ask_count_line(scene: Scene, rng: Rng) -> Asked:
    """How many things are in a row or column."""
    line = rng.below(3)
    if rng.below(2):
        where, count = ROWS[line], sum(thing.cell // 3 == line for thing in scene.things)
    else:
        where, count = COLUMNS[line], sum(thing.cell % 3 == line for thing in scene.things)
    return Asked(f"How many things are in the {where}?", str(count), str(count))


def missing_noun(scene: Scene, rng: Rng, *, near: bool) -> int | None:
    """A name that nothing in the scene has; a near one shares its head or base with a thing that is there."""
    present = {thing.noun for thing in scene.things}
    absent = [noun for noun in range(len(NOUNS)) if noun not in present]
    if near:
        thing = rng.choice(scene.things)
        absent = [noun for noun in absent if (noun // 3 == thing.head) != (noun % 3 == thing.base)]
    return rng.choice(absent) if absent else None


def ask_exists(scene: Scene, rng: Rng, near: str) -> Asked | None:
    """Whether something so called is there: one that is, or one that is not ("far", or a "near" one)."""
    wording = rng.choice(("Is there {} in the picture?", "Does the picture show {}?"))
    if rng.below(2):
        return Asked(wording.format(a(NOUNS[rng.choice(scene.things).noun])), "yes", "yes")
    noun = missing_noun(scene, rng, near=near == "near")
    return None if noun is None else Asked(wording.format(a(NOUNS[noun])), "no", "no")


def pair_relation(scene: Scene, rng: Rng) -> Pair | None:
    """Is one thing left of (right of, above, below) another: the true relation, and its opposite."""
    able = unique(scene)
    if len(able) < 2:
        return None
    one, other = rng.sample(able, 2)
    across, down = one.cell % 3 - other.cell % 3, one.cell // 3 - other.cell // 3
    true = [number for number, holds in enumerate((across < 0, across > 0, down < 0, down > 0)) if holds]
    direction = rng.choice(true)
    text = f"Is the {NOUNS[one.noun]} {{}} the {NOUNS[other.noun]}?"
    return Pair(text.format(DIRECTIONS[direction]), text.format(DIRECTIONS[direction ^ 1]), DIRECTIONS[direction])


def tell_relation(scene: Scene, rng: Rng) -> Asked | None:
    """How one thing lies to another, in full: "above and left of".

    Asked in training alone. Yes and no say little about two places; these words say where both are.
    """
    able = unique(scene)
    if len(able) < 2:
        return None
    one, other = rng.sample(able, 2)
    across, down = one.cell % 3 - other.cell % 3, one.cell // 3 - other.cell // 3
    true = [DIRECTIONS[2 + (down > 0)]] * (down != 0) + [DIRECTIONS[across > 0]] * (across != 0)
    answer = " and ".join(true)
    return Asked(f"How does the {NOUNS[one.noun]} lie to the {NOUNS[other.noun]}?", answer, answer)


def ask_number(scene: Scene, rng: Rng) -> Asked | None:
    """The digit on a thing."""
    for _ in range(4):
        thing, words = _pick(scene, rng)
        if thing.digit >= 0:
            return Asked(f"What number is on {words}?", str(thing.digit), str(thing.digit))
    return None


def ask_sign(scene: Scene, rng: Rng) -> Asked | None:
    """What the sign says."""
    if scene.sign is None:
        return None
    wording = rng.choice(("What does the sign say?", "What is written on the sign?"))
    return Asked(wording, scene.sign.text, str(len(scene.sign.text)))


def ask_letter(scene: Scene, rng: Rng) -> Asked | None:
    """One letter of the sign."""
    if scene.sign is None:
        return None
    place = rng.below(len(scene.sign.text))
    return Asked(f"What is letter {place + 1} of the sign?", scene.sign.text[place], scene.sign.text[place])


def ask_length(scene: Scene, rng: Rng) -> Asked | None:
    """How many letters the sign has."""
    if scene.sign is None:
        return None
    length = str(len(scene.sign.text))
    return Asked(rng.choice(("How many letters are on the sign?", "How long is the sign?")), length, length)


def ask_size(scene: Scene, rng: Rng) -> Asked:
    """How big a thing is."""
    thing, words = _pick(scene, rng)
    return Asked(rng.choice(("How big is {}?", "What size is {}?")).format(words), SIZES[thing.size], SIZES[thing.size])


# Vocabulary ----------------------------------------------------------------------------------------------------------


def all_texts(scenes: int = 60) -> Iterator[str]:
    """Texts with every word that can occur, each in the places where it occurs."""
    answers = (*NOUNS, *COLORS, *SIZES, *CELLS, *DIGITS, *LETTERS, "yes", "no")
    yield from (f" {answer}" for answer in answers)
    yield from (f" {down} and {across}" for down in DIRECTIONS[2:] for across in DIRECTIONS[:2])
    yield from (a(noun) for noun in NOUNS)
    yield from CAPTION_PROMPTS
    makers = (ask_name, ask_marked, ask_where, ask_count, ask_count_line, pair_relation, tell_relation, ask_number)
    for index in range(scenes):
        scene = make_scene("train", index, sign=True)
        yield f" {caption(scene, Rng(index))}"
        for step in range(6):
            rng = Rng("texts", index, step)
            asked = [make(scene, rng) for make in (*makers, ask_sign, ask_letter, ask_length, ask_size)]
            asked += [ask_color(scene, rng, "top"), ask_color(scene, rng, "bottom"), ask_exists(scene, rng, "far")]
            for one in asked:
                if one is not None:
                    yield from (f"\n{text}" for text in one[:1])
