"""The paper's printed rows beside measured ones, where benchmarks and budgets are the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diffprune.report.cells import DASH, budget_order, pivot
from diffprune.report.paper import TABLES, Table
from diffprune.results import Row, markdown_table

# Names under which a benchmark is measured: its own, and the public harness's task.
TASKS = {
    "GQA": ("gqa",),
    "MMB": ("mmbench", "mmbench_en_dev_static", "mmbench_en_dev"),
    "MMB-CN": ("mmbench_cn", "mmbench_cn_dev"),
    "MME": ("mme",),
    "POPE": ("pope",),
    "SQA": ("scienceqa", "scienceqa_img"),
    "VQAv2": ("vqav2", "vqav2_val"),
    "TextVQA": ("textvqa", "textvqa_val"),
    "SEED": ("seedbench",),
    "VizWiz": ("vizwiz", "vizwiz_vqa_val"),
}
STAND_IN = "stand-in"  # files of before stand-ins had names of their own say so in their notes
NEAR = 0.002  # shares that differ by less are one budget: 0.1111 and 11.1 %


def printed_block(rows: Sequence[Row], notes: str = "") -> list[str]:
    """Measured scores by benchmark with the paper's rows of the same budgets below them; nothing where none match.

    Columns match where at least two benchmarks of one of the paper's tables were measured under their own names, at one
    of its budgets. Scores stand in the benchmark's own unit. The paper's rows are marked: its authors measured them.
    """
    quality = [row for row in rows if "score_raw" in row]
    if not quality or STAND_IN in notes:
        return []
    parts: list[str] = []
    for table in TABLES:
        columns = _columns(quality, table)
        budgets = [row["keep"] for row in quality if any(_is_budget(row["keep"], text) for text, *_ in table.rows)]
        if len(columns) < 2 or not budgets:
            continue
        own = [row for row in quality if row["task"] in columns and (row["method"] == "full" or row["keep"] in budgets)]
        own.sort(key=lambda row: (row["method"] != "full", budget_order(row["keep"])))
        lines = pivot(own, ["method", "keep"], [columns[row["task"]] for row in own], "score_raw")
        lines = [{**line, "keep": _words(line)} for line in lines]
        lines.append(_printed("full", "all", table, table.full, 100.0))
        for budget, method, scores, average in table.rows:
            if any(_is_budget(keep, budget) for keep in budgets):
                lines.append(_printed(method, budget, table, scores, average))
        wanted = ["method", "keep", *columns.values(), "Avg."]
        filled = [{key: line.get(key, DASH) if line.get(key) is not None else DASH for key in wanted} for line in lines]
        title = f"Beside the paper's table of {table.name}; rows marked (paper) are printed there, not measured here:\n"
        parts += [title, markdown_table(filled, wanted)]
    return parts


def _columns(rows: Sequence[Row], table: Table) -> dict[str, str]:
    """The paper's name of each measured task that its table has, in the table's order."""
    measured = {row["task"] for row in rows}
    return {task: name for name in table.benchmarks for task in TASKS[name] if task in measured}


def _is_budget(keep: int | float, printed: str) -> bool:
    if printed.endswith("%"):
        return isinstance(keep, float) and abs(keep - float(printed.removesuffix("%")) / 100) < NEAR
    return isinstance(keep, int) and keep == int(printed)


def _words(line: dict[str, Any]) -> str:
    return "all" if line["method"] == "full" else str(line["keep"])


def _printed(
    method: str, budget: str, table: Table, scores: Sequence[int | float | None], average: float
) -> dict[str, Any]:
    values = dict(zip(table.benchmarks, scores, strict=True))
    return {"method": f"{method} (paper)", "keep": budget, **values, "Avg.": average}
