"""The words that texts about scenes are made of, in English and Chinese, and what a question is."""

from dataclasses import dataclass
from typing import NamedTuple

from diffprune.rng import Rng
from diffprune_lab.scenes.language import chinese
from diffprune_lab.scenes.world import CELLS, COLORS, PATTERNS, SHAPES, SIZES, Thing

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


def value_of(thing: Thing, attribute: str) -> int:
    """The index of a thing's value of an attribute."""
    return thing.cell if attribute == "place" else getattr(thing, attribute)


def a(noun: str) -> str:
    """The noun with its indefinite article."""
    return ("an " if noun[0] in "aeiou" else "a ") + noun
