"""Rows of a results file from scored answers: one per method, budget, seed and task, and summaries of them."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from diffprune.evaluate.answers import Answers, Entry, Keep, mean_keys
from diffprune.evaluate.bootstrap import resample_questions
from diffprune.evaluate.leads import Cell, Resampled, add_intervals, enough_resamples, leads_of
from diffprune.evaluate.retention import retention

Place = tuple[str, Keep, int]  # method, budget and seed of a run
Origins = Mapping[Place, Mapping[str, str]]  # where a run comes from, in keys of `ORIGIN_KEYS`
ORIGIN_KEYS = ("recipe", "choice", "tuned", "commit", "command")


def quality_rows(
    answers: Sequence[Answers],
    full: Answers,
    *,
    versus: str | None = None,
    also: Sequence[str] = (),
    chance: Mapping[str, float] | None = None,
    notes: Mapping[str, str] | None = None,
    origins: Origins | None = None,
    repeats: Mapping[str, Sequence[str]] | None = None,
) -> list[dict[str, Any]]:
    """A row per method, budget, seed and task, then a summary row per method and budget.

    A task on which the full model has nothing right has no retention: it is not in the summary.

    Args:
        versus: A method; summary rows of the others at a budget that it has too get its `lead` over them in points of
            retention, the interval of that, `lead_ci95`, `lead_p` (corrected by Holm's rule for all leads of the
            table) and `lead_holds`; `versus` then names it. Rows of what is throttled have a `gap` to the same scorers
            with tokens dropped, and `gap_ci95`.
        also: Tasks over which everything is summed up once more; then `tasks` distinguishes the summary rows.
        chance: By task the score of guessing, to be written into the rows of the tasks that have one.
        notes: By task what the reader of its rows must know, to be written into them.
        origins: By run what its rows say of where it comes from: recipe, choice, commit, command.
        repeats: By method the labels of further runs of its trainings with the same seeds. They have no rows of their
            own; the method's summary rows say how far such runs lie apart (`repeat_std`, `repeat_of`).
    """
    origins, again = origins or {}, repeats or {}
    labels = {label for names in again.values() for label in names}
    listed = [one for one in answers if one.entry.method not in labels]
    places = [place_of(one.entry) for one in listed]
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
            **one.keys_of(task),
            **origins.get(place_of(one.entry), {}),
        }
        for one in listed
        for task in one.score
    ]
    measured = [task for task, score in full.score.items() if score > 0]
    sets = [(measured, "all" if also else None)]
    if also:
        some = [task for task in measured if task in also]
        sets.append((some, ", ".join(some)))
    for tasks, name in sets:
        found = summary_rows(listed, full, tasks, versus=versus, tasks=name)
        apart = repeat_scatter(answers, full, tasks, again)
        for row in found:
            same = [place for place in places if place[:2] == (row["method"], row["keep"])]
            row |= apart.get((row["method"], row["keep"]), {}) | joined_origin(same, origins)
        rows += found
    return rows


def place_of(entry: Entry) -> Place:
    return entry.method, entry.keep, entry.seed


def summary_rows(
    answers: Sequence[Answers], full: Answers, measured: Sequence[str], *, versus: str | None, tasks: str | None
) -> list[dict[str, Any]]:
    """A row per method and budget over the tasks measured; `tasks` is their name in the rows."""
    if not measured:
        return []
    groups: dict[Cell, list[int]] = {}
    for place, one in enumerate(answers):
        groups.setdefault((one.entry.method, one.entry.keep), []).append(place)
    units = [{task: one.units[task] for task in measured} for one in answers]
    count = enough_resamples(len(leads_of(groups, versus)))
    drawn = resample_questions(units, {task: full.units[task] for task in measured}, resamples=count)
    resampled = Resampled()
    for key, places in groups.items():
        resampled.add(key, [answers[place].entry.seed for place in places], drawn[:, places])
    rows = []
    for (method, keep), places in groups.items():
        same = [answers[place] for place in places]
        equal = [a == b for one in same for a, b in zip(one.said, full.said, strict=True)]
        row = {
            "method": method,
            "keep": keep,
            **over_runs(_retentions(same, full, measured)),
            "unchanged": statistics.fmean(equal),
            **mean_keys(same),
        }
        rows.append(row if tasks is None else row | {"tasks": tasks})
    add_intervals(rows, resampled, versus)
    return rows


def over_runs(retained: Sequence[float]) -> dict[str, Any]:
    """What a summary row says of the retentions of one method's runs."""
    several = len(retained) > 1
    return {
        "retention": statistics.fmean(retained),
        **({"retention_std": statistics.stdev(retained)} if several else {}),
        "ci_over": "seeds and questions" if several else "questions",
        "n_seeds": len(retained),
    }


def _retentions(same: Sequence[Answers], full: Answers, measured: Sequence[str]) -> list[float]:
    """The retention of each run."""
    reference = {task: full.score[task] for task in measured}
    return [retention({task: one.score[task] for task in measured}, reference) for one in same]


def repeat_scatter(
    answers: Sequence[Answers], full: Answers, measured: Sequence[str], repeats: Mapping[str, Sequence[str]]
) -> dict[tuple[str, Keep], dict[str, Any]]:
    """By method and budget how far runs with one seed lie apart, where there are such runs.

    Deviations within a seed, pooled over the seeds that were run more than once.
    """
    found: dict[tuple[str, Keep], dict[str, Any]] = {}
    if not measured:
        return found
    for method, labels in repeats.items():
        if missing := [label for label in labels if all(one.entry.method != label for one in answers)]:
            raise ValueError(f"there are no answers of {missing[0]!r}, which is named as a repetition of {method!r}")
        runs = [one for one in answers if one.entry.method in (method, *labels)]
        for keep in dict.fromkeys(one.entry.keep for one in runs):
            by_seed: dict[int, list[Answers]] = {}
            for one in runs:
                if one.entry.keep == keep:
                    by_seed.setdefault(one.entry.seed, []).append(one)
            several = {seed: same for seed, same in by_seed.items() if len(same) > 1}
            if several:
                squares = sum(
                    statistics.variance(_retentions(same, full, measured)) * (len(same) - 1)
                    for same in several.values()
                )
                freedom = sum(len(same) - 1 for same in several.values())
                of = ", ".join(f"{len(same)} runs of seed {seed}" for seed, same in several.items())
                found[method, keep] = {"repeat_std": (squares / freedom) ** 0.5, "repeat_of": of}
    return found


def joined_origin(places: Sequence[Place], origins: Origins) -> dict[str, str]:
    """What the runs of a summary row say of where they come from; where they differ, each once."""
    joined: dict[str, str] = {}
    for key in ORIGIN_KEYS:
        separator = " && " if key == "command" else ", "
        values = dict.fromkeys(origins[place][key] for place in places if key in origins.get(place, {}))
        if values:
            joined[key] = separator.join(values)
    return joined
