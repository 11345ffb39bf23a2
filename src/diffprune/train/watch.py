"""What a run shows while it is under way and leaves behind: a progress line, metrics.jsonl, TensorBoard, loss.png."""

import json
import logging
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from diffprune.atomic import replacing, write_text
from diffprune.json_files import parse_json, require_kind, short
from diffprune.terminal import clock, time_column
from diffprune.train.checkpointing import writing

METRICS, PLOT, BOARD = "metrics.jsonl", "loss.png", "tensorboard"
PLOTTED = {"train": ("loss", "tau"), "validation": ("throttled", "hard"), "start": ()}  # numbers of a record, by kind
LINE_SECONDS = 30.0  # between two lines where stderr is no terminal
Record = Mapping[str, Any]
logger = logging.getLogger("diffprune")


def peak_memory_gb() -> float:
    """The most memory used so far: the GPU's where there is one, else this process's."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


class Watch:
    """Takes the records of a run, one per step and one per validation.

    On a terminal a progress line moves; elsewhere a line is printed every half minute.

    Args:
        folder: Of the run; None watches silently, as processes other than the first do.
        steps: Of the whole run.
        start: The step the run goes on from; records after it, left by a run that was ended, are dropped.
        tensorboard: Also write curves for TensorBoard, where that is installed.
        quiet: Show nothing on stderr.
    """

    def __init__(
        self, folder: Path | None, *, steps: int, start: int = 0, tensorboard: bool = True, quiet: bool = False
    ) -> None:
        self.folder, self.steps, self.start = folder, steps, start
        self.console = Console(stderr=True, quiet=quiet or folder is None)
        self.live = self.console.is_terminal and not self.console.quiet
        columns = (
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=10),
            TextColumn("{task.description}"),
            time_column(),
        )
        self.progress = Progress(*columns, console=self.console, disable=not self.live)
        self.task = self.progress.add_task("", total=steps, completed=start)
        self.board = None
        if folder is None:
            return
        kept = read_metrics(folder, until=start) if start else []  # records before a first step are written anew
        before = "".join(json.dumps(one) + "\n" for one in kept)
        with writing(METRICS, folder):
            write_text(folder / METRICS, before)
            self.file = (folder / METRICS).open("a", encoding="utf-8")
        if tensorboard:
            with writing(BOARD, folder):
                self.board = open_board(folder / BOARD, start)

    def __enter__(self) -> "Watch":
        self.progress.start()
        self.began = self.printed = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()
        if self.folder is None:
            return
        with writing(METRICS, self.folder):  # a full disk refuses here again what it refused before
            self.file.close()
        if self.board is not None:
            with writing(BOARD, self.folder):
                self.board.close()

    def step(self, record: Record) -> None:
        """One optimiser step: step, loss, tau, lr, entropy, samples_s, memory_gb."""
        line = f"loss {record['loss']:.4f}, tau {record['tau']:.3f}, {record['samples_s']:.1f} samples/s"
        self.progress.update(self.task, completed=record["step"], description=line)
        now = time.monotonic()
        if not self.live and now - self.printed >= LINE_SECONDS:
            self.printed = now
            spent = now - self.began
            left = spent / (record["step"] - self.start) * (self.steps - record["step"])
            self.print_line(f"step {record['step']}/{self.steps}: {line}, {clock(spent)}, {clock(left)} left")
        self._keep(record, "train")

    def validation(self, record: Record) -> None:
        """One validation: step, throttled, hard, gap, random, best, and what went wrong as `warnings`."""
        losses = (
            f"throttled {record['throttled']:.4f}, hard top-K {record['hard']:.4f}, gap {record['gap']:+.4f}, "
            f"random choice {record['random']:.4f}"
        )
        self.print_line(f"step {record['step']}/{self.steps}: {losses}{' (best)' if record['best'] else ''}")
        for sentence in record.get("warnings", ()):
            self.print_line(f"warning: {sentence}")
        self._keep(record, "validation")

    def print_line(self, sentence: str) -> None:
        """A line on stderr."""
        self.console.print(sentence, highlight=False, soft_wrap=True)

    def _keep(self, record: Record, kind: str) -> None:
        if self.folder is None:
            return
        with writing(METRICS, self.folder):
            self.file.write(json.dumps({"kind": kind, **record}) + "\n")
            self.file.flush()
        if self.board is not None:
            with writing(BOARD, self.folder):
                for key, value in record.items():
                    if key not in ("step", "best", "warnings"):
                        self.board.add_scalar(f"{kind}/{key}", value, record["step"])


def open_board(folder: Path, start: int) -> Any:
    """A TensorBoard writer, or None where TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=start + 1 if start else None)


def read_metrics(folder: Path, *, until: int | None = None) -> list[dict[str, Any]]:
    """The run's records, up to a step; a line that is none, as one that was cut off, is passed over and named."""
    path = folder / METRICS
    if not path.is_file():
        return []
    records = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        try:
            record = parse_json(line)
            _check_record(record)
        except ValueError as error:
            if line.strip():
                logger.warning("line %d of %s is no record of a run (%s) and is passed over", number, path, error)
            continue
        if until is None or record["step"] <= until:
            records.append(record)
    return records


def _check_record(record: Any) -> None:
    """A `ValueError` where a record does not have the numbers that `plot_losses` draws."""
    require_kind(record, dict[str, Any], "it")
    require_kind(record.get("step"), int, "step")
    require_kind(record.get("kind"), str, "kind")
    if record["kind"] not in PLOTTED:
        raise ValueError(f"kind is {short(record['kind'])}")
    for key in PLOTTED[record["kind"]]:
        require_kind(record.get(key), float, key)


def plot_losses(folder: Path, records: Sequence[Record]) -> Path | None:
    """`loss.png`: the training loss, both validation losses and the temperature over the steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    trained = [record for record in records if record["kind"] == "train"]
    checked = [record for record in records if record["kind"] == "validation"]
    if not trained:
        return None
    steps = [record["step"] for record in trained]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.plot(steps, [record["loss"] for record in trained], color="0.7", linewidth=0.8, label="training")
    for key, label in (("throttled", "validation, throttled"), ("hard", "validation, hard top-K")):
        if checked:
            axes.plot([one["step"] for one in checked], [one[key] for one in checked], marker="o", label=label)
    axes.set_xlabel("optimiser step")
    axes.set_ylabel("caption loss")
    right = axes.twinx()
    right.plot(steps, [record["tau"] for record in trained], color="C3", linestyle=":", label="tau")
    right.set_ylabel("tau")
    lines = [*axes.get_lines(), *right.get_lines()]
    axes.legend(lines, [str(line.get_label()) for line in lines], frameon=False)
    path = folder / PLOT
    with writing(PLOT, folder), replacing(path) as new:
        figure.savefig(new, dpi=120)
    return path
