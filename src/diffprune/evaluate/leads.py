"""By how much one method is ahead of another, how sure that is, and which leads a table may claim.

Two labels may stand for the same trainings: with tokens throttled and dropped, by one choice and by another. How far
seeds lie apart is then no part of their difference, which is taken seed by seed. Elsewhere every method's seeds are
drawn for themselves.
"""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from diffprune.evaluate.answers import OTHERWISE, THROTTLED, Keep
from diffprune.evaluate.bootstrap import LEVEL, RESAMPLES, holm, interval, resample_seeds, two_sided_p
from diffprune.registry import METHODS

Cell = tuple[str, Keep]  # method and budget of a summary row
NO_RIVALS = ("full", "oracle", "blind")  # they are no choice of tokens that could be deployed


class Resampled:
    """Retentions in every resample of the questions, run by run, and what other seeds might have made of them."""

    def __init__(self) -> None:
        self.runs: dict[Cell, tuple[list[int], Float[np.ndarray, "resamples runs"]]] = {}
        self.over_seeds: dict[Cell, Float[np.ndarray, " resamples"]] = {}  # what is left by each method and budget

    def add(self, cell: Cell, seeds: Sequence[int], retentions: Float[np.ndarray, "resamples runs"]) -> None:
        """The runs of one method and budget, the smallest seed first."""
        order = np.argsort(seeds, kind="stable")
        self.runs[cell] = [seeds[place] for place in order], retentions[:, order]
        self.over_seeds[cell] = resample_seeds(self.runs[cell][1], of=f"{cell[0]} at {cell[1]}")

    def ahead(self, one: Cell, other: Cell) -> Float[np.ndarray, " resamples"]:
        """By how much the first is ahead of the second."""
        (seeds, first), (others, second) = self.runs[one], self.runs[other]
        if trainings_of(one[0]) != trainings_of(other[0]) or seeds != others:
            return self.over_seeds[one] - self.over_seeds[other]
        return resample_seeds(first - second, of=f"{one[0]} over {other[0]} at {one[1]}")


def trainings_of(label: str) -> str:
    """Whose weights a label stands for: throttled, by another choice or measured another way they are the same.

    Of two such labels a seed names one training.
    """
    label = label.removesuffix(OTHERWISE).removesuffix(THROTTLED)
    name = label.partition("[")[0]
    return (METHODS.get(name).deploys if name in METHODS.names() else "") or label


def leads_of(cells: Collection[Cell], versus: str | None) -> list[Cell]:
    """Of the methods and budgets those that `versus` is compared with: it has the same budget."""
    theirs = {(type(keep), keep) for method, keep in cells if method == versus}  # 1 is one token, 1.0 all of them
    return [(method, keep) for method, keep in cells if method != versus and (type(keep), keep) in theirs]


def enough_resamples(num_leads: int) -> int:
    """Of the smallest p that resamples can give, as many as there are leads must stay below the level."""
    return max(RESAMPLES, round(5 / LEVEL) * num_leads)


def add_intervals(rows: Sequence[dict[str, Any]], resampled: Resampled, versus: str | None) -> None:
    """Give every summary row its interval, its lead and gap where it has one, and the two best their mark."""
    by_cell = {(row["method"], row["keep"]): row for row in rows}
    for (method, keep), row in by_cell.items():
        row["ci95"] = interval(resampled.over_seeds[method, keep])
        hard = method.removesuffix(THROTTLED), keep
        if method.endswith(THROTTLED) and hard in by_cell:
            row["gap"] = row["retention"] - by_cell[hard]["retention"]
            row["gap_ci95"] = interval(resampled.ahead((method, keep), hard))
    leads = {cell: resampled.ahead((versus or "", cell[1]), cell) for cell in leads_of(by_cell, versus)}
    corrected = holm([two_sided_p(values) for values in leads.values()])
    for (cell, values), p in zip(leads.items(), corrected, strict=True):
        low, high = interval(values)
        row = by_cell[cell]
        row |= {
            "versus": versus,
            "lead": by_cell[versus or "", cell[1]]["retention"] - row["retention"],
            "lead_ci95": [low, high],
            "lead_p": p,
            "lead_holds": p < LEVEL and not low <= 0 <= high,
        }
    for keep in dict.fromkeys(keep for _, keep in by_cell):
        _rank([row for row in rows if row["keep"] == keep], resampled, versus)


def _rank(rows: Sequence[dict[str, Any]], resampled: Resampled, versus: str | None) -> None:
    """Mark the best method of a budget, and the second, where the interval of its lead over all below leaves 0 out.

    To be ahead of all is to pass every one of these tests, so their number asks for no correction; but what the leads
    of `versus` do not claim is not claimed by a mark.
    """
    rivals = [row for row in rows if row["method"] not in NO_RIVALS and not row["method"].endswith(THROTTLED)]
    rivals.sort(key=lambda row: -row["retention"])
    for place, row in enumerate(rivals[:2]):
        own = row["method"], row["keep"]
        below = rivals[place + 1 :]
        claimed = below if row["method"] == versus else [row] if versus in {other["method"] for other in below} else []
        if not below or not all(one.get("lead_holds", True) for one in claimed):
            return
        if any(interval(resampled.ahead(own, (other["method"], other["keep"])))[0] <= 0 for other in below):
            return
        row["rank"] = place + 1
