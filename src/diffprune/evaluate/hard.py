"""Everything summed up once more over hard questions: the full model has them right, a smaller picture wrong."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from diffprune.evaluate.answers import Answers
from diffprune.evaluate.bootstrap import resample_questions
from diffprune.evaluate.downscale import DOWNSCALE
from diffprune.evaluate.leads import Resampled, add_intervals, enough_resamples, leads_of
from diffprune.evaluate.rows import Origins, joined_origin, over_runs, place_of

HARD = "hard"  # as `tasks` of a summary row
FEWEST = 50  # questions of which a percentage is told


def hard_rows(
    answers: Sequence[Answers], *, versus: str | None = None, origins: Origins | None = None
) -> tuple[list[dict[str, Any]], list[str]]:
    """A summary row per method and budget over its hard questions, and a sentence for each budget with too few.

    The full model has all of them right, so the retention is the share that a method has right. `downscale`, which has
    none by construction, is left out. Intervals and leads are those of other summary rows (`add_intervals`).

    Args:
        answers: The first are the full model's; `downscale` is among the others.
        versus: A method; rows of the others get its `lead` over them.
        origins: By run what its rows say of where it comes from, as `quality_rows` takes it.
    """
    full, budgets = answers[0], {one.entry.keep: one for one in answers if one.entry.method == DOWNSCALE}
    if not budgets:
        raise ValueError(
            f"hard questions are those that {DOWNSCALE} has wrong, and it is not among the methods; add it"
        )
    hard = {keep: _hard(full, smaller) for keep, smaller in budgets.items()}
    counts = {keep: sum(map(sum, masks.values())) for keep, masks in hard.items()}
    few = [
        f"{count} questions are hard at keep={keep}, too few for a percentage (below {FEWEST})"
        for keep, count in counts.items()
        if count < FEWEST
    ]
    runs = [one for one in answers[1:] if one.entry.method != DOWNSCALE and counts.get(one.entry.keep, 0) >= FEWEST]
    resamples = enough_resamples(len(leads_of({(one.entry.method, one.entry.keep) for one in runs}, versus)))
    rows: list[dict[str, Any]] = []
    resampled = Resampled()
    for keep in dict.fromkeys(one.entry.keep for one in runs):
        same = [one for one in runs if one.entry.keep == keep]  # asked the same questions, so resampled together
        marks = [_marks(one, hard[keep]) for one in same]
        drawn = resample_questions([{HARD: one} for one in marks], {HARD: [100.0] * counts[keep]}, resamples=resamples)
        for method in dict.fromkeys(one.entry.method for one in same):
            of = [place for place, one in enumerate(same) if one.entry.method == method]
            resampled.add((method, keep), [same[place].entry.seed for place in of], drawn[:, of])
            row = {"method": method, "keep": keep, **over_runs([fmean(marks[place]) for place in of])}
            row |= {"num_hard": counts[keep], "tasks": HARD}
            rows.append(row | joined_origin([place_of(same[place].entry) for place in of], origins or {}))
    add_intervals(rows, resampled, versus)
    return rows, few


def _hard(full: Answers, smaller: Answers) -> dict[str, list[bool]]:
    """By task whether each scored question is hard."""
    return {
        task: [right and not other for right, other in zip(full.is_right(task), smaller.is_right(task), strict=True)]
        for task in full.units
    }


def _marks(one: Answers, hard: Mapping[str, Sequence[bool]]) -> list[float]:
    """Of each hard question 100 where a run has it right, else 0."""
    return [
        100.0 * right
        for task, masks in hard.items()
        for right, is_hard in zip(one.is_right(task), masks, strict=True)
        if is_hard
    ]
