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
    "prefill_ms."
)
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
    return tuple(row.get(key) for key in ("name", "backbone", "method", "keep", "path", "batch", "num_text"))


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
    where = ", ".join(str(row[key]) for key in ("backbone", "method", "keep", "path") if key in row)
    return f"{where}, batch {row.get('batch')}, text {row.get('num_text')}"


def one_line(row: dict[str, Any]) -> str:
    """A row as it comes, short."""
    found = [f"{key} {row[key]:.2f}" for key in ("pruner_ms", "prefill_ms", "ttft_ms", "requests_s") if key in row]
    return f"{in_words(row)}: {row.get('error') or ', '.join(found)}"


BARS = (
    ("encode_ms", "vision", "#4c72b0"),
    ("pruner_ms", "pruner", "#dd8452"),
    ("splice_ms", "projector and splice", "#8c8c8c"),
    ("prefill_ms", "prefill", "#55a868"),
    ("rest_ms", "the rest, end to end", "#cccccc"),
)


def bar_parts(row: dict[str, Any]) -> dict[str, float]:
    """The stages of one row and what the end-to-end time has beyond them; they sum up to it unless stages overlap."""
    parts = {key: float(row.get(key) or 0.0) for key, _, _ in BARS[:-1]}
    return parts | {"rest_ms": max(0.0, row["ttft_ms"] - sum(parts.values()))}


def draw_bars(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Stacked bars of the time to the first token, one panel for each batch and text length."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    done = [row for row in rows if "ttft_ms" in row]
    panels = list(dict.fromkeys((row["batch"], row["num_text"]) for row in done))
    if not panels:
        return
    tallest = max(sum((row["batch"], row["num_text"]) == panel for row in done) for panel in panels)
    figure = Figure(figsize=(6.4 * len(panels), 1.5 + 0.3 * tallest), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (batch, num_text) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        shown = [row for row in done if (row["batch"], row["num_text"]) == (batch, num_text)][::-1]
        names = [f"{row['method']}, {row['path']}" for row in shown]
        left = [0.0] * len(shown)
        for key, label, color in BARS:
            widths = [bar_parts(row)[key] for row in shown]
            axes.barh(range(len(shown)), widths, left=left, color=color, label=label)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        for place, row in enumerate(shown):
            axes.text(left[place], place, f" {row['ttft_ms']:.1f}", va="center", fontsize=8)
        axes.set_yticks(range(len(shown)), names, fontsize=8)
        axes.set_xlabel("ms to the first token")
        axes.set_title(f"batch {batch}, {num_text} text tokens", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.12)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, ncols=len(BARS), loc="outside upper center", frameon=False)
    with replacing(path) as new:
        figure.savefig(new, dpi=120)
