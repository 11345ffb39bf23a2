"""The questions of the ten tasks, by families: one skill each, drawn from a scene.

Within a family the answers are balanced, so that the wording alone says little.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from diffprune.rng import Rng
from diffprune_lab.scenes import language
from diffprune_lab.scenes.language import CHINESE, ENGLISH, Asked, Pair, Words
from diffprune_lab.scenes.world import TAGS, Scene

# The pairs people would name first: one for each shape. Scenes do not prefer them; `pope` asks for them.
POPULAR = (
    ("orange", "circle"),
    ("black", "square"),
    ("yellow", "triangle"),
    ("blue", "diamond"),
    ("white", "cross"),
    ("pink", "ring"),
    ("yellow", "star"),
    ("red", "heart"),
    ("white", "moon"),
    ("black", "arrow"),
    ("brown", "house"),
    ("green", "tree"),
)


class Draft(NamedTuple):
    """A question before it is posed: `wrong` options where it is multiple choice, `key` to balance answers by."""

    text: str
    answer: str
    key: str
    wrong: tuple[str, ...] = ()


Draw = Callable[[Scene, Rng], Draft | Pair | None]


@dataclass(frozen=True, slots=True)
class Family:
    """Questions of one skill.

    Attributes:
        weight: Share of the task.
        draw: Makes a question of a scene, or None where the scene does not allow one.
        answers: Number of different answers that are kept equally frequent; 0 leaves them as they come.
        kind: The kind of scene that is asked about; None is the natural mix.
        qualities: Qualities of the pictures, in turn.
    """

    name: str
    weight: int
    draw: Draw
    answers: int = 0
    kind: str | None = None
    qualities: tuple[str, ...] = ("clear",)


@dataclass(frozen=True, slots=True)
class TaskSpec:
    """What a task is made of.

    Attributes:
        metric: Its name in `diffprune.evaluate.task.METRICS`.
    """

    metric: str
    families: tuple[Family, ...]
    words: Words = ENGLISH


# Families ------------------------------------------------------------------------------------------------------------


def _open(ask: Callable[..., Asked | None], *arguments: str, words: Words = ENGLISH) -> Draw:
    def draw(scene: Scene, rng: Rng) -> Draft | None:
        asked = ask(scene, rng, words, *arguments)
        return None if asked is None else Draft(asked.text, asked.answer, asked.answer)

    return draw


def _either(pair: Callable[..., Pair | None], *arguments: str) -> Draw:
    """One question of a pair, "yes" or "no" by a toss."""

    def draw(scene: Scene, rng: Rng) -> Draft | None:
        made = pair(scene, rng, ENGLISH, *arguments)
        if made is None:
            return None
        return Draft(made.yes, "yes", "yes") if rng.below(2) else Draft(made.no, "no", "no")

    return draw


def _pair(pair: Callable[..., Pair | None], *arguments: str) -> Draw:
    return lambda scene, rng: pair(scene, rng, ENGLISH, *arguments)


def _choice(ask: Callable[..., Asked | None], attribute: str, options: int = 4, words: Words = ENGLISH) -> Draw:
    """A value of an attribute among others, those of the other things in the picture first."""

    def draw(scene: Scene, rng: Rng) -> Draft | None:
        asked = ask(scene, rng, words, attribute)
        if asked is None:
            return None
        values = words.values(attribute)
        wrong = language.distractors(scene, rng, words, attribute, asked.value, options - 1)
        return Draft(asked.text, asked.answer, asked.answer, tuple(values[value] for value in wrong))

    return draw


def _choose_count(words: Words) -> Draw:
    def draw(scene: Scene, rng: Rng) -> Draft:
        asked = language.ask_count(scene, rng, words)
        wrong = rng.shuffle([str(count) for count in language.COUNTS if count != asked.value])
        return Draft(asked.text, asked.answer, asked.answer, tuple(wrong))

    return draw


def _choose_identity(words: Words) -> Draw:
    def draw(scene: Scene, rng: Rng) -> Draft | None:
        grid = language.grid_of_names(scene, rng, words)
        if grid is None:
            return None
        right, wrong = grid
        return Draft(words.question("identity", rng), right, right, tuple(wrong))

    return draw


def _choose_sign(words: Words) -> Draw:
    def draw(scene: Scene, rng: Rng) -> Draft | None:
        asked = language.ask_sign(scene, rng, words)
        if asked is None:
            return None
        return Draft(asked.text, asked.answer, asked.answer, tuple(language.other_texts(asked.answer, rng, 3)))

    return draw


def _choose_tag(scene: Scene, rng: Rng) -> Draft | None:
    asked = language.ask_tag_of(scene, rng, ENGLISH)
    if asked is None:
        return None
    others = [thing.tag for thing in scene.things]
    wrong = rng.shuffle([tag for tag in others if tag != asked.answer])[:3]
    unused = [tag for tag in TAGS if tag not in others]
    wrong += rng.sample(unused, 3 - len(wrong))
    return Draft(asked.text, asked.answer, asked.answer, tuple(wrong))


def _choose_name_of_tag(scene: Scene, rng: Rng) -> Draft | None:
    asked = language.ask_name_of_tag(scene, rng, ENGLISH)
    if asked is None:
        return None
    wrong = language.other_names(scene, rng, ENGLISH, asked.answer, 3)
    return Draft(asked.text, asked.answer, asked.answer, tuple(wrong))


def _presence(scene: Scene, rng: Rng, subset: str) -> Draft | None:
    """Is there a thing of this color and shape: one that is there, or one chosen by the rule of the subset.

    Where only popular pairs are asked for, as many are there as are not, else their very name would mean "no".
    """
    present = [(thing.color, thing.shape) for thing in scene.things]
    there = rng.below(2) == 0
    if subset == "popular":
        candidates = [pair for pair in _POPULAR if (pair in present) == there]
        if not candidates or (not there and rng.below(4)):  # about a quarter of the scenes hold a popular pair
            return None
        color, shape = rng.choice(candidates)
    elif there:
        color, shape = rng.choice(present)
    else:
        color, shape = language.missing_pair(scene, rng, near=subset == "adversarial")
    answer = "yes" if there else "no"
    return Draft(language.ask_presence(color, shape, rng, ENGLISH), answer, answer)


_POPULAR = tuple((ENGLISH.colors.index(color), ENGLISH.shapes.index(shape)) for color, shape in POPULAR)


def _bench(words: Words) -> tuple[Family, ...]:
    choice = partial(_choice, words=words)
    return (
        Family("color", 14, choice(language.ask_attribute, "color"), 10),
        Family("shape", 14, choice(language.ask_attribute, "shape"), 12),
        Family("place", 14, choice(language.ask_attribute, "place"), 9),
        Family("count", 12, _choose_count(words), 4),
        Family("identity", 12, _choose_identity(words)),
        Family("sign", 14, _choose_sign(words), kind="sign"),
        Family("beside color", 10, choice(language.ask_beside, "color"), 10),
        Family("beside shape", 10, choice(language.ask_beside, "shape"), 12),
    )


_POOR = ("dim", "soft")
SPECS = {
    "gqa": TaskSpec(
        "exact",
        (
            Family("beside color", 24, _open(language.ask_beside, "color"), 10),
            Family("beside shape", 24, _open(language.ask_beside, "shape"), 12),
            Family("beside size", 10, _open(language.ask_beside, "size"), 3),
            Family("beside pattern", 10, _open(language.ask_beside, "pattern"), 3),
            Family("relation", 20, _either(language.pair_beside), 2),
            Family("same color", 12, _open(language.ask_same_color), 2),
        ),
    ),
    "mmbench": TaskSpec("circular", _bench(ENGLISH)),
    "mmbench_cn": TaskSpec("circular", _bench(CHINESE), CHINESE),
    "mme": TaskSpec(
        "mme",
        (
            Family("existence", 1, _pair(language.pair_exists)),
            Family("count", 1, _pair(language.pair_count), 4),
            Family("position", 1, _pair(language.pair_beside), 4),
            Family("color", 1, _pair(language.pair_is, "color"), 10),
            Family("ocr", 1, _pair(language.pair_sign), kind="sign"),
            Family("calculation", 1, _pair(language.pair_sum), 4),
        ),
    ),
    "pope": TaskSpec(
        "pope",
        tuple(Family(name, 1, partial(_presence, subset=name), 2) for name in ("random", "popular", "adversarial")),
    ),
    "scienceqa": TaskSpec(
        "choice",
        (
            Family("tag of thing", 30, _choose_tag, kind="diagram"),
            Family("name of tag", 30, _choose_name_of_tag, kind="diagram"),
            Family("color of tag", 20, _choice(language.ask_marked, "color"), 10, kind="diagram"),
            Family("shape of tag", 20, _choice(language.ask_marked, "shape"), 12, kind="diagram"),
        ),
    ),
    "vqav2": TaskSpec(
        "vqa",
        (
            Family("color", 16, _open(language.ask_attribute, "color"), 10),
            Family("shape", 14, _open(language.ask_attribute, "shape"), 12),
            Family("size", 8, _open(language.ask_attribute, "size"), 3),
            Family("pattern", 10, _open(language.ask_attribute, "pattern"), 3),
            Family("place", 6, _open(language.ask_attribute, "place"), 9),
            Family("count", 8, _open(language.ask_count), 4),
            Family("count some", 8, _open(language.ask_count_some), 3),
            Family("is there", 12, _either(language.pair_exists), 2),
            Family("is color", 10, _either(language.pair_is, "color"), 2),
            Family("is pattern", 8, _either(language.pair_is, "pattern"), 2),
        ),
    ),
    "textvqa": TaskSpec(
        "vqa_evalai",
        (
            Family("sign", 50, _open(language.ask_sign), kind="sign"),
            Family("word", 30, _open(language.ask_sign, "sign_word"), kind="sign"),
            Family("number", 20, _open(language.ask_sign, "sign_number"), kind="sign"),
        ),
    ),
    "seed": TaskSpec(
        "choice",
        (
            Family("color", 20, _choice(language.ask_attribute, "color"), 10),
            Family("size", 15, _choice(language.ask_attribute, "size", 3), 3),
            Family("pattern", 15, _choice(language.ask_attribute, "pattern", 3), 3),
            Family("place", 20, _choice(language.ask_attribute, "place"), 9),
            Family("identity", 20, _choose_identity(ENGLISH)),
            Family("count", 10, _choose_count(ENGLISH), 4),
        ),
    ),
    "vizwiz": TaskSpec(
        "vqa",
        (
            Family("ruined", 15, _open(language.ask_ruined), qualities=("ruined",)),
            Family("missing", 15, _open(language.ask_missing), qualities=("dim", "soft", "clear")),
            Family("missing sign", 5, _open(language.ask_missing_sign), kind="plain", qualities=_POOR),
            Family("color", 22, _open(language.ask_attribute, "color"), 10, qualities=_POOR),
            Family("shape", 20, _open(language.ask_attribute, "shape"), 12, qualities=_POOR),
            Family("pattern", 8, _open(language.ask_attribute, "pattern"), 3, qualities=_POOR),
            Family("sign", 15, _open(language.ask_sign), kind="sign", qualities=_POOR),
        ),
    ),
}
# Asked in training beside the questions of a task: what to look for, learned without the letters of a choice.
_chinese = partial(_open, words=CHINESE)
EXERCISES = {
    "scienceqa": (
        Family("tag of thing", 25, _open(language.ask_tag_of), kind="diagram"),
        Family("name of tag", 20, _open(language.ask_name_of_tag), kind="diagram"),
        Family("color of tag", 15, _open(language.ask_marked, "color"), kind="diagram"),
        Family("shape of tag", 15, _open(language.ask_marked, "shape"), kind="diagram"),
    ),
    "mmbench_cn": (
        Family("color", 10, _chinese(language.ask_attribute, "color")),
        Family("shape", 10, _chinese(language.ask_attribute, "shape")),
        Family("place", 10, _chinese(language.ask_attribute, "place")),
        Family("beside color", 10, _chinese(language.ask_beside, "color")),
        Family("beside shape", 10, _chinese(language.ask_beside, "shape")),
    ),
}
