"""Ten tasks about the second world, named `scarce/<kind>`.

| kind | asks for | needs | metric |
|---|---|---|---|
| name | what stands at a place, or bears a digit | head and base | exact match |
| color | the color of the upper or lower half | head or base, and who it is | exact match |
| where | the place of a thing | head and base | exact match |
| count | how many things, in all or in a row or column | a token of each | exact match |
| exists | whether there is such a thing, with near misses | head and base | F1 of yes (POPE) |
| relation | left of, right of, above, below | heads and bases of two | accuracy and accuracy+ (MME) |
| number | the digit on a thing | badge, and who it is | exact match |
| sign | the text of the sign | every letter | exact match |
| letter | one letter, or how many there are | that letter, or the last | exact match |
| size | how big a thing is | the extent: head and base | exact match |
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count as count_from

from diffprune.evaluate.task import METRICS, Question, Task
from diffprune.rng import Rng
from diffprune_lab.scarce import language
from diffprune_lab.scarce.language import Asked, Pair
from diffprune_lab.scarce.world import SPLITS, Scene, make_scene

Draw = Callable[[Scene, Rng], Asked | Pair | None]
_TRIES = 6


@dataclass(frozen=True, slots=True)
class Family:
    """Questions of one skill: their share of the task, how they are made, and how many answers are kept balanced."""

    name: str
    weight: int
    draw: Draw
    answers: int = 0
    sign: bool | None = None


@dataclass(frozen=True, slots=True)
class _Kind:
    metric: str  # one of the library's
    families: tuple[Family, ...]
    weight: int  # in training
    training: tuple[Family, ...] = ()  # beside the families, in training alone


_KINDS = {
    "name": _Kind("exact", (Family("place", 2, language.ask_name, 12), Family("mark", 1, language.ask_marked, 12)), 12),
    "color": _Kind(
        "exact", tuple(Family(half, 1, partial(language.ask_color, half=half), 8) for half in ("top", "bottom")), 14
    ),
    "where": _Kind("exact", (Family("where", 1, language.ask_where, 9),), 10),
    "count": _Kind(
        "exact", (Family("all", 1, language.ask_count, 7), Family("line", 1, language.ask_count_line, 4)), 8
    ),
    "exists": _Kind(
        "pope", tuple(Family(near, 1, partial(language.ask_exists, near=near), 2) for near in ("far", "near")), 10
    ),
    "relation": _Kind(
        "mme",
        (Family("relation", 1, language.pair_relation, 4),),
        20,
        training=(Family("told", 1, language.tell_relation),),
    ),
    "number": _Kind("exact", (Family("number", 1, language.ask_number, 10),), 12),
    "sign": _Kind("exact", (Family("sign", 1, language.ask_sign, 5, True),), 14),
    "letter": _Kind(
        "exact",
        (Family("letter", 2, language.ask_letter, 20, True), Family("length", 1, language.ask_length, 5, True)),
        10,
    ),
    "size": _Kind("exact", (Family("size", 1, language.ask_size, 4),), 10),
}
PREFIX = "scarce/"
TASKS = tuple(PREFIX + kind for kind in _KINDS)
KINDS_OF_TURN = ("caption", *TASKS)


def build_task(name: str, split: str, count: int, seed: int = 0) -> Task:
    """A task with `count` scored units; the same arguments give the same task on every machine.

    Args:
        name: One of TASKS.
        split: "train", "validation" or "test".
        seed: Another seed gives other scenes and questions.
    """
    if name not in TASKS:
        raise ValueError(f"There is no task {name!r}: choose one of {', '.join(TASKS)}.")
    if split not in SPLITS:
        raise ValueError(f"There is no split {split!r}: choose one of {', '.join(SPLITS)}.")
    if count < 1:
        raise ValueError(f"A task cannot have {count} questions: ask for at least 1.")
    kind = _KINDS[name.removeprefix(PREFIX)]
    families = kind.families
    total, made = sum(family.weight for family in families), 0
    questions: list[Question] = []
    group = 0
    for number, family in enumerate(families):
        share = (count - made) * family.weight // total
        made, total = made + share, total - family.weight
        stream = 16 * TASKS.index(name) + number
        for scene, asked in _draw_family(family, split, share, seed, stream):
            posed = [("yes", asked.yes), ("no", asked.no)] if isinstance(asked, Pair) else [(asked.answer, asked.text)]
            for answer, prompt in posed:
                label = f"{name}-{split}-{seed}-{len(questions)}"
                questions.append(
                    Question(id=label, prompt=prompt, answer=answer, images=(scene,), subset=family.name, group=group)
                )
            group += 1
    return Task(name, questions, METRICS[kind.metric])


def _draw_family(
    family: Family, split: str, share: int, seed: int, stream: int
) -> Iterator[tuple[Scene, Asked | Pair]]:
    """`share` questions, one a scene, no answer more often than the balance of the family allows."""
    most = -(-share // family.answers) if family.answers else share
    used: Counter[str] = Counter()
    for step in count_from():
        if used.total() == share:
            return
        assert step < 1000 * (share + 100), f"the answers of {family.name} cannot be balanced"
        index = (stream << 32) + step
        scene = make_scene(split, index, sign=family.sign, seed=seed)
        rng = Rng(seed, "scarce task", split, index)
        for _ in range(_TRIES):
            asked = family.draw(scene, rng)
            if asked is not None and used[asked.key] < most:
                used[asked.key] += 1
                yield scene, asked
                break


# Training ------------------------------------------------------------------------------------------------------------

DEFAULT_WEIGHTS: Mapping[str, int] = {kind: one.weight for kind, one in _KINDS.items()}


def training_turns(
    scene: Scene, rng: Rng, count: int, weights: Mapping[str, int] = DEFAULT_WEIGHTS, *, captions: bool = True
) -> list[tuple[str, str, str]]:
    """(kind, prompt, answer) of a caption and of questions of all kinds that fit the scene; no prompt comes twice."""
    bounds, kinds, bound = [], [], 0
    for kind, weight in weights.items():
        if weight and (kind not in ("sign", "letter") or scene.sign is not None):
            bound += weight
            bounds.append(bound)
            kinds.append(kind)
    turns = [("caption", rng.choice(language.CAPTION_PROMPTS), language.caption(scene, rng))] if captions else []
    said: set[str] = set()
    for _ in range(3 * count):
        if len(turns) >= count:
            break
        kind = kinds[bisect_right(bounds, rng.below(bound))]
        turn = draw_turn(scene, rng, kind, training=True)
        if turn is not None and turn[1] not in said:
            said.add(turn[1])
            turns.append(turn)
    return turns


def draw_turn(scene: Scene, rng: Rng, kind: str, *, training: bool = False) -> tuple[str, str, str] | None:
    """(task, prompt, answer) of one question of a kind, or None where the scene does not allow it."""
    families = _KINDS[kind].families + (_KINDS[kind].training if training else ())
    asked = families[rng.weighted([family.weight for family in families])].draw(scene, rng)
    if asked is None:
        return None
    if isinstance(asked, Pair):
        return (PREFIX + kind, asked.yes, "yes") if rng.below(2) else (PREFIX + kind, asked.no, "no")
    return PREFIX + kind, asked.text, asked.answer
