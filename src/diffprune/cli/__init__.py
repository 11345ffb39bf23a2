"""The command line: every file here is one subcommand, named like its file, and has a function `command`.

`main.py` finds them, so a new subcommand is a new file and nothing else. Files import torch, transformers and the rest
of the library inside `command`, which keeps `--help` quick. What several of them share is here.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diffprune.atomic import require_plain
from diffprune.results import Row, format_value

OPTIONS_HELP = "With options: 'NAME[OPTION=VALUE;OPTION=VALUE]', in quotes."  # of every option that takes a method


def print_json(value: Any) -> None:
    """Machine-readable output, and nothing else, on stdout."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(rows: Sequence[Row], columns: Sequence[str]) -> None:
    """Rows as a plain table that fits the terminal; cells wrap rather than being cut. A file gets wide lines."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 160)
    table = Table(box=box.SIMPLE, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=index == 0)  # the first column is the name to copy
    for row in rows:
        table.add_row(*(Text(format_value(row.get(column))) for column in columns))  # Text: no markup in names
    console.print(table)


def require_writable(folder: Path) -> None:
    """Make the folder where it is missing; a `ValueError`, before the work starts, where it cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"cannot write into {folder} ({error.strerror}); choose another folder with --out") from error


def require_file(path: Path) -> None:
    """A `ValueError`, before the work starts, where no plain file can be written at `path`."""
    require_plain(path)
    require_writable(path.parent)


def choose_device(text: str) -> str:
    """The device that is asked for, where it is there; a GPU where there is one and none is asked for."""
    import torch

    if not text:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=text)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device {text!r} cannot be used here ({reason}); try --device cpu") from None
    return text


@contextmanager
def progress_bars(*, quiet: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """A function to call with (stage, done, total); every stage is a bar on stderr with its time left.

    Where stderr is no terminal, a line is written when a stage is done.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # of its own loading: small models load in no time, and `quiet` means nothing on stderr
    bars: dict[str, TaskID] = {}
    console = Console(stderr=True, quiet=quiet)
    columns = (
        TextColumn("{task.description:<24}"),
        BarColumn(bar_width=32),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as progress:

        def update(stage: str, done: int, total: int) -> None:
            if stage not in bars:
                bars[stage] = progress.add_task(stage, total=total)
            progress.update(bars[stage], completed=done, total=total)
            if done == total and not console.is_terminal:
                console.print(f"{stage}: done", highlight=False)

        yield update
