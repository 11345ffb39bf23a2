"""The results file and the figure of a profile."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from diffprune.atomic import replacing
from diffprune.results import Results, command_line, device_name, read_results, source_commit, write_results

NOTES = (
    "Medians of `runs` calls after warm-up, CUDA events; ttft_ms by the clock, pixels on the device to token id on "
    "the host. The row full / eager is the stock model. tflops: language model, one request, causal attention counted "
    "half. floor_ms: what is longer, reading the language model's weights once at the measured copy bandwidth or the "
    "operations of the batch at the measured matrix rate; ratio_to_floor = prefill_ms / floor_ms. kv_bytes as "
    "allocated, kv_bytes_predicted in closed form. decode_tok_s: one step after the other, in an answer whose lengths "
    "were all seen before; decode_first_tok_s: in the first such answer. Methods inside the language model: on the "
    "eager path pruner_ms is the time of their choices, taken out of prefill_ms; on the fast path it is a part of "
    "prefill_ms. downscale: the full model on a picture made smaller; num_visual is what that one becomes, and so is "
    "num_kept, at most the budget."
)
ABOUT = ("name", "backbone", "method", "keep", "path", "precision")  # what a row is about, beside its sizes
NOT_RUN = "Not run for want of time: "


def save(
    path: Path,
    rows: Sequence[dict[str, Any]],
    *,
    device: str,
    commit: str | None,
    notes: str = NOTES,
    missing: Sequence[str] = (),
    earlier: Results | None = None,
) -> None:
    """The results file, in one step; with an earlier one, its rows that were not measured again come first.

    `missing` is what was not run, in words; it goes into the notes, with what neither this run nor the earlier one
    did.
    """
    name = None if device.startswith("cuda") or not torch.cuda.is_available() else "CPU"
    command = None
    if earlier is not None:
        again = {row_key(row) for row in rows}
        # Floors rest on the device row above them, so that of each run stays.
        rows = [row for row in earlier.rows if "path" not in row or row_key(row) not in again] + list(rows)
        done = {in_words(row) for row in rows if "path" in row}
        left = earlier.notes.partition(NOT_RUN)[2].removesuffix(".")
        missing = list(dict.fromkeys([*filter(None, left.split("; ")), *missing]))
        missing = [item for item in missing if item not in done]
        command = " && ".join(dict.fromkeys([*earlier.command.split(" && "), command_line()]))
    if missing:
        notes = f"{notes} {NOT_RUN}{'; '.join(missing)}."
    write_results(path, name=path.stem, rows=rows, command=command, commit=commit, device=name, seeds=[0], notes=notes)


def row_key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a row is about."""
    return tuple(row.get(key) for key in (*ABOUT, "batch", "num_text"))


def read_earlier(path: Path, *, device: str, commit: str | None) -> Results | None:
    """The earlier results that new rows join, of equal code and device; None where there are none yet."""
    if not path.exists():
        return None
    earlier = read_results(path)
    here = device_name() if device.startswith("cuda") or not torch.cuda.is_available() else "CPU"
    code = commit if commit is not None else source_commit()
    for what, old, new in (("device", earlier.device, here), ("commit", earlier.commit, code)):
        if old != new:
            raise ValueError(f"{path} is of {what} {old}, not {new}: drop --append, or give another --out")
    return earlier


def in_words(row: Mapping[str, Any]) -> str:
    """What a row is about, for a reader."""
    where = ", ".join(str(row[key]) for key in ABOUT if row.get(key) is not None)
    return f"{where}, batch {row.get('batch')}, text {row.get('num_text')}"


def one_line(row: dict[str, Any]) -> str:
    """A row as it comes, short."""
    found = [f"{key} {row[key]:.2f}" for key in ("pruner_ms", "prefill_ms", "ttft_ms", "requests_s") if key in row]
    return f"{in_words(row)}: {row.get('error') or ', '.join(found)}"


PATHS = {"eager": "#c9ced6", "fast": "#c0392b"}


def draw_bars(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Time to the first token of the first batch and text length: a bar for each method and path, as long as its label.

    Methods are in the order of their fast path; the lines at a bar's end are the quartiles of its calls, where a row
    has them. Other shapes are in the table.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    done = [row for row in rows if "ttft_ms" in row]
    if not done:
        return
    shape = done[0]["batch"], done[0]["num_text"]
    shown = {(row["method"], row["path"]): row for row in done if (row["batch"], row["num_text"]) == shape}
    paths = [name for name in PATHS if any(key[1] == name for key in shown)]

    def quickest(method: str) -> float:
        return shown.get((method, paths[-1]), shown.get((method, paths[0]), {})).get("ttft_ms", 0.0)

    methods = sorted({method for method, _ in shown}, key=quickest, reverse=True)
    figure = Figure(figsize=(6.9, 1.3 + 0.21 * len(methods) * len(paths)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for index, name in enumerate(paths):
        shift = (index - (len(paths) - 1) / 2) * -0.4
        for place, method in enumerate(methods):
            row = shown.get((method, name))
            if row is not None:
                low, high = row.get("ttft_quartiles", [row["ttft_ms"]] * 2)
                spread = [[row["ttft_ms"] - low], [high - row["ttft_ms"]]] if low < high else None
                label = f"{name} path" if place == 0 else None
                axes.barh(place + shift, row["ttft_ms"], 0.38, xerr=spread, capsize=2, color=PATHS[name], label=label)
                axes.text(high, place + shift, f" {row['ttft_ms']:.1f}", va="center", fontsize=8)
    axes.set_yticks(range(len(methods)), methods, fontsize=9)
    kept = sorted({row["num_kept"] for row in shown.values() if row["method"] != "full" and "num_kept" in row})
    words = f", {kept[0]} tokens kept" if len(kept) == 1 else ""
    axes.set_title(f"{done[0].get('backbone', '')}, batch {shape[0]}, {shape[1]} text tokens{words}", fontsize=10)
    axes.set_xlabel("ms to the first token")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.08, y=0.02)
    axes.legend(fontsize=9, frameon=False, loc="center right")
    with replacing(path) as new:
        figure.savefig(new, dpi=200)
