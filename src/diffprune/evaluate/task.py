"""A task: questions, how answers to them are scored, and what guessing gets.

Whatever asks (a package's own world, a file, a benchmark harness) gives tasks of this form, and one runner answers all.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from diffprune.evaluate import metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One prompt and its right answer.

    Attributes:
        images: The prompt's pictures, each a path, a picture, or whatever else its source encodes; none where the
            prompt is text alone. One that is asked about many times (equal, or the same object) is encoded once.
        answer: The right answer; a letter in multiple choice.
        answers: All accepted answers, such as ten annotators'; default: the right one.
        choices: The options in the order of their letters.
        subset: A part of the task that some metrics average over: MME's subtask, POPE's kind of negatives.
        group: What is scored as one: the rotations of a question, or a pair; default: the question by itself.
        turns: Questions and answers of the same conversation that come before; the pictures stand in the first.
    """

    id: str
    prompt: str
    answer: str
    images: tuple[Any, ...] = ()
    answers: tuple[str, ...] = ()
    choices: tuple[str, ...] | None = None
    subset: str = ""
    group: Hashable = None
    turns: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if not self.answers:
            object.__setattr__(self, "answers", (self.answer,))
        if self.group is None:
            object.__setattr__(self, "group", self.id)


# Metrics -------------------------------------------------------------------------------------------------------------


def _percent(questions: Sequence[Question]) -> float:
    return 100.0


@dataclass(frozen=True, slots=True)
class Metric:
    """A benchmark's metric over questions.

    Attributes:
        score: Of one output for each question, in percent of the maximum.
        chance: The expected score of guessing without the picture.
        maximum: The most points there are in the benchmark's own unit.
        note: What a row of the task must say about it; may be empty.
        right: Whether each scored unit counts as right; default: where it has half of its points.
    """

    score: Callable[[Sequence[str], Sequence[Question]], metrics.Scored]
    chance: Callable[[Sequence[Question]], float]
    maximum: Callable[[Sequence[Question]], float] = _percent
    note: str = ""
    right: Callable[[Sequence[str], Sequence[Question]], list[bool]] | None = None


def _answers(questions: Sequence[Question]) -> list[str]:
    return [question.answer for question in questions]


def _groups(questions: Sequence[Question]) -> list[Hashable]:
    return [question.group for question in questions]


def _subsets(questions: Sequence[Question]) -> list[str]:
    return [question.subset for question in questions]


def _exact(outputs: Sequence[str], questions: Sequence[Question]) -> metrics.Scored:
    found = [
        max(metrics.exact_match(output, answer) for answer in question.answers)
        for output, question in zip(outputs, questions, strict=True)
    ]
    return metrics.mean([100.0 * value for value in found])


def _options(questions: Sequence[Question]) -> list[int]:
    return [len(question.choices or "ABCD") for question in questions]


def _choice(outputs: Sequence[str], questions: Sequence[Question]) -> metrics.Scored:
    return metrics.choice_accuracy(outputs, _answers(questions), _options(questions))


def _circular(outputs: Sequence[str], questions: Sequence[Question]) -> metrics.Scored:
    return metrics.circular_accuracy(outputs, _answers(questions), _groups(questions), _options(questions))


def _pope(outputs: Sequence[str], questions: Sequence[Question]) -> metrics.Scored:
    return metrics.pope_f1(outputs, _answers(questions), _subsets(questions))


def _present(outputs: Sequence[str], questions: Sequence[Question]) -> list[bool]:
    return [metrics.parse_presence(o) == q.answer for o, q in zip(outputs, questions, strict=True)]


def _mme(outputs: Sequence[str], questions: Sequence[Question]) -> metrics.Scored:
    return metrics.mme_score(outputs, _answers(questions), _groups(questions), _subsets(questions))


def _both_right(outputs: Sequence[str], questions: Sequence[Question]) -> list[bool]:
    pairs: dict[tuple[str, Hashable], bool] = {}
    for output, question in zip(outputs, questions, strict=True):
        key = (question.subset, question.group)
        pairs[key] = pairs.get(key, True) and metrics.parse_yes_no(output) == question.answer
    return list(pairs.values())


def _mme_maximum(questions: Sequence[Question]) -> float:
    return float(metrics.MME_SUBTASK_MAXIMUM * len(set(_subsets(questions))))


def _one_option(questions: Sequence[Question]) -> float:
    """One of the options at random; in circular scoring kept through the rotations (a constant letter gets 0)."""
    return metrics.mean([100.0 / len(question.choices) for question in questions if question.choices]).score


def _always_yes(questions: Sequence[Question]) -> float:
    """Two thirds where yes and no are balanced."""
    return _pope(["yes"] * len(questions), questions).score


def _tosses(questions: Sequence[Question]) -> float:
    """A toss for each question: half of the single ones, a quarter of the pairs."""
    return 100.0 * (0.5 + 0.25) / 2


def _best_constant(
    questions: Sequence[Question], worth: Callable[[int, int], float], normalization: str = "vqa"
) -> float:
    """The best constant answer to each subset.

    Args:
        worth: Of an answer that so many of so many annotators gave.
    """
    normal = metrics.NORMALIZATIONS[normalization]
    gains: dict[str, dict[str, float]] = {}  # of each answer to each subset
    for question in questions:
        given = Counter(normal(answer) for answer in question.answers)
        of_subset = gains.setdefault(question.subset, {})
        for answer, times in given.items():
            of_subset[answer] = of_subset.get(answer, 0.0) + worth(times, len(question.answers))
    return 100.0 * sum(max(subset.values()) for subset in gains.values()) / len(questions)


def _agreement(normalization: str, whose: str) -> Metric:
    """Agreement with ten annotators by a normalisation, which rows name: it decides which answers are the same."""

    def score(outputs: Sequence[str], questions: Sequence[Question]) -> metrics.Scored:
        pairs = zip(outputs, questions, strict=True)
        return metrics.mean([100.0 * metrics.vqa_accuracy(o, q.answers, normalization) for o, q in pairs])

    def chance(questions: Sequence[Question]) -> float:
        return _best_constant(questions, metrics.agreement, normalization)

    return Metric(score, chance, note=f"answers normalised as {whose}")


METRICS = {
    "exact": Metric(_exact, lambda questions: _best_constant(questions, lambda times, total: 1.0)),
    "vqa": _agreement("vqa", "the VQA script does"),
    "vqa_evalai": _agreement("evalai", "EvalAI does"),
    "choice": Metric(_choice, _one_option),
    "circular": Metric(_circular, _one_option),
    "pope": Metric(_pope, _always_yes, right=_present),  # the units of an F1 are no points
    "mme": Metric(_mme, _tosses, _mme_maximum, right=_both_right),  # a pair weighs as much as its subtask has few
}


# Tasks ---------------------------------------------------------------------------------------------------------------


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
    """Questions and how they are scored.

    Attributes:
        metric: One of `METRICS`, or a source's own.
    """

    name: str
    questions: Sequence[Question]
    metric: Metric

    def score(self, outputs: Sequence[str]) -> TaskScore:
        """The score of one output for each question, in their order."""
        if len(outputs) != len(self.questions):
            raise ValueError(
                f"{len(outputs)} outputs cannot answer {len(self.questions)} questions: give one for each."
            )
        scored = self.metric.score(outputs, self.questions)
        score = min(100.0, scored.score)  # a source's own metric may end a rounding above
        return TaskScore(score, score * self.maximum / 100, scored.units)

    def right(self, outputs: Sequence[str]) -> list[bool]:
        """Whether each scored unit counts as right: for whoever asks about single questions."""
        if self.metric.right is not None:
            return self.metric.right(outputs, self.questions)
        return [unit >= 50.0 for unit in self.metric.score(outputs, self.questions).units]

    @property
    def metric_name(self) -> str:
        """The metric's name where it is one of `METRICS`, else empty."""
        return next((name for name, metric in METRICS.items() if metric is self.metric), "")

    @cached_property
    def maximum(self) -> float:
        """The most points there are in the benchmark's own unit: 200 for each of MME's subtasks, else 100."""
        return self.metric.maximum(self.questions)

    @cached_property
    def ceiling(self) -> float:
        """The score of always answering right; below 100 only where annotators disagree."""
        return self.score([question.answer for question in self.questions]).score

    @cached_property
    def chance(self) -> float:
        """The expected score (0 to 100) of guessing without the picture."""
        return self.metric.chance(self.questions)
