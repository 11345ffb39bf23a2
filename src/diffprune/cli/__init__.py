"""The command line: every file here is one subcommand, named like its file, and has a function `command`.

`main.py` finds them, so a new subcommand is a new file and nothing else. Files import torch, transformers and the rest
of the library inside `command`, which keeps `--help` quick. What several of them share is here.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from diffprune.atomic import require_plain
from diffprune.terminal import announce, announce_loading, describe_model, hush_loader, print_table, progress_bars

__all__ = [
    "OPTIONS_HELP",
    "BudgetsOption",
    "CommitOption",
    "DeviceOption",
    "JsonOption",
    "MethodOption",
    "ModelOption",
    "PrunerOption",
    "Wide",
    "announce",
    "announce_loading",
    "choose_device",
    "collector_at_rest",
    "describe_model",
    "hush_loader",
    "print_json",
    "print_table",
    "progress_bars",
    "require_file",
    "require_writable",
]

OPTIONS_HELP = "With options: 'NAME[OPTION=VALUE;OPTION=VALUE]', in quotes."  # of every option that takes a method
# Options that several subcommands have, each with one meaning.
PrunerOption = Annotated[str, typer.Option(help="Folder or hub id of a saved pruner, or none.")]
ModelOption = Annotated[
    str | None,
    typer.Option(help="Base model for --pruner none: a folder, a hub id or scenes-nano; default: scenes-llava."),
]
MethodOption = Annotated[
    str | None,
    typer.Option(
        help="Method for --pruner none, or one that takes a saved one's weights (diffprune methods); "
        f"default: full. {OPTIONS_HELP}"
    ),
]
BudgetsOption = Annotated[str, typer.Option(help="Comma-separated budgets: tokens (64) or shares (0.111).")]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda, ...; empty takes a GPU where there is one.")]
CommitOption = Annotated[str | None, typer.Option(help="Commit to record where there is no git checkout.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Wide = Annotated[bool, typer.Option("--wide", help="Every column of a table, however long its lines.")]


def print_json(value: Any) -> None:
    """Machine-readable output, and nothing else, on stdout."""
    is_unicode = (sys.stdout.encoding or "").lower().startswith("utf")  # else a sign that it lacks is a JSON escape
    print(json.dumps(value, indent=2, ensure_ascii=not is_unicode))


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


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """Inside, Python's garbage collector is off, for importing modules and loading a model.

    Both make hundreds of thousands of objects that stay, and it would look through them again and again for some that
    do not. Behind it they count as long-lived, so that the next passes over young objects do not meet them either.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():  # what somebody has set aside stays there
            gc.freeze()
            gc.unfreeze()  # which puts them into the oldest generation, unseen
        gc.enable()


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
