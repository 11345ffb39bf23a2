"""Pages of tables from results files: one section per file, one summary table per question, no number typed by hand."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from diffprune.results import ROW_KEYS, Results, Row, format_value, kind_of, markdown_table, read_results

_TITLES: dict[str, str] = {
    "summary": "Retention (percent of the full model; deviation over seeds, 95 % interval over questions)",
    "quality": "Score (0 to 100) by task, mean over seeds",
    "speed": "Speed (times in ms are medians)",
    "training": "Training",
    "benchmark": "Benchmarks (times in ms are medians)",
    "selection": "Selection alone (ms)",
}
AVERAGE_NOTE = (
    "K of methods inside the language model is what they leave after their last cut (of p_mod it is the mean itself); "
    "in square brackets the visual tokens a decoder layer holds, mean over its layers, by each method's own rule (all "
    "other methods: K).\n"
)
ANSWERS = ".answers.json"  # what `diffprune eval` keeps beside its results: every answer, not committed
_BLOCK = re.compile(
    r"(<!-- results: (?P<name>[\w-]+)(?P<short>, short)? -->\n).*?(?P<end><!-- end of results -->)", re.DOTALL
)


def read_folder(folder: str | Path) -> dict[str, Results]:
    """Every results file of a folder by its name, in alphabetical order."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: give the one that holds the results files with --results")
    files = [path for path in sorted(folder.glob("*.json")) if not path.name.endswith(ANSWERS)]
    return {path.stem: read_results(path) for path in files}


# --- tables in general ------------------------------------------------------------------------------------------------

DASH = "-"
WIDE = 8  # columns; of a table with more, those with one value go into a sentence
FEW = 4  # rows; a wide table of no more stands on its side
LONG = 40  # rows; of a plain table with more, one number stands by its conditions
HEADLINES = ("lift", "cosine", "slope")  # the number that a probe is about
CONDITIONS = ("keep", "tau", "moment")  # numbers that say under what it was measured


@dataclass(frozen=True, slots=True)
class Absent:
    """A cell that has no number, and why."""

    reason: str


def _noted_table(rows: Sequence[Row], columns: Sequence[str], labels: Sequence[str]) -> list[str]:
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


def _plain_tables(rows: Sequence[Row]) -> list[str]:
    """Every key a column; of many columns those with one value go into a sentence, and few rows stand side by side."""
    if len(rows) > LONG:
        return _headline_table(rows)
    present = dict.fromkeys(key for row in rows for key, value in row.items() if not isinstance(value, Mapping))
    columns = [key for key in ROW_KEYS if key in present] + [key for key in present if key not in ROW_KEYS]
    parts: list[str] = []
    if len(columns) > WIDE and len(rows) > 1:
        same = [key for key in columns if all(row.get(key) == rows[0].get(key) for row in rows)]
        columns = [key for key in columns if key not in same]
        if same:
            words = ", ".join(f"{key} {format_value(rows[0][key])}" for key in same)
            parts.append(f"The same in all rows: {words}.\n")
    names = [str(row.get("name") or row.get("backbone")) for row in rows]
    if len(columns) > WIDE and len(rows) <= FEW and len(set(names)) == len(rows):
        across = [key for key in columns if key not in ("name", "backbone")]
        on_side = [
            {"": key} | {name: _dashed(row.get(key)) for name, row in zip(names, rows, strict=True)} for key in across
        ]
        return [*parts, markdown_table(on_side, ["", *names])]
    dashed = [{key: _dashed(row.get(key)) for key in columns} for row in rows]
    return [*parts, markdown_table(dashed, columns)]


def _headline_table(rows: Sequence[Row]) -> list[str]:
    """One number of each row: its texts down, and across the condition that has the most values."""
    headline = next((key for key in HEADLINES if any(key in row for row in rows)), None)
    chosen = [row for row in rows if headline in row]
    conditions = [key for key in CONDITIONS if chosen and all(key in row for row in chosen)]
    if headline is None or not conditions:
        return [f"{len(rows):,} rows.\n"]
    across = max(conditions, key=lambda key: len({row[key] for row in chosen}))
    down = [key for key, value in chosen[0].items() if isinstance(value, str) or key in conditions]
    table = _pivot(chosen, [key for key in down if key != across], across, headline)
    return [
        f"{headline} by {across}:\n",
        markdown_table([{key: str(v) if key in CONDITIONS else v for key, v in row.items()} for row in table]),
    ]


def _dashed(value: object) -> object:
    return DASH if value is None else value


# --- one kind of row after the other ----------------------------------------------------------------------------------


def _budget_order(keep: int | float) -> tuple[bool, int | float]:
    """Sorts budgets from everything downwards: shares first, then token counts, each from large to small."""
    return isinstance(keep, int), -keep


def _pivot(rows: Sequence[Row], down: Sequence[str], across: str, value: str = "score") -> list[dict[str, Any]]:
    """One row per combination of the `down` keys, one column per value of `across`: the mean over the rest."""
    cells: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for row in rows:
        cells.setdefault(tuple(row[key] for key in down), {}).setdefault(_heading(across, row), []).append(row[value])
    return [
        dict(zip(down, values, strict=True)) | {heading: fmean(found) for heading, found in cell.items()}
        for values, cell in cells.items()
    ]


def _heading(key: str, row: Row) -> str:
    return f"{key} {row[key]}" if key in CONDITIONS else str(row[key])


def _summary_tables(rows: Sequence[Row]) -> list[str]:
    """Methods down, budgets across: what is left of the full model's score."""
    parts: list[str] = []
    for backbone, tasks in dict.fromkeys((row.get("backbone"), row.get("tasks")) for row in rows):
        chosen = [row for row in rows if (row.get("backbone"), row.get("tasks")) == (backbone, tasks)]
        title = ", ".join([*([backbone] if backbone else []), *([f"tasks {tasks}"] if tasks else [])])
        parts += [f"{title}:\n"] if title else []
        parts.append(_by_budget(chosen, "retention", _retention_cell))
    return parts + ([AVERAGE_NOTE] if any("average" in row for row in rows) else [])


def _by_budget(rows: Sequence[Row], key: str, cell: Callable[[Row], str]) -> str:
    """A table with a row per method and a column per budget; `cell` writes those that have the key."""
    budgets = dict.fromkeys(_heading("keep", row) for row in sorted(rows, key=lambda row: _budget_order(row["keep"])))
    methods: dict[str, dict[str, str]] = {}
    for row in rows:
        if key in row:
            methods.setdefault(row["method"], {"method": row["method"]})[_heading("keep", row)] = cell(row)
    filled = [{heading: row.get(heading, DASH) for heading in ("method", *budgets)} for row in methods.values()]
    return markdown_table(filled, ["method", *budgets])


def _retention_cell(row: Row) -> str:
    """The retention, its deviation over seeds, its interval and the mean over layers, as far as they are there."""
    spread = f" ± {row['retention_std']:.1f}" if row.get("n_seeds", 1) > 1 else ""
    interval = " ({:.1f} to {:.1f})".format(*row["ci95"]) if "ci95" in row else ""
    average = f" [{row['average']:.1f}]" if "average" in row else ""
    return f"{row['retention']:.1f}{spread}{interval}{average}"


def _quality_tables(rows: Sequence[Row]) -> list[str]:
    """Methods and budgets down, tasks across; what a guess without the picture gets at the end."""
    by_budget = sorted(rows, key=lambda row: _budget_order(row["keep"]))
    tasks = dict.fromkeys(_heading("task", row) for row in rows)
    methods = list(dict.fromkeys(row["method"] for row in rows))
    by_task = _pivot(sorted(by_budget, key=lambda row: methods.index(row["method"])), ["method", "keep"], "task")
    by_task = [{**row, "keep": str(row["keep"])} for row in by_task]  # 1.0 is everything, 1 is one token
    return _noted_table(by_task + _chance_rows(rows), ["method", "keep", *tasks], ["method", "keep"])


def _chance_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """By task the score of the best guess without the picture, as one last row; none where no row has it."""
    by_task: dict[str, list[float]] = {}
    for row in rows:
        if row.get("chance") is not None:
            by_task.setdefault(_heading("task", row), []).append(row["chance"])
    means = {task: fmean(values) for task, values in by_task.items()}
    return [{"method": "chance", "keep": DASH} | means] if means else []


SPEED_COLUMNS = (
    "method", "path", "num_kept", "tflops", "encode_ms", "pruner_ms", "prefill_ms", "ratio_to_floor", "floor_ms",
    "ttft_ms", "ttft_ratio_to_floor", "ttft_p99_ms", "requests_s", "speedup", "decode_tok_s", "decode_ratio_to_floor",
    "peak_gb", "kv_bytes",
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
        parts += _noted_table(_by_method(chosen), [key for key in SPEED_COLUMNS if key in present], ["method", "path"])
    return parts


def _by_method(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Both paths of a method one below the other, methods as they come; what failed has its reason in every cell."""
    methods = list(dict.fromkeys(row.get("method") for row in rows))
    ordered = sorted(rows, key=lambda row: (methods.index(row.get("method")), row["path"]))
    return [
        dict(row) if "error" not in row else {key: Absent(row["error"]) for key in SPEED_COLUMNS} | dict(row)
        for row in ordered
    ]


def _selection_tables(rows: Sequence[Row]) -> list[str]:
    """Methods by shapes: launched one operation after the other, and replayed as a CUDA graph where one can be made."""
    parts: list[str] = []
    for key, title in (("pruner_ms", "Launched from Python:\n"), ("graph_ms", "Replayed as a CUDA graph:\n")):
        methods: dict[str, dict[str, Any]] = {}
        shapes: dict[str, None] = {}
        for row in rows:
            shape = f"{row['num_kept']:,} of {row['num_visual']:,}, batch {row['batch']}"
            cell = Absent(row["skipped"]) if "skipped" in row else row.get(key)
            if cell is None and key == "graph_ms":
                cell = Absent("no CUDA graph: it waits for the device, has no room for a copy, or takes over 0.2 s")
            methods.setdefault(row["method"], {"method": row["method"]})[shape] = cell
            shapes[shape] = None
        if any(row.get(key) is not None for row in rows):
            parts += [title, *_noted_table(list(methods.values()), ["method", *shapes], ["method"])]
    if in_parts := [
        f"{row['method']} at {row['num_kept']:,} of {row['num_visual']:,} ({row['at_once']})"
        for row in rows
        if "at_once" in row
    ]:
        parts.append(f"So many images at a time, for want of memory: {', '.join(in_parts)}.\n")
    return parts


def render_tables(rows: Sequence[Row]) -> str:
    """The tables of one results file, one per kind of row, each under its title; a summary stands for its tasks."""
    parts: list[str] = []
    kinds = dict.fromkeys(kind_of(row) for row in rows)
    for kind in kinds:
        if kind == "quality" and "summary" in kinds:
            continue
        chosen = [row for row in rows if kind_of(row) == kind]
        parts += [f"**{_TITLES[kind]}**\n"] if kind in _TITLES else []
        tables = {
            "summary": _summary_tables,
            "quality": _quality_tables,
            "speed": _speed_tables,
            "selection": _selection_tables,
        }.get(kind)
        parts += (tables or _plain_tables)(chosen)
    return "\n".join(parts)


def render_short(results: Results) -> str:
    """One small table: what is left of the quality, or times to the first token (of the first model and shape).

    Of the quality the first method stays on top, as the one to compare with; the others follow from the best at the
    smallest budget to the worst.
    """
    summary = [row for row in results.rows if "retention" in row and row["method"] != "full"]
    if summary:
        fewest = min(row["keep"] for row in summary)
        left = {row["method"]: row["retention"] for row in summary if row["keep"] == fewest}
        first = summary[0]["method"]
        summary.sort(key=lambda row: (row["method"] != first, -left.get(row["method"], 0.0)))
        table = _by_budget(summary, "retention", lambda row: f"{row['retention']:.1f}")
        return f"{results.notes} ({results.date[:10]}, commit `{results.commit[:12]}`):\n\n{table}"
    rows = [row for row in results.rows if "ttft_ms" in row]
    if not rows:
        raise ValueError(
            f"a short table is made of retention or of times to the first token; {results.name!r} has neither"
        )
    shape = ("backbone", "batch", "num_text")
    chosen = [row for row in rows if all(row.get(key) == rows[0].get(key) for key in shape)]
    stock = next((row for row in chosen if (row["method"], row["path"]) == ("full", "eager")), None)
    if stock is not None:
        chosen = [row | {"speed-up": stock["ttft_ms"] / row["ttft_ms"]} for row in chosen]
    columns = ["method", "path", "num_kept", "pruner_ms", "prefill_ms", "ttft_ms", "speed-up"]
    where = "{}, batch {}, {} text tokens".format(*(rows[0].get(key) for key in shape))
    return "\n".join(
        [
            f"{where}, {results.device}, medians in ms ({results.date[:10]}, commit `{results.commit[:12]}`):\n",
            *_noted_table(_by_method(chosen), [key for key in columns if key in chosen[0]], ["method", "path"]),
        ]
    )


def _origin(results: Results, link: str) -> str:
    """Where the numbers come from, under every table."""
    seeds = f", seeds {', '.join(map(str, results.seeds))}" if results.seeds else ""
    file = f"[All {len(results.rows):,} rows]({link}/{results.name}.json): " if link else ""
    return (
        f"{file}`{results.command}` on {results.device}, {results.date[:10]}, commit `{results.commit[:12]}`{seeds}.\n"
    )


def render_section(results: Results, link: str = "") -> str:
    """One results file as Markdown: notes, tables, origin; `link` leads from the page to the folder of the file."""
    notes = f"{results.notes}\n" if results.notes else ""
    return "\n".join(part for part in (notes, render_tables(results.rows), _origin(results, link)) if part)


def render_page(found: Mapping[str, Results], link: str = "../results") -> str:
    """The whole page `docs/results.md`: a summary of each file, which is linked."""
    head = (
        "# Results\n\n"
        "Made by `diffprune report` from the files in `results/`; do not edit by hand. Here is a summary of each; rows "
        "by task and seed are in the files, their keys in [api.md](api.md#result-rows).\n"
    )
    if not found:
        return head + "\nThere are no results files yet.\n"
    sections = [f"## {name}\n\n{render_section(results, link)}" for name, results in found.items()]
    return "\n".join([head, *sections])


def refresh_tables(text: str, found: Mapping[str, Results]) -> str:
    """`text` with every block between its two marker lines made anew from the results file it names."""

    def replace(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in found:
            raise ValueError(
                f"a table block names the results file {name!r}, which is not there: run its command first"
            )
        render = render_short if match["short"] else render_section
        return f"{match[1]}\n{render(found[name])}\n{match['end']}"

    return _BLOCK.sub(replace, text)
