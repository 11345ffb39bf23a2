"""Pages of tables from results files: one section per file, one table per kind of row, no number typed by hand."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from diffprune.results import Results, Row, kind_of, markdown_table, read_results

_TITLES: dict[str, str] = {
    "summary": "Retention (percent of the full model; deviation over seeds, 95 % interval over questions)",
    "quality": "Score (0 to 100), mean over tasks and seeds",
    "speed": "Speed (times in ms are medians)",
    "training": "Training",
    "benchmark": "Benchmarks (times in ms are medians)",
    "selection": "Selection alone (ms)",
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


def _summary_tables(rows: Sequence[Row]) -> list[str]:
    """Methods down, budgets across: retention, then the lead of one method and the share of answers that stay equal."""
    parts: list[str] = []
    for tasks in dict.fromkeys(row.get("tasks") for row in rows):
        chosen = [row for row in rows if row.get("tasks") == tasks]
        parts += [] if tasks is None else [f"Tasks: {tasks}.\n"]
        parts.append(_by_budget(chosen, "retention", _retention_cell))
        for versus in dict.fromkeys(row["versus"] for row in chosen if "versus" in row):
            parts.append(f"Points by which {versus} is ahead, and their 95 % interval:\n")
            parts.append(_by_budget([row for row in chosen if row.get("versus") == versus], "lead", _lead_cell))
        if any("unchanged" in row for row in chosen):
            parts.append("Share of answers equal to the full model's:\n")
            parts.append(_by_budget(chosen, "unchanged", lambda row: f"{row['unchanged']:.3f}"))
    return parts


def _by_budget(rows: Sequence[Row], key: str, cell: Callable[[Row], str]) -> str:
    """A table with a row per method and a column per budget; `cell` writes those that have the key."""
    budgets = dict.fromkeys(_heading("keep", row) for row in sorted(rows, key=lambda row: _budget_order(row["keep"])))
    methods: dict[str, dict[str, str]] = {}
    for row in rows:
        if key in row:
            methods.setdefault(row["method"], {"method": row["method"]})[_heading("keep", row)] = cell(row)
    return markdown_table(list(methods.values()), ["method", *budgets])


def _retention_cell(row: Row) -> str:
    """The retention, its deviation over seeds and its interval, as far as they are there."""
    spread = f" ± {row['retention_std']:.1f}" if row.get("n_seeds", 1) > 1 else ""
    interval = " ({:.1f} to {:.1f})".format(*row["ci95"]) if "ci95" in row else ""
    return f"{row['retention']:.1f}{spread}{interval}"


def _lead_cell(row: Row) -> str:
    low, high = row["lead_ci95"]
    return f"{row['lead']:+.1f} ({low:+.1f} to {high:+.1f})"


def _quality_tables(rows: Sequence[Row]) -> list[str]:
    by_budget = sorted(rows, key=lambda row: _budget_order(row["keep"]))
    budgets = dict.fromkeys(_heading("keep", row) for row in by_budget)
    tasks = dict.fromkeys(_heading("task", row) for row in rows)
    return [
        markdown_table(_pivot(rows, ["method"], "keep"), ["method", *budgets]),
        "**Score by task, mean over seeds**\n",
        markdown_table(_pivot(rows, ["method", "keep"], "task"), ["method", "keep", *tasks]),
    ]


SPEED_COLUMNS = (
    "method", "path", "num_kept", "tflops", "encode_ms", "pruner_ms", "prefill_ms", "ttft_ms", "ttft_p99_ms",
    "requests_s", "speedup", "decode_tok_s", "peak_gb", "kv_bytes", "floor_ms", "ratio_to_floor", "error",
)  # fmt: skip


def _speed_tables(rows: Sequence[Row]) -> list[str]:
    """One table for each model, batch and text length, methods side by side; keys with one value are in its title."""
    parts: list[str] = []
    for group in dict.fromkeys(tuple(row.get(key) for key in ("backbone", "batch", "num_text")) for row in rows):
        backbone, batch, num_text = group
        chosen = [row for row in rows if (row.get("backbone"), row["batch"], row.get("num_text")) == group]
        present = {key for row in chosen for key in row}
        title = [str(backbone)] if backbone else []
        title += [f"batch {batch}"] + ([f"{num_text} text tokens"] if num_text is not None else [])
        parts.append(f"{', '.join(title)}:\n")
        parts.append(markdown_table(chosen, [key for key in SPEED_COLUMNS if key in present]))
    return parts


def _selection_tables(rows: Sequence[Row]) -> list[str]:
    """Methods by shapes: launched one operation after the other, and replayed as a CUDA graph where one can be made."""
    parts: list[str] = []
    for key, title in (("pruner_ms", "Launched from Python:\n"), ("graph_ms", "Replayed as a CUDA graph:\n")):
        methods: dict[str, dict[str, Any]] = {}
        shapes: dict[str, None] = {}
        for row in rows:
            shape = f"{row['num_kept']:,} of {row['num_visual']:,}, batch {row['batch']}"
            methods.setdefault(row["method"], {"method": row["method"]})[shape] = row.get(key, row.get("skipped"))
            shapes[shape] = None
        if any(row.get(key) is not None for row in rows):
            parts += [title, markdown_table(list(methods.values()), ["method", *shapes])]
    return parts


def render_tables(rows: Sequence[Row]) -> str:
    """The tables of one results file, one per kind of row, each under its title."""
    parts: list[str] = []
    for kind in dict.fromkeys(kind_of(row) for row in rows):
        chosen = [row for row in rows if kind_of(row) == kind]
        parts.append(f"**{_TITLES[kind]}**\n")
        tables = {
            "summary": _summary_tables,
            "quality": _quality_tables,
            "speed": _speed_tables,
            "selection": _selection_tables,
        }.get(kind)
        parts += [markdown_table(chosen)] if tables is None else tables(chosen)
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
