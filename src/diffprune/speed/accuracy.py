"""How far the plan is from what was measured, as tables: every stage of the plan's own rows, and the prefill of others.

`diffprune plan --against results/ttft.json` prints them; `python -m diffprune.speed.accuracy docs/profile.md
results/ttft*.json` puts them into a page, between its two marker lines.
"""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diffprune.atomic import write_text
from diffprune.results import Results, markdown_table, read_results
from diffprune.speed.calibrate import SHAPE, SIZE, card_of, compare, even_rows, held_out, is_even, measured_rows
from diffprune.speed.gpus import Gpu
from diffprune.speed.plan import CALIBRATIONS, TEXT_BUCKETS, plan
from diffprune.speed.subject import picture_size

STAGES = {
    "encode": "encode_ms",
    "pruner": "pruner_ms",
    "prefill": "prefill_ms",
    "ttft": "ttft_ms",
    "decode": "decode_tok_s",
}
MEASURED = ("num_columns", "num_visual", "encode_ms", "prefill_ms", "ttft_ms")  # of every row with a prefill
START, END = "<!-- plan against measurement -->\n", "<!-- end of plan -->"
WHOLE, ALONE, LEFT_OUT = "the plan's rows", "other methods", "left out"  # the first column of each table
PLANNED = ("full", "diffprune")  # the methods that a plan's two rows are about


def accuracy(found: Sequence[Results], path: str, gpu: Gpu | None = None) -> str:
    """Tables of predicted over measured, each cell the least and the most of its rows."""
    stages, others = ranges(found, path, gpu)
    left_out = left_out_ranges(found, path, gpu)
    shown = [
        markdown_table(
            [{key: _range(value) if isinstance(value, list) else value for key, value in row.items()} for row in rows],
            columns,
        )
        for rows, columns in (
            (stages, [WHOLE, "rows", *STAGES]),
            (others, [ALONE, "rows", "prefill"]),
            (left_out, [LEFT_OUT, "model", "rows", "encode", "pruner", "prefill", "decode"]),
        )
        if rows
    ]
    return "\n".join(shown)


def ranges(
    found: Sequence[Results], path: str, gpu: Gpu | None = None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of the two tables, each value [least, most] of predicted over measured, empty where nothing was measured."""
    whole: dict[str, list[dict[str, float]]] = {}
    alone: dict[str, list[float]] = {}
    for results in found:
        card = card_of([results], gpu)
        for row in measured_rows(results, path):
            if row["method"] in PLANNED:
                where = f"{row['backbone']}, {_tokens(row)}, batch {row['batch']}"
                whole.setdefault(where, []).append(ratios(results, row, card, path))
        for row in compare(results, CALIBRATIONS[path], card, path):
            if row["method"] not in PLANNED:
                where = f"{row['backbone']}, {_tokens(row)}" + ("" if is_even(row) else " after cuts between layers")
                alone.setdefault(where, []).append(row["predicted_over_measured"])
    stages = [
        {WHOLE: where, "rows": len(some)}
        | {stage: _ends([one[stage] for one in some if stage in one]) for stage in STAGES}
        for where, some in sorted(whole.items())
    ]
    others = [{ALONE: where, "rows": len(some), "prefill": _ends(some)} for where, some in sorted(alone.items())]
    if not stages and not others:
        raise ValueError(f"there is no row of the {path} path to compare with; `diffprune profile` measures some")
    return stages, others


def left_out_ranges(found: Sequence[Results], path: str, gpu: Gpu | None = None) -> list[dict[str, Any]]:
    """Rows of the third table: what curves say that were fitted without the rows they are held against."""
    rows = [row for results in found for row in even_rows(results, path)]
    out: list[dict[str, Any]] = []
    for what, alike in (("one length at a batch", SHAPE), ("all of a model at a batch", SIZE)):
        models: dict[str, list[dict[str, float]]] = {}
        for row, one in zip(rows, held_out(found, path, card_of(found, gpu), alike), strict=True):
            name = f"{row['backbone']}, {row['precision']}" if "precision" in row else row["backbone"]
            models.setdefault(name, []).append(one)
        for name, some in sorted(models.items()):
            stages = {stage: _ends([one[stage] for one in some if stage in one]) for stage in STAGES if stage != "ttft"}
            if any(stages.values()):
                out.append({LEFT_OUT: what, "model": name, "rows": len(some), **stages})
    return out


def ratios(results: Results, row: dict[str, Any], gpu: Gpu, path: str) -> dict[str, float]:
    """Predicted over measured of each stage, by the plan for the shapes of the row's command."""
    buckets = recorded(results, "text-buckets")
    full, pruned, _ = plan(
        row["backbone"],
        gpu,
        image=picture_size(recorded(results, "image") or "336x336"),
        keep=row["keep"],
        num_text=row["num_text"],
        batch=row["batch"],
        path=path,
        text_buckets=[int(size) for size in buckets.split(",")] if buckets else TEXT_BUCKETS,
    )
    predicted = full if row["method"] == "full" else pruned
    keys = {stage: key for stage, key in STAGES.items() if predicted.get(key) and row.get(key)}
    return {stage: predicted[key] / row[key] for stage, key in keys.items()}


def read_profiles(files: Sequence[str | Path]) -> list[Results]:
    """What `diffprune profile` measured, a `ValueError` where a file is damaged or of small models."""
    found = [read_results(file) for file in files]
    for file, results in zip(files, found, strict=True):
        if re.search(r"--size[ =]tiny\b", results.command):  # of any of its commands
            raise ValueError(
                f"{file} was made at tiny size, and its rows are not of the models they name; give one that "
                "`diffprune profile` made without --size tiny"
            )
        for row in results.rows:
            if "prefill_ms" in row and (lacking := [key for key in MEASURED if not row.get(key, 0) > 0]):
                raise ValueError(
                    f"{file} has a row of {row.get('method')!r} without a measured {lacking[0]}; give a file as "
                    "`diffprune profile` wrote it"
                )
    return found


def recorded(results: Results, option: str) -> str:
    """The value of an option in the command that measured; empty where it has none."""
    found = re.search(rf"--{option}[ =](\S+)", results.command)
    return found[1] if found else ""


def _tokens(row: dict[str, Any]) -> str:
    return "all tokens" if row["method"] == "full" else f"{row['num_kept']} tokens"


def _ends(values: Sequence[float]) -> list[float]:
    """Least and most; nothing of none."""
    return [min(values), max(values)] if values else []


def _range(ends: Sequence[float]) -> str:
    """Least to most; a dash for none."""
    return f"{ends[0]:.2f} to {ends[1]:.2f}" if ends else "-"


def refresh(page: str, found: Sequence[Results]) -> str:
    """The page with the tables between its markers made anew."""
    before, _, rest = page.partition(START)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"the page has no lines {START.strip()} and {END}, between which the tables go")
    return f"{before}{START}\n{accuracy(found, 'fast')}\n{END}{after}"


def main(page: str, *files: str) -> None:
    """Refresh the page from the results files."""
    write_text(page, refresh(Path(page).read_text(encoding="utf-8"), read_profiles(files)))


if __name__ == "__main__":
    main(*sys.argv[1:])
