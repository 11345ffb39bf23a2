"""Tables of the rows of a results file: one per kind of row, short enough to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from diffprune.report.cells import CONDITIONS, DASH, LONG, Absent, dashed, heading, noted_table, pivot
from diffprune.report.quality import average_of, by_budget, name_rows, quality_tables, summary_tables
from diffprune.results import ROW_KEYS, Results, Row, format_value, kind_of, markdown_table

WIDE = 8  # columns; of a table with more, those with one value go into a sentence
PLAIN = 12  # rows; of a plain table with more, one number stands by its conditions
HEADLINES = ("lift", "cosine", "slope", "gap_top1", "variation")  # the number that a probe is about
ORIGIN = ("command", "device", "commit")  # of a row in a file that was made by several runs


def _plain_tables(rows: Sequence[Row]) -> list[str]:
    """Every key a column; of many columns those with one value go into a sentence, of many rows one number is shown.

    Rows of several runs stand in a table for each run.
    """
    runs = list(dict.fromkeys(tuple(row.get(key) for key in ORIGIN) for row in rows))
    if len(runs) > 1 and len(rows) > len(runs):
        return [
            part
            for run in runs
            for part in _plain_tables([row for row in rows if tuple(row.get(key) for key in ORIGIN) == run])
        ]
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
            parts.append(f"In all rows: {', '.join(f'{key} {_said(key, rows[0][key])}' for key in same)}.\n")
    filled = [{key: dashed(row.get(key)) for key in columns} for row in rows]
    return [*parts, markdown_table(filled, columns)]


def _said(key: str, value: object) -> str:
    return f"`{value}`" if key == "command" else format_value(value)


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
    headings = [heading(across, row) for row in chosen]
    if (
        len({tuple(row[key] for key in down) for row in chosen}) > LONG
        and len({row.get("backbone") for row in chosen}) > 1
    ):
        down.remove("backbone")
        headings = [f"{row['backbone']}, {title}" for row, title in zip(chosen, headings, strict=True)]
    table = pivot(chosen, down, headings, headline)
    columns = [*down, *dict.fromkeys(headings)]
    cells = [{key: str(row[key]) if key in CONDITIONS else dashed(row.get(key)) for key in columns} for row in table]
    return [f"{headline} by {across}:\n", markdown_table(cells, columns)]


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
        shape = f"ttft_ms {_shape_title({key: row.get(key) for key in ('path', *several)})}"
        methods.setdefault(row["method"], {"method": row["method"]})[shape] = row.get("ttft_ms")
        headings[shape] = None
    title = _shape_title({key: stages[0].get(key) for key in ("path", *SHAPE)})
    table = noted_table(list(methods.values()), ["method", *STAGE_COLUMNS, *headings], ["method"])
    return [f"Stages of {title}, and ttft_ms of every shape:\n", *table]


def _speed_table(rows: Sequence[Row]) -> list[str]:
    """One table; what is equal in all rows of model, path, batch and text length is its title."""
    keys = ("path", *SHAPE)
    varying = [key for key in keys if any(row.get(key) != rows[0].get(key) for row in rows)]
    title = _shape_title({key: rows[0].get(key) for key in keys if key not in varying})
    present = {key for row in rows for key in row}
    labels = ["method", *(key for key in keys if key in varying)]
    table = noted_table(_by_method(rows), [*labels, *(key for key in SPEED_COLUMNS if key in present)], labels)
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


ONCE_MS = 1_000.0  # a call that takes longer is not made again
NO_GRAPH = "no CUDA graph: it waits for the device, has no room for a copy, or takes over 0.2 s"


def _selection_tables(rows: Sequence[Row]) -> list[str]:
    """Methods by shapes: ms launched one operation after the other, and replayed as a CUDA graph where one was made.

    A method measured without its kernels too has a line for that.
    """
    methods: dict[str, dict[str, Any]] = {}
    shapes: dict[str, None] = {}
    has_graphs = any(row.get("graph_ms") is not None for row in rows)
    for row in rows:
        shape = f"{row['num_kept']:,} of {row['num_visual']:,}, batch {row['batch']}"
        cell: object = Absent(row["skipped"]) if "skipped" in row else row.get("pruner_ms")
        if has_graphs and isinstance(cell, int | float):
            graph = row.get("graph_ms")
            cell = f"{format_value(cell)} / {DASH if graph is None else format_value(graph)}"
        name = ", steps by ".join(filter(None, (row["method"], row.get("steps"))))
        methods.setdefault(name, {"method": name})[shape] = cell
        shapes[shape] = None
    title = f"Launched from Python / replayed as a CUDA graph ({DASH}: {NO_GRAPH}):\n"
    parts = [title if has_graphs else "Launched from Python:\n"]
    parts += noted_table(list(methods.values()), ["method", *shapes], ["method"])
    if in_parts := [
        f"{row['method']} at {row['num_kept']:,} of {row['num_visual']:,} ({row['at_once']})"
        for row in rows
        if "at_once" in row
    ]:
        parts.append(f"So many images at a time, for want of memory: {', '.join(in_parts)}.\n")
    if cold := [
        f"{row['method']} at {row['num_kept']:,} of {row['num_visual']:,}, batch {row['batch']}"
        for row in rows
        if row.get("calls") == 1 and row["pruner_ms"] > ONCE_MS
    ]:
        parts.append(f"Called once, without a warm-up, so that loading kernels is in the time: {', '.join(cold)}.\n")
    return parts


def render_tables(rows: Sequence[Row]) -> str:
    """The tables of one results file, one per kind of row; a summary stands for its tasks, times for their device."""
    parts: list[str] = []
    rows = name_rows(rows)
    kinds = dict.fromkeys(kind_of(row) for row in rows)
    for kind in kinds:
        if (kind == "quality" and "summary" in kinds) or (kind == "other" and "speed" in kinds):
            continue
        tables = {
            "summary": summary_tables,
            "quality": quality_tables,
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
    rows = name_rows(results.rows)
    known = {row["method"] for row in rows if "method" in row}
    if unknown := [name for name in methods if name not in known]:
        raise ValueError(f"{results.name!r} has no rows of {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    origin = f"{results.device}, {results.date[:10]}, commit `{results.commit[:12]}`:\n"
    shown = [row for row in rows if not methods or row.get("method") in methods]
    if summary := [row for row in shown if "retention" in row and row["method"] != "full"]:
        fewest = min(row["keep"] for row in summary)
        left = {row["method"]: row["retention"] for row in summary if row["keep"] == fewest}
        first = summary[0]["method"]
        summary.sort(key=lambda row: (row["method"] != first, -left.get(row["method"], 0.0)))
        cells = by_budget(summary, lambda row: f"{row['retention']:.1f}{average_of(row)}")
        return "\n".join([origin, cells])
    timed = [row for row in rows if "ttft_ms" in row]
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
    table = noted_table(_by_method(chosen), [key for key in columns if key in chosen[0]], ["method", "path"])
    return "\n".join([f"{_shape_title(shape)}, medians in ms, {origin}", *table])
