"""Rows of a results file from scored answers: one per method, budget, seed and task, and summaries of them."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from diffprune.evaluate.answers import Answers, Keep, mean_keys
from diffprune.evaluate.retention import Units, lead, lead_ci95, retention, retention_ci95


def quality_rows(
    answers: Sequence[Answers],
    full: Answers,
    *,
    versus: str | None = None,
    also: Sequence[str] = (),
    chance: Mapping[str, float] | None = None,
    notes: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """A row per method, budget, seed and task, then a summary row per method and budget.

    A task on which the full model has nothing right has no retention: it is not in the summary.

    Args:
        versus: A method; summary rows of the others at a budget that it has too get its `lead` over them in points of
            retention and the interval of that, `lead_ci95`; `versus` then names it.
        also: Tasks over which everything is summed up once more; then `tasks` distinguishes the summary rows.
        chance: By task the score of guessing, to be written into the rows of the tasks that have one.
        notes: By task what the reader of its rows must know, to be written into them.
    """
    rows: list[dict[str, Any]] = [
        {
            "method": one.entry.method,
            "keep": one.entry.keep,
            "seed": one.entry.seed,
            "task": task,
            "score": one.score[task],
            "score_raw": one.raw[task],
            "full_score": full.score[task],
            **({"chance": chance[task]} if chance and task in chance else {}),
            **({"notes": notes[task]} if notes and task in notes else {}),
            **one.more_keys,
        }
        for one in answers
        for task in one.score
    ]
    measured = [task for task, score in full.score.items() if score > 0]
    rows += summary_rows(answers, full, measured, versus=versus, tasks="all" if also else None)
    if also:
        some = [task for task in measured if task in also]
        rows += summary_rows(answers, full, some, versus=versus, tasks=", ".join(some))
    return rows


def summary_rows(
    answers: Sequence[Answers], full: Answers, measured: Sequence[str], *, versus: str | None, tasks: str | None
) -> list[dict[str, Any]]:
    """A row per method and budget over the tasks measured; `tasks` is their name in the rows."""
    if not measured:
        return []
    groups: dict[tuple[str, Keep], list[Answers]] = {}
    for one in answers:
        groups.setdefault((one.entry.method, one.entry.keep), []).append(one)
    reference = {task: full.score[task] for task in measured}
    full_units = {task: full.units[task] for task in measured}
    units = {place: mean_units(same, measured) for place, same in groups.items()}
    rows = []
    for (method, keep), same in groups.items():
        retained = [retention({task: one.score[task] for task in measured}, reference) for one in same]
        equal = [a == b for one in same for a, b in zip(one.said, full.said, strict=True)]
        own, ours = units[method, keep], units.get((versus or "", keep))
        row = {
            "method": method,
            "keep": keep,
            "retention": statistics.fmean(retained),
            "retention_std": statistics.stdev(retained) if len(retained) > 1 else 0.0,
            "ci95": list(retention_ci95(own, full_units)),
            "n_seeds": len(same),
            "unchanged": statistics.fmean(equal),
            **mean_keys(same),
        }
        if ours is not None and method != versus:
            row |= {
                "versus": versus,
                "lead": lead(ours, own, full_units),
                "lead_ci95": list(lead_ci95(ours, own, full_units)),
            }
        rows.append(row if tasks is None else row | {"tasks": tasks})
    return rows


def mean_units(same: Sequence[Answers], tasks: Sequence[str]) -> Units:
    """Values of the scored questions by task, each averaged over the runs."""
    return {
        task: [statistics.fmean(values) for values in zip(*(one.units[task] for one in same), strict=True)]
        for task in tasks
    }
