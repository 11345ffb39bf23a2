"""Where each part of a file that grows comes from: its own commit and command, noted beside its answers."""

import json
from collections.abc import Sequence
from pathlib import Path

from diffprune.evaluate.answers import Sheet
from diffprune.evaluate.rows import Origins, place_of
from diffprune.results import command_line, source_commit, write_text

SUFFIX = ".origin"  # behind the name of an answers file


def note_origin(answers: Path, *, commit: str | None, **more: str) -> None:
    """Note beside an answers file the commit and the command that made it, and what else its rows are to say."""
    origin = {**more, "commit": commit or source_commit(), "command": command_line()}
    write_text(f"{answers}{SUFFIX}", json.dumps(origin))


def read_origins(files: Sequence[Path], sheets: Sequence[Sheet]) -> Origins:
    """Of every run what was noted beside its answers; those of before there were notes have none."""
    found = {}
    for file, sheet in zip(files, sheets, strict=True):
        note = Path(f"{file}{SUFFIX}")
        if note.is_file():
            origin = json.loads(note.read_text(encoding="utf-8"))
            found |= {place_of(one.entry): origin for one in sheet.answers[1:]}
    return found
