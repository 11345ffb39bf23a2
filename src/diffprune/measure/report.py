"""Pages of tables from results files: one section per file, one table per kind of row, no number typed by hand."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from diffprune.results import Results, Row, kind_of, markdown_table, read_results

_TITLES: dict[str, str] = {
    "summary": "Retention (percent of the full model)",
    "quality": "Score (0 to 100), mean over tasks and seeds",
    "speed": "Speed (times in ms are medians)",
    "training": "Training",
    "benchmark": "Benchmarks (times in ms are medians)",
    "other": "Rows",
}
ANSWERS = ".answers.json"  # what `diffprune eval` keeps beside its results: every answer, not committed
_BLOCK = re.compile(r"(<!-- results: (?P<name>[\w-]+) -->\n).*?(<!-- end of results -->)", re.DOTALL)


def read_folder(folder: str | Path) -> dict[str, Results]:
    """Every results file of a folder by its name, in alphabetical order."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: give the one that holds the results files with --results")
    files = [path for path in sorted(folder.glob("*.json")) if not path.name.endswith(ANSWERS)]
    return {path.stem: read_results(path) for path in files}


def _budget_order(keep: int | float) -> tuple[bool, int | float]:
    """Sorts budgets from everything downwards: shares first, then token counts, each from large to small."""
    return isinstance(keep, int), -keep


def _pivot(rows: Sequence[Row], down: Sequence[str], across: str) -> list[dict[str, Any]]:
    """One row per combination of the `down` keys, one column per value of `across`: the mean score over the rest."""
    cells: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for row in rows:
        cells.setdefault(tuple(row[key] for key in down), {}).setdefault(_heading(across, row), []).append(row["score"])
    return [
        dict(zip(down, values, strict=True)) | {heading: fmean(scores) for heading, scores in cell.items()}
        for values, cell in cells.items()
    ]


def _heading(key: str, row: Row) -> str:
    return f"keep {row['keep']}" if key == "keep" else str(row[key])


def _quality_tables(rows: Sequence[Row]) -> list[str]:
    by_budget = sorted(rows, key=lambda row: _budget_order(row["keep"]))
    budgets = dict.fromkeys(_heading("keep", row) for row in by_budget)
    tasks = dict.fromkeys(_heading("task", row) for row in rows)
    return [
        markdown_table(_pivot(rows, ["method"], "keep"), ["method", *budgets]),
        "**Score by task, mean over seeds**\n",
        markdown_table(_pivot(rows, ["method", "keep"], "task"), ["method", "keep", *tasks]),
    ]


def render_tables(rows: Sequence[Row]) -> str:
    """The tables of one results file, one per kind of row, each under its title."""
    parts: list[str] = []
    for kind in dict.fromkeys(kind_of(row) for row in rows):
        chosen = [row for row in rows if kind_of(row) == kind]
        parts.append(f"**{_TITLES[kind]}**\n")
        parts += _quality_tables(chosen) if kind == "quality" else [markdown_table(chosen)]
    return "\n".join(parts)


def _origin(results: Results) -> str:
    """Where the numbers come from, under every table."""
    seeds = f", seeds {', '.join(map(str, results.seeds))}" if results.seeds else ""
    return f"`{results.command}` on {results.device}, {results.date[:10]}, commit `{results.commit[:12]}`{seeds}.\n"


def render_section(results: Results) -> str:
    """One results file as Markdown: notes, tables, origin."""
    notes = f"{results.notes}\n" if results.notes else ""
    return "\n".join(part for part in (notes, render_tables(results.rows), _origin(results)) if part)


def render_page(found: Mapping[str, Results]) -> str:
    """The whole page `docs/results.md`."""
    head = (
        "# Results\n\n"
        "Made by `diffprune report` from the files in `results/`; do not edit by hand. "
        "Row keys are explained in [api.md](api.md#result-rows).\n"
    )
    if not found:
        return head + "\nThere are no results files yet.\n"
    sections = [f"## {name}\n\n{render_section(results)}" for name, results in found.items()]
    return "\n".join([head, *sections])


def refresh_tables(text: str, found: Mapping[str, Results]) -> str:
    """`text` with every block between its two marker lines made anew from the results file it names."""

    def replace(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in found:
            raise ValueError(
                f"a table block names the results file {name!r}, which is not there: run its command first"
            )
        return f"{match[1]}\n{render_section(found[name])}\n{match[3]}"

    return _BLOCK.sub(replace, text)
