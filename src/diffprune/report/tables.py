"""Tables of the rows of a results file: one per kind of row, short enough to read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from diffprune.results import ROW_KEYS, Results, Row, format_value, kind_of, markdown_table

WORDS = {"taught": "supervised upper bound"}  # what recorded files call otherwise

# --- tables in general ------------------------------------------------------------------------------------------------

DASH = "-"
WIDE = 8  # columns; of a table with more, those with one value go into a sentence
LONG = 25  # rows of a table; a longer one is split or shortened
PLAIN = 12  # rows; of a plain table with more, one number stands by its conditions
HEADLINES = ("lift", "cosine", "slope", "gap_top1", "variation")  # the number that a probe is about
CONDITIONS = ("keep", "tau", "moment")  # numbers under which it was measured


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
    """Every key a column; of many columns those with one value go into a sentence, of many rows one number is shown."""
    if len(rows) > PLAIN and (table := _headline_table(rows)):
        return table
    if len(rows) > LONG:
        return [f"{len(rows):,} rows.\n"]
    present = dict.fromkeys(key for row in rows for key, value in row.items() if not isinstance(value, Mapping))
    columns = [key for key in ROW_KEYS if key in present] + [key for key in present if key not in ROW_KEYS]
    parts: list[str] = []
    if len(columns) > WIDE and len(rows) > 1:
        same = [key for key in columns if all(row.get(key) == rows[0].get(key) for row in rows)]
        columns = [key for key in columns if key not in same]
        if same:
            words = ", ".join(f"{key} {format_value(rows[0][key])}" for key in same)
            parts.append(f"In all rows: {words}.\n")
    dashed = [{key: _dashed(row.get(key)) for key in columns} for row in rows]
    return [*parts, markdown_table(dashed, columns)]


def _headline_table(rows: Sequence[Row]) -> list[str]:
    """One number of each row: its texts down, and across the condition that has the most values; [] without one.

    Models go across too where that makes the table short enough.
    """
    headline = next((key for key in HEADLINES if any(key in row for row in rows)), None)
    chosen = [row for row in rows if headline in row]
    conditions = [key for key in CONDITIONS if chosen and all(key in row for row in chosen)]
    if headline is None or not conditions:
        return []
    across = max(conditions, key=lambda key: len({row[key] for row in chosen}))
    down = [key for key, value in chosen[0].items() if (isinstance(value, str) or key in conditions) and key != across]
    down.sort(key=lambda key: list(ROW_KEYS).index(key) if key in ROW_KEYS else len(ROW_KEYS))
    headings = [_heading(across, row) for row in chosen]
    if (
        len({tuple(row[key] for key in down) for row in chosen}) > LONG
        and len({row.get("backbone") for row in chosen}) > 1
    ):
        down.remove("backbone")
        headings = [f"{row['backbone']}, {heading}" for row, heading in zip(chosen, headings, strict=True)]
    table = _pivot(chosen, down, headings, headline)
    columns = [*down, *dict.fromkeys(headings)]
    cells = [{key: str(row[key]) if key in CONDITIONS else _dashed(row.get(key)) for key in columns} for row in table]
    return [f"{headline} by {across}:\n", markdown_table(cells, columns)]


def _dashed(value: object) -> object:
    return DASH if value is None else value


# --- one kind of row after the other ----------------------------------------------------------------------------------


def _budget_order(keep: int | float) -> tuple[bool, int | float]:
    """Sorts budgets from everything downwards: shares first, then token counts, each from large to small."""
    return isinstance(keep, int), -keep


def _pivot(rows: Sequence[Row], down: Sequence[str], headings: Sequence[str], value: str) -> list[dict[str, Any]]:
    """One row per combination of the `down` keys, one column per heading (one for each row): the mean over the rest."""
    cells: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for row, heading in zip(rows, headings, strict=True):
        cells.setdefault(tuple(row[key] for key in down), {}).setdefault(heading, []).append(row[value])
    return [
        dict(zip(down, values, strict=True)) | {heading: fmean(found) for heading, found in cell.items()}
        for values, cell in cells.items()
    ]


def _heading(key: str, row: Row) -> str:
    return f"{key} {row[key]}" if key in CONDITIONS else str(row[key])


def _summary_tables(rows: Sequence[Row]) -> list[str]:
    """Methods down, budgets across: what is left of the full model's score.

    The full model's own row, 100, is not shown. Several models stand side by side, without intervals. Where the methods
    are many, those with several seeds have a table of their own.
    """
    pruned = [row for row in rows if row["method"] != "full"] or rows
    models = dict.fromkeys(row.get("backbone") for row in pruned)
    parts: list[str] = []
    for tasks in dict.fromkeys(row.get("tasks") for row in pruned):
        chosen = [row for row in pruned if row.get("tasks") == tasks]
        parts += [f"tasks {tasks}:\n"] if tasks else []
        if len(models) > 1:
            parts.append(_by_budget(chosen, "retention", lambda row: _retention_cell(row, interval=False)))
            continue
        parts += [f"{model}:\n" for model in models if model]
        several = {row["method"] for row in chosen if row.get("n_seeds", 1) > 1}
        if len({row["method"] for row in chosen}) <= LONG or not several:
            parts.append(_by_budget(chosen, "retention", _retention_cell))
            continue
        for title, is_in in (("Several seeds", True), ("One run", False)):
            some = [row for row in chosen if (row["method"] in several) == is_in]
            parts += [f"{title}:\n", _by_budget(some, "retention", _retention_cell)]
    return parts


def _by_budget(rows: Sequence[Row], key: str, cell: Callable[[Row], str]) -> str:
    """A table with a row per method and a column per model and budget; `cell` writes those that have the key."""
    models = list(dict.fromkeys(row.get("backbone") for row in rows))

    def heading(row: Row) -> str:
        return f"{row['backbone']}, {_heading('keep', row)}" if len(models) > 1 else _heading("keep", row)

    ordered = sorted(rows, key=lambda row: (models.index(row.get("backbone")), _budget_order(row["keep"])))
    columns = dict.fromkeys(heading(row) for row in ordered)
    methods: dict[str, dict[str, str]] = {}
    for row in rows:
        if key in row:
            methods.setdefault(row["method"], {"method": row["method"]})[heading(row)] = cell(row)
    filled = [{column: row.get(column, DASH) for column in ("method", *columns)} for row in methods.values()]
    return markdown_table(filled, ["method", *columns])


def _retention_cell(row: Row, interval: bool = True) -> str:
    """The retention, its deviation over seeds, its interval and the mean over layers, as far as they are there."""
    spread = f" ± {row['retention_std']:.1f}" if row.get("n_seeds", 1) > 1 else ""
    around = " ({:.1f} to {:.1f})".format(*row["ci95"]) if interval and "ci95" in row else ""
    average = f" [{row['average']:.1f}]" if "average" in row else ""
    return f"{row['retention']:.1f}{spread}{around}{average}"


def _quality_tables(rows: Sequence[Row]) -> list[str]:
    """Methods and budgets down, tasks across; what a guess without the picture gets at the end."""
    by_budget = sorted(rows, key=lambda row: _budget_order(row["keep"]))
    tasks = dict.fromkeys(_heading("task", row) for row in rows)
    methods = list(dict.fromkeys(row["method"] for row in rows))
    ordered = sorted(by_budget, key=lambda row: methods.index(row["method"]))
    by_task = _pivot(ordered, ["method", "keep"], [_heading("task", row) for row in ordered], "score")
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
    "num_kept", "tflops", "encode_ms", "pruner_ms", "prefill_ms", "ratio_to_floor", "floor_ms",
    "ttft_ms", "ttft_ratio_to_floor", "ttft_p99_ms", "requests_s", "speedup", "decode_tok_s", "decode_ratio_to_floor",
    "peak_gb", "kv_bytes",
)  # fmt: skip


STAGE_COLUMNS = ("num_kept", "tflops", "encode_ms", "pruner_ms", "prefill_ms", "ratio_to_floor")
SHAPE = ("backbone", "batch", "num_text")


def _speed_tables(rows: Sequence[Row]) -> list[str]:
    """Methods side by side; of many rows the stages of the first shape, and times to the first token of all shapes."""
    if len(rows) <= LONG:
        return _speed_table(rows)
    several = [key for key in SHAPE if any(row.get(key) != rows[0].get(key) for row in rows)]
    first = [row for row in rows if all(row.get(key) == rows[0].get(key) for key in SHAPE)]
    stages = [row for row in first if row["path"] == "fast"] or first
    methods = {row["method"]: {key: row.get(key) for key in ("method", *STAGE_COLUMNS)} for row in _by_method(stages)}
    headings: dict[str, None] = {}
    for row in _by_method(rows):
        heading = f"ttft_ms {_shape_title({key: row.get(key) for key in ('path', *several)})}"
        methods.setdefault(row["method"], {"method": row["method"]})[heading] = row.get("ttft_ms")
        headings[heading] = None
    title = _shape_title({key: stages[0].get(key) for key in ("path", *SHAPE)})
    table = _noted_table(list(methods.values()), ["method", *STAGE_COLUMNS, *headings], ["method"])
    return [f"Stages of {title}, and ttft_ms of every shape:\n", *table]


def _speed_table(rows: Sequence[Row]) -> list[str]:
    """One table; what is equal in all rows of model, path, batch and text length is its title."""
    keys = ("path", *SHAPE)
    varying = [key for key in keys if any(row.get(key) != rows[0].get(key) for row in rows)]
    title = _shape_title({key: rows[0].get(key) for key in keys if key not in varying})
    present = {key for row in rows for key in row}
    labels = ["method", *(key for key in keys if key in varying)]
    table = _noted_table(_by_method(rows), [*labels, *(key for key in SPEED_COLUMNS if key in present)], labels)
    return [*([f"{title}:\n"] if title else []), *table]


def _shape_title(row: Row) -> str:
    words = {"backbone": "{}", "path": "{}", "batch": "batch {}", "num_text": "{} text tokens"}
    return ", ".join(text.format(row[key]) for key, text in words.items() if row.get(key) is not None)


def _by_method(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Shape by shape, both paths of a method one below the other; what failed has its reason in every cell."""
    shapes = list(dict.fromkeys(tuple(row.get(key) for key in SHAPE) for row in rows))
    methods = list(dict.fromkeys(row.get("method") for row in rows))

    def place(row: Row) -> tuple[int, int, str]:
        return shapes.index(tuple(row.get(key) for key in SHAPE)), methods.index(row.get("method")), row["path"]

    return [
        dict(row) if "error" not in row else {key: Absent(row["error"]) for key in SPEED_COLUMNS} | dict(row)
        for row in sorted(rows, key=place)
    ]


NO_GRAPH = "no CUDA graph: it waits for the device, has no room for a copy, or takes over 0.2 s"


def _selection_tables(rows: Sequence[Row]) -> list[str]:
    """Methods by shapes: ms launched one operation after the other, and replayed as a CUDA graph where one was made."""
    methods: dict[str, dict[str, Any]] = {}
    shapes: dict[str, None] = {}
    has_graphs = any(row.get("graph_ms") is not None for row in rows)
    for row in rows:
        shape = f"{row['num_kept']:,} of {row['num_visual']:,}, batch {row['batch']}"
        cell: object = Absent(row["skipped"]) if "skipped" in row else row.get("pruner_ms")
        if has_graphs and isinstance(cell, int | float):
            graph = row.get("graph_ms")
            cell = f"{format_value(cell)} / {DASH if graph is None else format_value(graph)}"
        methods.setdefault(row["method"], {"method": row["method"]})[shape] = cell
        shapes[shape] = None
    title = f"Launched from Python / replayed as a CUDA graph ({DASH}: {NO_GRAPH}):\n"
    parts = [title if has_graphs else "Launched from Python:\n"]
    parts += _noted_table(list(methods.values()), ["method", *shapes], ["method"])
    if in_parts := [
        f"{row['method']} at {row['num_kept']:,} of {row['num_visual']:,} ({row['at_once']})"
        for row in rows
        if "at_once" in row
    ]:
        parts.append(f"So many images at a time, for want of memory: {', '.join(in_parts)}.\n")
    return parts


def render_tables(rows: Sequence[Row]) -> str:
    """The tables of one results file, one per kind of row; a summary stands for its tasks, times for their device."""
    parts: list[str] = []
    rows = [{**row, "method": WORDS.get(row["method"], row["method"])} if "method" in row else row for row in rows]
    kinds = dict.fromkeys(kind_of(row) for row in rows)
    for kind in kinds:
        if (kind == "quality" and "summary" in kinds) or (kind == "other" and "speed" in kinds):
            continue
        tables = {
            "summary": _summary_tables,
            "quality": _quality_tables,
            "speed": _speed_tables,
            "selection": _selection_tables,
        }.get(kind)
        parts += (tables or _plain_tables)([row for row in rows if kind_of(row) == kind])
    return "\n".join(parts)


def render_short(results: Results, methods: Sequence[str] = ()) -> str:
    """One small table: what is left of the quality, or times to the first token (of the first model and shape).

    Of the quality the first method stays on top, as the one to compare with; the others follow from the best at the
    smallest budget to the worst.

    Args:
        results: The file it is made of.
        methods: The methods to show; all of the file by default.
    """
    known = {row["method"] for row in results.rows if "method" in row}
    if unknown := [name for name in methods if name not in known]:
        raise ValueError(f"{results.name!r} has no rows of {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    origin = f"{results.device}, {results.date[:10]}, commit `{results.commit[:12]}`:\n"
    shown = [row for row in results.rows if not methods or row.get("method") in methods]
    if summary := [row for row in shown if "retention" in row and row["method"] != "full"]:
        fewest = min(row["keep"] for row in summary)
        left = {row["method"]: row["retention"] for row in summary if row["keep"] == fewest}
        first = summary[0]["method"]
        summary.sort(key=lambda row: (row["method"] != first, -left.get(row["method"], 0.0)))
        return "\n".join([origin, _by_budget(summary, "retention", lambda row: f"{row['retention']:.1f}")])
    timed = [row for row in results.rows if "ttft_ms" in row]
    if not timed:
        raise ValueError(
            f"a short table is made of retention or of times to the first token; {results.name!r} has neither"
        )
    shape = {key: timed[0].get(key) for key in SHAPE}
    first = [row for row in timed if all(row.get(key) == value for key, value in shape.items())]
    stock = next((row for row in first if (row["method"], row["path"]) == ("full", "eager")), None)
    chosen = [row for row in first if row in shown]
    if stock is not None:
        chosen = [row | {"speed-up": stock["ttft_ms"] / row["ttft_ms"]} for row in chosen]
    columns = ["method", "path", "num_kept", "pruner_ms", "prefill_ms", "ttft_ms", "speed-up"]
    table = _noted_table(_by_method(chosen), [key for key in columns if key in chosen[0]], ["method", "path"])
    return "\n".join([f"{_shape_title(shape)}, medians in ms, {origin}", *table])
