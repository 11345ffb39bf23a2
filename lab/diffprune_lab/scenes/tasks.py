"""Ten tasks over scenes, each a stand-in for a benchmark of the paper and scored with that benchmark's own metric.

None of them is the benchmark whose name it carries: pictures and questions are procedural. What is the same is the
skill that is asked for, the form of the answer, and the metric:

| task | asks for | form | metric |
|---|---|---|---|
| gqa | attributes across a relation, relations, comparison | open | exact match |
| mmbench, mmbench_cn | perception and relations, in English and in Chinese (the same questions) | A-D | circular |
| mme | existence, count, position, color, sign; calculation (cognition) | yes/no pairs | accuracy + accuracy+ |
| pope | presence; random, popular, adversarial negatives | yes/no | F1 of yes |
| scienceqa | labelled diagrams | A-D | accuracy |
| vqav2 | counts, attributes, yes/no | open, ten answers | VQA accuracy |
| textvqa | words and numbers on signs | open, ten answers | VQA accuracy |
| seed | attributes, identity, place and number of instances | A-D | accuracy |
| vizwiz | attributes in bad pictures; what cannot be answered | open, ten answers | VQA accuracy |

Questions come from families (one skill each), and within a family the answers are balanced, so that the wording alone
says little: `Task.chance` is what the best guess without the picture gets.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import count as count_from
from typing import NamedTuple

from diffprune.evaluate import metrics
from diffprune.rng import Rng
from diffprune_lab.scenes import language
from diffprune_lab.scenes.language import CHINESE, ENGLISH, LETTERS, UNANSWERABLE, Asked, Pair, Words
from diffprune_lab.scenes.world import SPLITS, TAGS, Box, Scene, make_scene

ANNOTATORS = 10
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
DEFAULT_WEIGHTS: Mapping[str, int] = {
    "caption": 20,
    "gqa": 16,
    "mmbench": 9,
    "mmbench_cn": 9,
    "mme": 8,
    "pope": 8,
    "scienceqa": 16,
    "vqav2": 10,
    "textvqa": 16,
    "seed": 6,
    "vizwiz": 6,
}
_TRIES = 6  # draws from one scene before the next is taken
_TURN_TRIES = 16  # draws before a turn repeats what was said


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
class _Spec:
    form: str  # "open", "ten", "choice", "circular", "presence" or "pairs"
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
_SPECS = {
    "gqa": _Spec(
        "open",
        (
            Family("beside color", 24, _open(language.ask_beside, "color"), 10),
            Family("beside shape", 24, _open(language.ask_beside, "shape"), 12),
            Family("beside size", 10, _open(language.ask_beside, "size"), 3),
            Family("beside pattern", 10, _open(language.ask_beside, "pattern"), 3),
            Family("relation", 20, _either(language.pair_beside), 2),
            Family("same color", 12, _open(language.ask_same_color), 2),
        ),
    ),
    "mmbench": _Spec("circular", _bench(ENGLISH)),
    "mmbench_cn": _Spec("circular", _bench(CHINESE), CHINESE),
    "mme": _Spec(
        "pairs",
        (
            Family("existence", 1, _pair(language.pair_exists)),
            Family("count", 1, _pair(language.pair_count), 4),
            Family("position", 1, _pair(language.pair_beside), 4),
            Family("color", 1, _pair(language.pair_is, "color"), 10),
            Family("ocr", 1, _pair(language.pair_sign), kind="sign"),
            Family("calculation", 1, _pair(language.pair_sum), 4),
        ),
    ),
    "pope": _Spec(
        "presence",
        tuple(Family(name, 1, partial(_presence, subset=name), 2) for name in ("random", "popular", "adversarial")),
    ),
    "scienceqa": _Spec(
        "choice",
        (
            Family("tag of thing", 30, _choose_tag, kind="diagram"),
            Family("name of tag", 30, _choose_name_of_tag, kind="diagram"),
            Family("color of tag", 20, _choice(language.ask_marked, "color"), 10, kind="diagram"),
            Family("shape of tag", 20, _choice(language.ask_marked, "shape"), 12, kind="diagram"),
        ),
    ),
    "vqav2": _Spec(
        "ten",
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
    "textvqa": _Spec(
        "ten",
        (
            Family("sign", 50, _open(language.ask_sign), kind="sign"),
            Family("word", 30, _open(language.ask_sign, "sign_word"), kind="sign"),
            Family("number", 20, _open(language.ask_sign, "sign_number"), kind="sign"),
        ),
    ),
    "seed": _Spec(
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
    "vizwiz": _Spec(
        "ten",
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
TASKS = tuple(_SPECS)

# Asked in training beside the questions of a task: what to look for, learned without the letters of a choice.
_chinese = partial(_open, words=CHINESE)
_EXERCISES = {
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


# Tasks ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt about one scene.

    Attributes:
        answer: The right answer; a letter in multiple choice.
        answers: All accepted answers: ten annotators' where the metric asks for them, else the right one.
        family: The skill that is asked for (MME's subtask, POPE's subset).
        group: Number of the unit that is scored; rotations and pairs share it.
        choices: The options in the order of their letters, or None.
        boxes: Boxes of everything in the scene that texts speak of, for an oracle that keeps these.
    """

    id: str
    scene: Scene
    prompt: str
    answer: str
    answers: list[str]
    family: str
    group: int
    choices: tuple[str, ...] | None
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class TaskScore:
    """A score from 0 to 100 of the task's maximum, in the benchmark's own unit (`raw`), and by scored unit.

    The mean of `per_question` is the score; it has one value for each group, in the order of the groups.
    """

    score: float
    raw: float
    per_question: list[float]


@dataclass(frozen=True)
class Task:
    """Questions and how they are scored."""

    name: str
    split: str
    questions: list[Question]

    @property
    def _form(self) -> str:
        return _SPECS[self.name].form

    def score(self, outputs: Sequence[str]) -> TaskScore:
        """The score of one output for each question, in their order."""
        questions = self.questions
        if len(outputs) != len(questions):
            raise ValueError(f"{len(outputs)} outputs cannot answer {len(questions)} questions: give one for each.")
        answers = [question.answer for question in questions]
        groups = [question.group for question in questions]
        families = [question.family for question in questions]
        if self._form == "choice":
            scored = metrics.choice_accuracy(outputs, answers)
        elif self._form == "circular":
            scored = metrics.circular_accuracy(outputs, answers, groups)
        elif self._form == "presence":
            scored = metrics.pope_f1(outputs, answers, families)
        elif self._form == "pairs":
            scored = metrics.mme_score(outputs, answers, groups, families)
        elif self._form == "ten":
            scored = metrics.mean(
                [100.0 * metrics.vqa_accuracy(o, q.answers) for o, q in zip(outputs, questions, strict=True)]
            )
        else:
            scored = metrics.mean([100.0 * metrics.exact_match(o, a) for o, a in zip(outputs, answers, strict=True)])
        return TaskScore(scored.score, scored.score * self.maximum / 100, scored.units)

    @cached_property
    def maximum(self) -> float:
        """The most points there are in the benchmark's own unit: 200 for each of MME's subtasks, else 100."""
        if self._form == "pairs":
            return float(metrics.MME_SUBTASK_MAXIMUM * len({question.family for question in self.questions}))
        return 100.0

    @cached_property
    def ceiling(self) -> float:
        """The score of always answering right; below 100 only where simulated annotators disagree."""
        return self.score([question.answer for question in self.questions]).score

    @cached_property
    def chance(self) -> float:
        """The expected score (0 to 100) of guessing without the picture.

        Open answers: the best constant answer to each family. Multiple choice: one of the options at random.
        Circular: one option, kept through the rotations (a constant letter gets 0). MME: a toss for each question
        (half of the single ones, a quarter of the pairs). POPE: always "yes", two thirds where yes and no are balanced.
        """
        if self._form == "choice":
            return metrics.mean([100.0 / len(q.choices) for q in self.questions if q.choices]).score
        if self._form == "circular":
            return 100.0 / len(LETTERS)
        if self._form == "pairs":
            return 100.0 * (0.5 + 0.25) / 2
        if self._form == "presence":
            return self.score(["yes"] * len(self.questions)).score
        worth: dict[str, dict[str, float]] = {}  # of each answer to each family
        for question in self.questions:
            said = Counter(metrics.normalize(answer) for answer in question.answers)
            of_family = worth.setdefault(question.family, {})
            for answer, times in said.items():
                gain = metrics.agreement(times, len(question.answers)) if self._form == "ten" else 1.0
                of_family[answer] = of_family.get(answer, 0.0) + gain
        return 100.0 * sum(max(family.values()) for family in worth.values()) / len(self.questions)


def build_task(name: str, split: str, count: int, seed: int = 0) -> Task:
    """A task with `count` scored units: questions, or for MMBench sets of four rotations, for MME pairs.

    The same arguments give the same task on every machine. `mmbench_cn` is `mmbench` translated.

    Args:
        name: One of TASKS.
        split: "train", "validation" or "test".
        seed: Another seed gives other scenes and questions.
    """
    if name not in _SPECS:
        raise ValueError(f"There is no task {name!r}: choose one of {', '.join(TASKS)}.")
    if split not in SPLITS:
        raise ValueError(f"There is no split {split!r}: choose one of {', '.join(SPLITS)}.")
    if count < 1:
        raise ValueError(f"A task cannot have {count} questions: ask for at least 1.")
    spec = _SPECS[name]
    stream = TASKS.index("mmbench" if name == "mmbench_cn" else name)
    shares = _apportion(count, [family.weight for family in spec.families])
    drawn: list[tuple[float, int, Scene, Draft | Pair, Rng]] = []
    for number, (family, share) in enumerate(zip(spec.families, shares, strict=True)):
        made = _draw_family(family, split, share, seed, stream=16 * stream + number)
        # Families take turns in proportion to their share, so that any stretch of the task is a fair sample.
        drawn += [((place + 0.5) / share, number, *one) for place, one in enumerate(made)]
    drawn.sort(key=lambda one: one[:2])

    questions: list[Question] = []
    turn: Counter[int] = Counter()  # letters take turns within a family, so that each is right equally often
    for group, (_, number, scene, draft, rng) in enumerate(drawn):
        family = spec.families[number]
        for prompt, answer, choices in _pose(spec, draft, rng, turn[number]):
            questions.append(
                Question(
                    id=f"{name}-{split}-{seed}-{len(questions)}",
                    scene=scene,
                    prompt=prompt,
                    answer=answer,
                    answers=annotate(answer, rng) if spec.form == "ten" else [answer],
                    family=family.name,
                    group=group,
                    choices=choices,
                    boxes=language.boxes(scene),
                )
            )
        turn[number] += 1
    return Task(name, split, questions)


def _apportion(count: int, weights: Sequence[int]) -> list[int]:
    """Whole shares of `count` in proportion to the weights, by largest remainder."""
    total = sum(weights)
    shares = [count * weight // total for weight in weights]
    remainders = sorted(range(len(weights)), key=lambda i: (-(count * weights[i] % total), i))
    for i in remainders[: count - sum(shares)]:
        shares[i] += 1
    return shares


def _draw_family(
    family: Family, split: str, share: int, seed: int, stream: int
) -> Iterator[tuple[Scene, Draft | Pair, Rng]]:
    """`share` questions, one a scene, no answer more often than the balance of the family allows."""
    most = -(-share // family.answers) if family.answers else share
    used: Counter[str] = Counter()
    for step in count_from():
        if used.total() == share:
            return
        assert step < 1000 * (share + 100), f"the answers of {family.name} cannot be balanced"
        index = (stream << 32) + step
        quality = family.qualities[step % len(family.qualities)]
        scene = make_scene(split, index, kind=family.kind, quality=quality, seed=seed)
        rng = Rng(seed, "task", split, index)
        for _ in range(_TRIES):
            draft = family.draw(scene, rng)
            if draft is not None and used[draft.key] < most:
                used[draft.key] += 1
                yield scene, draft, rng
                break


def _pose(spec: _Spec, draft: Draft | Pair, rng: Rng, turn: int) -> Iterator[tuple[str, str, tuple[str, ...] | None]]:
    """The prompts of one scored unit: (prompt, right answer, options)."""
    if isinstance(draft, Pair):
        yield from (((draft.yes, "yes", None), (draft.no, "no", None))[:: 1 if rng.below(2) else -1])
    elif not draft.wrong:
        yield draft.text, draft.answer, None
    else:
        total = len(draft.wrong) + 1
        for rotation in range(total if spec.form == "circular" else 1):
            prompt, answer, options = _with_options(draft, (turn + rotation) % total, spec.words)
            yield prompt, answer, options


def _with_options(draft: Draft, place: int, words: Words) -> tuple[str, str, tuple[str, ...]]:
    """A multiple-choice prompt with the right option at a place, its letter, and the options.

    The wrong options go round with the right one, so that consecutive places are rotations of one order.
    """
    total = len(draft.wrong) + 1
    ring = (draft.answer, *draft.wrong)
    options = tuple(ring[(i - place) % total] for i in range(total))
    return language.with_options(draft.text, options, words), LETTERS[place], options


# Simulated annotators ------------------------------------------------------------------------------------------------

_SYNONYMS = {
    "small": "little",
    "large": "big",
    "plain": "solid",
    "dotted": "spotted",
    "striped": "stripes",
    "purple": "violet",
    "ring": "donut",
    "moon": "crescent",
    "house": "home",
    "circle": "round",
    "center": "middle",
    UNANSWERABLE: "unsuitable image",
}
_NUMBER_WORDS = ("zero", "one", "two", "three", "four")
_SLIPS = {
    value: values
    for values in (
        *(ENGLISH.values(attribute) for attribute in language.ATTRIBUTES),
        ("yes", "no"),
        ("0", "1", "2", "3", "4"),
    )
    for value in values
}


def annotate(answer: str, rng: Rng) -> list[str]:
    """Ten annotators' answers: mostly the right one, some written otherwise, some synonyms, some slips.

    On one question in twelve the annotators disagree, as they do in the real data, and even the right answer may not
    get full marks.
    """
    careful = 4 if rng.below(12) == 0 else 9  # in ten
    return [_say(answer, rng) if rng.below(10) < careful else _err(answer, rng) for _ in range(ANNOTATORS)]


def _say(answer: str, rng: Rng) -> str:
    """The right answer, now and then in another spelling that the metric's normalisation takes back."""
    if rng.below(8):
        return answer
    if answer in ("0", "1", "2", "3", "4"):
        return _NUMBER_WORDS[int(answer)]
    return f"{answer.capitalize()}."


def _err(answer: str, rng: Rng) -> str:
    if answer in _SYNONYMS and rng.below(2):
        return _SYNONYMS[answer]
    if answer in _SLIPS:
        return rng.choice([value for value in _SLIPS[answer] if value != answer])
    return (
        answer[:-1] if answer.isupper() else language.other_texts(answer, rng, 1)[0] if answer.isdigit() else "unsure"
    )


# Training ------------------------------------------------------------------------------------------------------------


def training_turns(
    scene: Scene, rng: Rng, count: int, weights: Mapping[str, int] | None = None
) -> list[tuple[str, str]]:
    """(prompt, answer) pairs about a scene: captions and questions of all ten tasks, in the same words.

    A scene gets what fits it: signs are read where there is one, diagrams are asked about in diagrams, and a ruined
    picture gets a caption that says so and questions that are unanswerable. No prompt comes twice and there is one
    caption at most, unless the weights leave nothing else to say.

    Args:
        rng: Its own stream for each scene, for example `Rng(seed, "turns", scene.index)`.
        weights: How often each of "caption" and TASKS is drawn, where the scene allows it; unnamed ones never.
    """
    return [(prompt, answer) for _, prompt, answer in training_turns_by_kind(scene, rng, count, weights)]


def training_turns_by_kind(
    scene: Scene, rng: Rng, count: int, weights: Mapping[str, int] | None = None, *, exercises: bool = False
) -> list[tuple[str, str, str]]:
    """The same turns as (kind, prompt, answer); the kind is "caption" or the task's name.

    With `exercises`, some of what multiple choice asks is asked openly too.
    """
    chosen = DEFAULT_WEIGHTS if weights is None else weights
    bounds, entries = _mix(tuple(chosen.items()), scene.kind, scene.quality == "ruined", exercises)
    turns: list[tuple[str, str, str]] = []
    said: set[str] = set()  # prompts, and "caption" once there is one
    for _ in range(count):
        turn = None
        for _ in range(_TURN_TRIES):
            kind, draw, words = entries[bisect_right(bounds, rng.below(bounds[-1]))]
            if draw is None:
                if kind in said:
                    continue
                turn = _caption_turn(scene, rng)
                break
            made = _question_turn(scene, rng, kind, draw, words)
            turn = turn if made is None else made  # said before is better than nothing to say
            if made is not None and made[1] not in said:
                break
        if turn is None:
            turn = _caption_turn(scene, rng)
        turns.append(turn)
        said.update((turn[1], "caption") if turn[0] == "caption" else turn[1:2])
    return turns


def _caption_turn(scene: Scene, rng: Rng) -> tuple[str, str, str]:
    return "caption", rng.choice(language.CAPTION_PROMPTS), language.caption(scene, rng)


def _question_turn(scene: Scene, rng: Rng, kind: str, draw: Draw, words: Words) -> tuple[str, str, str] | None:
    draft = draw(scene, rng)
    if draft is None:
        return None
    if isinstance(draft, Pair):
        return (kind, draft.yes, "yes") if rng.below(2) else (kind, draft.no, "no")
    if draft.wrong:
        prompt, answer, _ = _with_options(draft, rng.below(len(draft.wrong) + 1), words)
        return kind, prompt, answer
    return kind, draft.text, draft.answer


@lru_cache(maxsize=64)
def _mix(
    weights: tuple[tuple[str, int], ...], kind: str, ruined: bool, exercises: bool
) -> tuple[list[int], list[tuple[str, Draw | None, Words]]]:
    """Cumulative weights and what they stand for (no draw is a caption), among what fits such a scene."""
    bounds: list[int] = []
    entries: list[tuple[str, Draw | None, Words]] = []
    bound = 0
    for name, weight in weights:
        if name != "caption" and name not in _SPECS:
            raise ValueError(f"There is no task {name!r} to weigh: choose among caption, {', '.join(TASKS)}.")
        if name == "caption":
            fitting: list[tuple[int, Draw | None]] = [(1, None)]
        else:
            fitting = [
                (family.weight, family.draw)
                for family in (*_SPECS[name].families, *(_EXERCISES.get(name, ()) if exercises else ()))
                if family.kind in (None, kind) and (family.qualities == ("ruined",)) == ruined
            ]
        total = sum(share for share, _ in fitting)
        for share, draw in fitting:
            bound += (weight * share << 20) // total
            bounds.append(bound)
            entries.append((name, draw, ENGLISH if draw is None else _SPECS[name].words))
    if not bound:  # nothing that was asked for fits: a caption always does
        return [1], [("caption", None, ENGLISH)]
    return bounds, entries
