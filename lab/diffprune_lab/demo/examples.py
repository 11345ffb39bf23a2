"""Pictures for the page: what each method keeps of them at each budget, and what the model then says."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from PIL import Image
from torch import Tensor

from diffprune.evaluate import metrics
from diffprune.evaluate.answers import Answers
from diffprune.evaluate.encoded import EncodedQuestions
from diffprune.evaluate.runner import Measurement, choose
from diffprune.evaluate.task import Question
from diffprune.model import PrunedVLM
from diffprune_lab.scenes import pack, render
from diffprune_lab.scenes.encode import to_images
from diffprune_lab.scenes.tasks import PREFIX

SHOWN_TASKS = tuple(
    PREFIX + kind for kind in ("textvqa", "gqa", "scienceqa", "vqav2", "mmbench", "vizwiz", "seed", "pope")
)
MOST_DIFFERING = 2
KeptBy = Mapping[str, Mapping[int, tuple[int, ...]]]
SaidBy = Mapping[str, Mapping[int, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One test question, its picture, and by method and budget the kept tokens and the answer.

    `differs` where it was chosen because methods do not agree on it.
    """

    task: str
    question: Question
    picture: Image.Image
    grid: tuple[int, int]
    full: str
    kept: KeptBy
    said: SaidBy
    differs: bool = False


def is_right(question: Question, said: str) -> bool:
    """Whether an answer is the right one, in the spelling its benchmark's metric forgives."""
    if question.choices is not None:
        return metrics.parse_letter(said) == question.answer
    return metrics.normalize(said) == metrics.normalize(question.answer)


def shown_questions(encoded: EncodedQuestions, full: Answers) -> Iterator[tuple[str, int, Question]]:
    """The first question of each task that the full model answers right from the picture, as (task, prompt, question).

    The prompt is its number. The rule looks at no pruned answer, so it favours no method. Questions that a picture
    answers with "no" are passed over: nothing would be seen. Where the full model has none right, the first is shown.
    """
    start = 0
    first: dict[str, tuple[str, int, Question]] = {}
    for task in encoded.tasks:
        numbered = list(enumerate(task.questions, start))
        start += len(numbered)
        seen = [
            pair
            for pair in numbered
            if pair[1].images[0].quality != "ruined" and pair[1].answer not in ("no", "unanswerable")
        ]
        right = [pair for pair in seen if is_right(pair[1], full.said[pair[0]])]
        first[task.name] = (task.name, *(right or seen or numbered)[0])
    yield from (first[name] for name in SHOWN_TASKS if name in first)


def differing_questions(
    encoded: EncodedQuestions, answers: Sequence[Answers], taken: Collection[int]
) -> Iterator[tuple[str, int, Question]]:
    """Questions that the full model has right and on which the methods split most evenly at the smallest budget.

    One of a task at most, and none of those taken; the rule does not ask which methods are right.
    """
    full, *pruned = (one for one in answers if one.entry.method != "oracle")
    smallest = min((one.entry.keep for one in pruned), default=0)
    split: list[tuple[int, str, int, Question]] = []
    number = -1
    for task in encoded.tasks:
        best: tuple[int, str, int, Question] | None = None
        for question in task.questions:
            number += 1
            if number in taken or not is_right(question, full.said[number]):
                continue
            right = [is_right(question, one.said[number]) for one in pruned if one.entry.keep == smallest]
            minority = min(sum(right), len(right) - sum(right))
            if minority and (best is None or minority > best[0]):
                best = (minority, task.name, number, question)
        split += [best] if best else []
    for _, task_name, place, question in sorted(split, key=lambda one: -one[0])[:MOST_DIFFERING]:
        yield task_name, place, question


def make_examples(vlm: PrunedVLM, encoded: EncodedQuestions, answers: Sequence[Answers]) -> list[Example]:
    """An example for each shown task, from answers that were given already; `answers[0]` is the full model's."""
    full, pruned = answers[0], answers[1:]
    shown = list(shown_questions(encoded, full))
    num_plain = len(shown)
    shown += differing_questions(encoded, answers, [number for _, number, _ in shown])
    rows = [encoded.rows[number][0] for _, number, _ in shown]
    tokens = encoded.tokens.take(rows)
    kept: list[dict[str, dict[int, tuple[int, ...]]]] = [{} for _ in shown]
    said: list[dict[str, dict[int, str]]] = [{} for _ in shown]
    for one in pruned:
        entry = one.entry
        assert isinstance(entry, Measurement)
        method = PrunedVLM(vlm.base, vlm.processor, method=entry.pruner, keep=entry.keep)
        chosen = choose(method, tokens, keep=entry.keep)
        assert chosen is not None and isinstance(entry.keep, int)
        for place, (_, number, _) in enumerate(shown):
            kept[place].setdefault(entry.method, {})[entry.keep] = tuple(chosen[place].tolist())
            said[place].setdefault(entry.method, {})[entry.keep] = one.said[number]
    pixels = render(pack([encoded.images[row] for row in rows]))
    assert isinstance(pixels, Tensor)
    return [
        Example(
            task=task,
            question=question,
            picture=picture,
            grid=tokens.grid[place],
            full=full.said[number],
            kept=kept[place],
            said=said[place],
            differs=place >= num_plain,
        )
        for place, ((task, number, question), picture) in enumerate(zip(shown, to_images(pixels), strict=True))
    ]


def ask_larger(vlm: PrunedVLM, examples: Sequence[Example], budgets: Sequence[int]) -> list[Example]:
    """What another model with its own pruner answers to the questions of the examples, at its own budgets."""
    pictures = [example.picture for example in examples]
    questions = [example.question.prompt for example in examples]
    full = PrunedVLM(vlm.base, vlm.processor).generate(pictures, questions, max_new_tokens=8, do_sample=False)
    kept: list[dict[int, tuple[int, ...]]] = [{} for _ in examples]
    said: list[dict[int, str]] = [{} for _ in examples]
    grids: list[tuple[int, int]] = []
    for budget in budgets:
        selection = vlm.select(pictures, keep=budget)
        grids = selection.grid
        answers = vlm.generate(pictures, questions, keep=budget, max_new_tokens=8, do_sample=False)
        for place, answer in enumerate(answers):
            kept[place][budget] = tuple(selection[place].keep.tolist())
            said[place][budget] = answer
    name = vlm.method.name
    return [
        Example(
            task=example.task,
            question=example.question,
            picture=example.picture,
            grid=grids[place],
            full=full[place],
            kept={name: kept[place]},
            said={name: said[place]},
        )
        for place, example in enumerate(examples)
    ]
