"""A part of the questions to each of several processes, and what they answered put together again."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from diffprune.evaluate.answers import Answers, Sheet
from diffprune.evaluate.encoded import all_asked, picture_groups
from diffprune.evaluate.scoring import score_answers, tasks_of
from diffprune.evaluate.sources import Questions

SHARD = "shard"  # in `Sheet.made_by`


def parse_shard(text: str) -> tuple[int, int]:
    """(which, of how many) from "0/4"."""
    which, slash, many = text.partition("/")
    if not (slash and which.isdecimal() and many.isdecimal() and int(which) < int(many)):
        raise ValueError(f"--shard {text!r} is no part; give WHICH/OF, from 0/4 to 3/4 for four parts")
    return int(which), int(many)


def shard_places(questions: Questions, which: int, many: int) -> list[int]:
    """Places of a shard's questions among all; those about one picture stay together."""
    groups = picture_groups(all_asked(questions))
    own = groups[len(groups) * which // many : len(groups) * (which + 1) // many]
    if not own:
        raise ValueError(f"--shard {which}/{many} is empty: the questions are about {len(groups)} pictures; take fewer")
    return sorted(place for group in own for place in group)


def part_of(questions: Questions, places: Sequence[int]) -> Questions:
    """Some of the questions, by place among all."""
    wanted, start, tasks = set(places), 0, []
    for task in questions.tasks:
        own = [one for place, one in enumerate(task.questions, start) if place in wanted]
        start += len(task.questions)
        if own:
            tasks.append(replace(task, questions=own))
    return replace(questions, tasks=tuple(tasks))


def whole_sheets(sheets: Sequence[Sheet], names: Sequence[str]) -> tuple[list[Sheet], list[list[int]]]:
    """The sheets with shards of one run put together, and for each the places of its parts among the given."""
    runs: dict[str, list[int]] = {}
    for place, sheet in enumerate(sheets):
        others = {key: value for key, value in sheet.made_by.items() if key != SHARD}
        runs.setdefault(str(sorted(others.items())) if sheet.places else f"whole {place}", []).append(place)
    whole = [
        _joined([sheets[place] for place in places], [names[place] for place in places])
        if sheets[places[0]].places
        else sheets[places[0]]
        for places in runs.values()
    ]
    return whole, list(runs.values())


def _joined(parts: Sequence[Sheet], names: Sequence[str]) -> Sheet:
    """The sheet that one run over all questions would have written."""
    found: dict[int, str] = {}
    many = parse_shard(parts[0].made_by[SHARD])[1]
    for part, name in zip(parts, names, strict=True):
        which, of = parse_shard(part.made_by[SHARD])
        if which in found or of != many:
            raise ValueError(f"{name} is shard {which}/{of}, which does not go with {names[0]}; join each part once")
        found[which] = name
    missing = [which for which in range(many) if which not in found]
    if missing:
        raise ValueError(f"shard {missing[0]}/{many} of {names[0]} is missing; answer it, and join all {many}")
    order = sorted((place, number, row) for number, part in enumerate(parts) for row, place in enumerate(part.places))

    def merged(columns: Sequence[Sequence[Any]]) -> list[Any]:
        return [columns[number][row] for _, number, row in order]

    first = parts[0]
    sheet = replace(
        first,
        questions=merged([part.questions for part in parts]),
        metrics={name: metric for part in parts for name, metric in part.metrics.items()},
        made_by={key: value for key, value in first.made_by.items() if key != SHARD},
        places=[],
    )
    tasks = tasks_of(sheet)
    answers: list[Answers] = []
    for number, one in enumerate(first.answers):
        of_run = [part.answers[number] for part in parts]
        keys = dict.fromkeys(key for run in of_run for key in run.values)
        values = {key: merged([run.values.get(key) or [None] * len(run.said) for run in of_run]) for key in keys}
        answers.append(score_answers(tasks, one.entry, merged([run.said for run in of_run]), values=values))
    return replace(
        sheet,
        chance={task.name: task.chance for task in tasks},
        metrics={task.name: sheet.metrics[task.name] for task in tasks},
        answers=answers,
    )
