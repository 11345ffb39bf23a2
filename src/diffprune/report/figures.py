"""Figures of results files, PNG and SVG: what is left by budget with its interval, and quality against time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diffprune.atomic import replacing
from diffprune.evaluate.answers import THROTTLED
from diffprune.report.cells import budget_order
from diffprune.report.quality import OURS, name_rows
from diffprune.results import Results, Row

KINDS = ("png", "svg")
CONDITION = ("device", "backbone", "num_text", "path")  # what times that are compared have in common
LINES = 9  # methods of a figure; more cannot be told apart
COLOURS = {OURS: "#c0392b", "random": "#8a8a8a", "oracle": "#222222"}
OTHERS = ("#2c6fbb", "#2e8b57", "#b7950b", "#8e44ad", "#16a085", "#d35400", "#5d6d7e", "#c2185b")
STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 10,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "diffprune",  # the same file from the same numbers
}


def draw_figures(found: Mapping[str, Results], folder: Path) -> dict[str, list[Path]]:
    """Write the figures of every file that has any into `folder`; by file the PNGs, each with an SVG beside it."""
    drawn: dict[str, list[Path]] = {}
    speed = [
        {"device": results.device, **row}
        for results in found.values()
        for row in name_rows(results.rows)
        if "ttft_ms" in row
    ]
    for name, results in found.items():
        summary = _summary(results)
        if len({row["keep"] for row in summary}) > 1:
            drawn.setdefault(name, []).append(_draw(folder / f"{name}-retention.png", _retention, summary))
        if pairs := match_times(summary, speed):
            drawn.setdefault(name, []).append(_draw(folder / f"{name}-time.png", _time, pairs))
    return drawn


def _summary(results: Results) -> list[dict[str, Any]]:
    """Summary rows of the first model and set of tasks, without the full model's own and those that drop nothing."""
    rows = [row for row in name_rows(results.rows) if "retention" in row and row["method"] != "full"]
    rows = [row for row in rows if not row["method"].endswith(THROTTLED)]
    first = {key: rows[0].get(key) for key in ("backbone", "tasks")} if rows else {}
    return [row for row in rows if all(row.get(key) == value for key, value in first.items())]


def choose_methods(rows: Sequence[Row], limit: int = LINES) -> list[str]:
    """Methods for one figure: ours, random and the oracle where they are, then the best at the smallest budget."""
    names = list(dict.fromkeys(row["method"] for row in rows))
    smallest = max((row["keep"] for row in rows), key=budget_order)
    left = {row["method"]: row["retention"] for row in rows if row["keep"] == smallest}
    always = [name for name in COLOURS if name in names]
    rest = sorted((name for name in names if name not in always), key=lambda name: -left.get(name, 0.0))
    return (always + rest)[:limit]


def match_times(rows: Sequence[Row], speed: Sequence[Row]) -> list[dict[str, Any]]:
    """Summary rows with the measured `ttft_ms` of the same method at the same budget, one request.

    All times are of one model, text, path and device, or they could not stand side by side: of those that know two
    methods the fast path's, then those that know most.
    """
    conditions: dict[tuple[Any, ...], list[Row]] = {}
    for one in speed:
        if one.get("batch") == 1:  # rows of serving have none
            conditions.setdefault(tuple(one.get(key) for key in CONDITION), []).append(one)
    found = [_at_these(rows, timed) for timed in conditions.values()]
    found = [pairs for pairs in found if len({row["method"] for row in pairs}) > 1]
    return max(found, key=lambda pairs: (pairs[0]["path"] == "fast", len(pairs)), default=[])


def _at_these(rows: Sequence[Row], timed: Sequence[Row]) -> list[dict[str, Any]]:
    """The summary rows of which there is a time under one condition."""
    found = []
    for row in rows:
        one = next(
            (
                one
                for one in timed
                if one["method"] == row["method"] and row["keep"] in (one.get("keep"), one.get("num_kept"))
            ),
            None,
        )
        if one is not None:
            text = f", {one['num_text']} text tokens" if "num_text" in one else ""
            where = f"{one['backbone']}{text}, {one['path']} path"
            found.append({**row, "ms": one["ttft_ms"], "path": one["path"], "where": where})
    return found


def _draw(path: Path, fill: Any, rows: Sequence[Row]) -> Path:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        sheet = Figure(figsize=(6.9, 3.4), layout="constrained")
        fill(sheet.subplots(), rows)
        for kind in KINDS:
            metadata: Any = {"Date": None} if kind == "svg" else {}
            with replacing(path.with_suffix(f".{kind}")) as file:
                sheet.savefig(file, dpi=200, format=kind, metadata=metadata)
    return path


def _colour(name: str, names: Sequence[str]) -> str:
    others = [one for one in names if one not in COLOURS]
    return COLOURS.get(name) or OTHERS[others.index(name) % len(OTHERS)]


def _retention(axes: Any, rows: Sequence[Row]) -> None:
    names = choose_methods(rows)
    budgets = sorted({row["keep"] for row in rows}, key=budget_order, reverse=True)
    for place, name in enumerate(names):
        own = sorted((row for row in rows if row["method"] == name), key=lambda row: budgets.index(row["keep"]))
        x = [budgets.index(row["keep"]) + 0.03 * (place - len(names) / 2) for row in own]  # bars beside each other
        y = [row["retention"] for row in own]
        bars = [[abs(row["retention"] - row.get("ci95", [row["retention"]] * 2)[end]) for row in own] for end in (0, 1)]
        style = {"linestyle": "--"} if name in ("random", "oracle") else {}
        axes.errorbar(
            x, y, bars, color=_colour(name, names), label=name, marker="o", ms=3.5, lw=1.3, capsize=2, **style
        )
    axes.set_xticks(range(len(budgets)), [str(keep) for keep in budgets])
    axes.set_xlabel("tokens kept")
    axes.set_ylabel("retention (%)")
    count = len({row["method"] for row in rows})
    chosen = f", {len(names)} of {count} methods" if len(names) < count else ""
    axes.set_title(f"What is left of the full model's score{chosen}; bars: 95 % interval")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def _time(axes: Any, rows: Sequence[Row]) -> None:
    names, budgets = choose_methods(rows), {row["keep"] for row in rows}
    for name in names:
        own = sorted((row for row in rows if row["method"] == name), key=lambda row: row["ms"])
        x, y = [row["ms"] for row in own], [row["retention"] for row in own]
        bars = [[abs(row["retention"] - row.get("ci95", [row["retention"]] * 2)[end]) for row in own] for end in (0, 1)]
        axes.errorbar(x, y, bars, color=_colour(name, names), label=name, marker="o", ms=4, lw=1.0, capsize=2)
        for row in own if len(budgets) > 1 else ():
            axes.annotate(
                str(row["keep"]), (row["ms"], row["retention"]), (4, -9), textcoords="offset points", fontsize=7
            )
    axes.set_xlabel(f"ms to the first token ({rows[0]['where']})")
    axes.set_ylabel("retention (%)")
    kept = "numbers: tokens kept" if len(budgets) > 1 else f"{rows[0]['keep']} tokens kept"
    axes.set_title(f"Quality against measured time; {kept}; bars: 95 % interval")
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
