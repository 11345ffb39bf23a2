"""What tables are put together from: cells, headings, pivots, and a table that says what is missing and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from diffprune.results import Row, markdown_table

DASH = "-"
LONG = 25  # rows of a table; a longer one is split or shortened
CONDITIONS = ("keep", "tau", "moment")  # numbers under which something was measured


@dataclass(frozen=True, slots=True)
class Absent:
    """A cell that has no number, and why."""

    reason: str


def noted_table(rows: Sequence[Row], columns: Sequence[str], labels: Sequence[str]) -> list[str]:
    """A table without empty rows and columns, a dash for a missing number, and under it what is missing and why."""
    values = [key for key in columns if key not in labels]

    def is_absent(row: Row, key: str) -> bool:
        return row.get(key) is None or isinstance(row[key], Absent)

    shown = [row for row in rows if not all(is_absent(row, key) for key in values)]
    kept = [key for key in values if not all(is_absent(row, key) for row in shown)]
    marks: dict[str, int] = {}

    def cell(value: object) -> object:
        if not isinstance(value, Absent):
            return DASH if value is None else value
        return f"{DASH} ({marks.setdefault(value.reason, len(marks) + 1)})"

    columns = [key for key in columns if key in labels or key in kept]
    filled = [{key: cell(row.get(key)) for key in columns} for row in shown]
    parts = [markdown_table(filled, columns)] if shown and kept else []
    parts += [f"({number}) {reason}.\n" for reason, number in marks.items()]
    missing: dict[str, list[str]] = {}
    for row in rows:
        if row not in shown:
            name = ", ".join(str(row[key]) for key in labels if key in row)
            missing.setdefault(_reason(row.values()), []).append(name)
    for key in values:
        if shown and key not in kept:
            missing.setdefault(_reason(row[key] for row in shown if key in row), []).append(key)
    parts += [f"Not in the table: {'; '.join(names)}{reason}.\n" for reason, names in missing.items()]
    return parts


def _reason(values: Iterable[object]) -> str:
    """The first reason among the values, in brackets."""
    return next((f" ({value.reason})" for value in values if isinstance(value, Absent)), "")


def dashed(value: object) -> object:
    return DASH if value is None else value


def budget_order(keep: int | float) -> tuple[bool, int | float]:
    """Sorts budgets from everything downwards: shares first, then token counts, each from large to small."""
    return isinstance(keep, int), -keep


def pivot(rows: Sequence[Row], down: Sequence[str], headings: Sequence[str], value: str) -> list[dict[str, Any]]:
    """One row per combination of the `down` keys, one column per heading (one for each row): the mean over the rest."""
    cells: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for row, heading in zip(rows, headings, strict=True):
        cells.setdefault(tuple(row[key] for key in down), {}).setdefault(heading, []).append(row[value])
    return [
        dict(zip(down, values, strict=True)) | {heading: fmean(found) for heading, found in cell.items()}
        for values, cell in cells.items()
    ]


def heading(key: str, row: Row) -> str:
    return f"{key} {row[key]}" if key in CONDITIONS else str(row[key])
