"""Answers scored task by task, and the sheet that holds them beside their questions."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from diffprune.evaluate.answers import QUESTION_KEYS, Answers, Entry, Sheet
from diffprune.evaluate.sources import Questions
from diffprune.evaluate.task import METRICS, Question, Task

AVERAGE = "average"


def score_answers(
    tasks: Sequence[Task],
    entry: Entry,
    said: list[str],
    *,
    seconds: float = 0.0,
    values: Mapping[str, list[float | None]] | None = None,
) -> Answers:
    """Score the answers task by task.

    Args:
        values: What else was measured of each prompt (`Answers.values`).
    """
    start = 0
    score: dict[str, float] = {}
    raw: dict[str, float] = {}
    units: dict[str, list[float]] = {}
    right: dict[str, list[bool]] = {}
    for task in tasks:
        end = start + len(task.questions)
        result = task.score(said[start:end])
        score[task.name], raw[task.name], units[task.name] = result.score, result.raw, result.per_question
        if task.metric.right is not None:
            right[task.name] = task.right(said[start:end])
        start = end
    held = [value for value in (values or {}).get(AVERAGE, ()) if value is not None]
    return Answers(
        entry=entry,
        said=said,
        score=score,
        raw=raw,
        units=units,
        seconds=seconds,
        average=statistics.fmean(held) if held else None,
        values=dict(sorted((values or {}).items())),  # in one order, however they came
        right=right,
        asked=[task.name for task in tasks for _ in task.questions],
    )


def make_sheet(
    questions: Questions,
    answers: Sequence[Answers],
    *,
    made_by: Mapping[str, str] | None = None,
    places: Sequence[int] = (),
) -> Sheet:
    """The questions with what every measurement answered to them.

    Args:
        made_by: What the answers follow from.
        places: Of the questions among all, where these are a part of them.
    """
    return Sheet(
        [_listed(task, question) for task in questions.tasks for question in task.questions],
        {task.name: task.chance for task in questions.tasks},
        list(answers),
        notes={task.name: task.metric.note for task in questions.tasks if task.metric.note},
        metrics={task.name: task.metric_name for task in questions.tasks if task.metric_name},
        made_by=dict(made_by or {}),
        places=list(places),
    )


def _listed(task: Task, question: Question) -> dict[str, Any]:
    own: dict[str, Any] = {
        "answers": list(question.answers) if question.answers != (question.answer,) else None,
        "choices": list(question.choices) if question.choices else None,
        "subset": question.subset or None,
        "group": question.group if question.group != question.id else None,
    }
    assert tuple(own) == QUESTION_KEYS
    first: dict[str, Any] = {"id": question.id, "task": task.name, "prompt": question.prompt, "answer": question.answer}
    return first | {key: value for key, value in own.items() if value is not None}


def tasks_of(sheet: Sheet) -> tuple[Task, ...]:
    """The tasks of a sheet as far as they are needed to score again: without pictures."""
    questions: dict[str, list[Question]] = {}
    for one in sheet.questions:
        made = Question(
            id=one["id"],
            prompt=one["prompt"],
            answer=one["answer"],
            answers=tuple(one.get("answers", ())),
            choices=tuple(one["choices"]) if "choices" in one else None,
            subset=one.get("subset", ""),
            group=one.get("group"),
        )
        questions.setdefault(one["task"], []).append(made)
    for name in questions:
        if sheet.metrics.get(name) not in METRICS:
            raise ValueError(f"the metric of {name!r} is its source's own, so its answers cannot be scored again")
    return tuple(Task(name, made, METRICS[sheet.metrics[name]]) for name, made in questions.items())
