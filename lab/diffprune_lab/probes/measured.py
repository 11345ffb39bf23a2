"""What a results file says of one number: a method's summary, how far it is ahead of another, which rival is next."""

import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from diffprune.evaluate.answers import THROTTLED
from diffprune.evaluate.leads import NO_RIVALS
from diffprune.results import Results, read_results
from diffprune_lab.probes.figures import label
from diffprune_lab.probes.store import Row


class Found(NamedTuple):
    """A measured number with its 95 % interval and the method it is about.

    Args:
        is_averaged: The interval is over questions alone, though there were several seeds.
        is_held: Holm's correction over the file holds it, or has not been asked.
    """

    value: float
    low: float
    high: float
    name: str = ""
    is_averaged: bool = False
    is_held: bool = True

    def __str__(self) -> str:
        name = f", {label(self.name)}" if self.name else ""
        over = ", questions alone" if self.is_averaged else ""
        around = f"{self.low:.1f} to {self.high:.1f}" if self.high < math.inf else f"at least {self.low:.1f}"
        return f"{self.value:.1f} ({around}{over}{name})"


def results_of(results: Path, name: str) -> Results | None:
    """The content of a results file, read once until it is written anew; None where there is no such file."""
    path = results / f"{name}.json"
    return _read(path, path.stat().st_mtime_ns) if path.exists() else None


@lru_cache(maxsize=32)
def _read(path: Path, written: int) -> Results:
    del written
    return read_results(path)


def rows_of(results: Path, name: str) -> list[Row] | None:
    """The rows of a results file, None where there is no such file."""
    found = results_of(results, name)
    return None if found is None else found.rows


def summaries(rows: Sequence[Row], keep: int | float) -> dict[str, Row]:
    """The summary over all tasks of each method at a budget."""
    return {
        row["method"]: row
        for row in rows
        if "retention" in row and row["keep"] == keep and row.get("tasks", "all") == "all"
    }


def difference(rows: dict[str, Row], ours: str, other: str) -> Found | None:
    """How far one method is ahead of another."""
    if ours not in rows or other not in rows:
        return None
    one, two = rows[ours], rows[other]
    if two.get("versus") == ours and "lead_ci95" in two:
        found = Found(two["lead"], *two["lead_ci95"], is_held=two.get("lead_holds", True))
    elif one.get("versus") == other and "lead_ci95" in one:
        low, high = one["lead_ci95"]
        found = Found(-one["lead"], -high, -low, is_held=one.get("lead_holds", True))
    elif "gap_ci95" in one and ours.removesuffix(THROTTLED) == other:
        found = Found(one["gap"], *one["gap_ci95"])
    else:
        value = one["retention"] - two["retention"]
        half = math.hypot(*((row["ci95"][1] - row["ci95"][0]) / 2 for row in (one, two)))
        found = Found(value, value - half, value + half)
    return found._replace(is_averaged=is_averaged(one) or is_averaged(two))


def is_averaged(row: Row) -> bool:
    """Whether a row's interval is over questions alone though it has several seeds, as in files of before."""
    return row.get("n_seeds", 1) > 1 and "seeds" not in row.get("ci_over", "questions")


def next_best(rows: dict[str, Row]) -> str | None:
    """The method with the most retention that is neither ours nor a control or an ablation of ours.

    Methods inside the language model count where its layers hold K visual tokens on average, not after the last cut.
    """
    rivals = [
        name
        for name, row in rows.items()
        if name not in NO_RIVALS
        and row.get("average", row["keep"]) <= row["keep"]
        and not name.startswith(("diffprune", "gumbel_ste"))
        and not name.endswith(THROTTLED)
    ]
    return max(rivals, key=lambda name: rows[name]["retention"], default=None)
