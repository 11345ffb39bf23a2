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
| textvqa | words and numbers on signs | open, ten answers | VQA accuracy, EvalAI's normalisation |
| seed | attributes, identity, place and number of instances | A-D | accuracy |
| vizwiz | attributes in bad pictures; what cannot be answered | open, ten answers | VQA accuracy |

`Task.chance` is what the best guess without the picture gets.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count as count_from

from diffprune.evaluate.task import METRICS, Question, Task
from diffprune.rng import Rng
from diffprune_lab.scenes import language
from diffprune_lab.scenes.annotators import annotate
from diffprune_lab.scenes.families import SPECS, Draft, Family, TaskSpec
from diffprune_lab.scenes.language import LETTERS, Pair, Words
from diffprune_lab.scenes.world import SPLITS, Scene, make_scene

TASKS = tuple(SPECS)  # kinds; a task is named after its kind, behind the prefix
PREFIX = "scenes/"  # a benchmark's bare name is for the benchmark
_TRIES = 6  # draws from one scene before the next is taken


@dataclass(frozen=True, slots=True, kw_only=True)
class SceneQuestion(Question):
    """One prompt about one scene; the subset is the family of the question."""

    @property
    def scene(self) -> Scene:
        return self.images[0]


@dataclass(frozen=True)
class SceneTask(Task):
    """Questions about scenes and how they are scored."""

    questions: list[SceneQuestion]


def build_task(name: str, split: str, count: int, seed: int = 0) -> SceneTask:
    """A task with `count` scored units: questions, or for MMBench sets of four rotations, for MME pairs.

    The same arguments give the same task on every machine. `mmbench_cn` is `mmbench` translated.

    Args:
        name: One of TASKS, with or without the prefix.
        split: "train", "validation" or "test".
        seed: Another seed gives other scenes and questions.
    """
    name = name.removeprefix(PREFIX)
    if name not in SPECS:
        raise ValueError(f"There is no task {name!r}: choose one of {', '.join(TASKS)}.")
    if split not in SPLITS:
        raise ValueError(f"There is no split {split!r}: choose one of {', '.join(SPLITS)}.")
    if count < 1:
        raise ValueError(f"A task cannot have {count} questions: ask for at least 1.")
    spec = SPECS[name]
    stream = TASKS.index("mmbench" if name == "mmbench_cn" else name)
    shares = _apportion(count, [family.weight for family in spec.families])
    drawn: list[tuple[float, int, Scene, Draft | Pair, Rng]] = []
    for number, (family, share) in enumerate(zip(spec.families, shares, strict=True)):
        made = _draw_family(family, split, share, seed, stream=16 * stream + number)
        # Families take turns in proportion to their share, so that any stretch of the task is a fair sample.
        drawn += [((place + 0.5) / share, number, *one) for place, one in enumerate(made)]
    drawn.sort(key=lambda one: one[:2])

    questions: list[SceneQuestion] = []
    turn: Counter[int] = Counter()  # letters take turns within a family, so that each is right equally often
    for group, (_, number, scene, draft, rng) in enumerate(drawn):
        family = spec.families[number]
        for prompt, answer, choices in _pose(spec, draft, rng, turn[number]):
            questions.append(
                SceneQuestion(
                    id=f"{name}-{split}-{seed}-{len(questions)}",
                    images=(scene,),
                    prompt=prompt,
                    answer=answer,
                    answers=tuple(annotate(answer, rng)) if spec.metric.startswith("vqa") else (answer,),
                    subset=family.name,
                    group=group,
                    choices=choices,
                )
            )
        turn[number] += 1
    return SceneTask(PREFIX + name, questions, METRICS[spec.metric])


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


def _pose(
    spec: TaskSpec, draft: Draft | Pair, rng: Rng, turn: int
) -> Iterator[tuple[str, str, tuple[str, ...] | None]]:
    """The prompts of one scored unit: (prompt, right answer, options)."""
    if isinstance(draft, Pair):
        yield from (((draft.yes, "yes", None), (draft.no, "no", None))[:: 1 if rng.below(2) else -1])
    elif not draft.wrong:
        yield draft.text, draft.answer, None
    else:
        total = len(draft.wrong) + 1
        for rotation in range(total if spec.metric == "circular" else 1):
            prompt, answer, options = with_options(draft, (turn + rotation) % total, spec.words)
            yield prompt, answer, options


def with_options(draft: Draft, place: int, words: Words) -> tuple[str, str, tuple[str, ...]]:
    """A multiple-choice prompt with the right option at a place, its letter, and the options.

    The wrong options go round with the right one, so that consecutive places are rotations of one order.
    """
    total = len(draft.wrong) + 1
    ring = (draft.answer, *draft.wrong)
    options = tuple(ring[(i - place) % total] for i in range(total))
    return language.with_options(draft.text, options, words), LETTERS[place], options
