"""One question about every picture of a folder, answered into a file of lines that a later run goes on from.

Every line is whole by itself: the picture, the question, the answer, and how it was made. A run that was ended anywhere
is started again by the same command; what is in the file is not asked again. Lines of another run are never added to.
"""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffprune.atomic import require_plain
from diffprune.backbones.processors import open_image

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif"})


@dataclass(frozen=True, slots=True)
class Summary:
    """How a run ended: answers that were there, answers that were added, and pictures that could not be read."""

    before: int
    added: int
    broken: dict[str, str]


def find_pictures(folder: Path) -> list[str]:
    """Names of the pictures in a folder and those below it, relative to it, sorted."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}; name a folder of pictures, or one picture with --image")
    files = (path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    names = sorted(path.relative_to(folder).as_posix() for path in files)
    if not names:
        raise ValueError(f"{folder} holds no picture; known endings are {', '.join(sorted(SUFFIXES))}")
    return names


def answer_folder(
    vlm: Any,
    folder: Path,
    out: Path,
    run: dict[str, Any],
    *,
    batch: int = 8,
    update: Callable[[int, int], None] = lambda done, total: None,
) -> Summary:
    """Ask every picture of the folder that the file holds no answer for.

    Args:
        run: What every line carries: the question, `max_new_tokens`, and how the model was made.
        batch: Pictures asked at a time.
        update: Called with the pictures done in this run and all it has to do.
    """
    if batch < 1:
        raise ValueError(f"--batch {batch} asks nothing; give at least 1")
    names = find_pictures(folder)
    known = read_answers(out, run)
    waiting = [name for name in names if name not in known]
    broken: dict[str, str] = {}
    added = 0
    update(0, len(waiting))
    with out.open("a", encoding="utf-8", newline="\n") as file:
        for start in range(0, len(waiting), batch):
            some = waiting[start : start + batch]
            pictures = list(_readable(folder, some, broken))
            if pictures:
                answers = vlm.generate(
                    [picture for _, picture in pictures],
                    [run["question"]] * len(pictures),
                    max_new_tokens=run["max_new_tokens"],
                    do_sample=False,
                )
                rows = zip((name for name, _ in pictures), answers, strict=True)
                lines = [json.dumps({"image": name, "answer": said, **run}, ensure_ascii=False) for name, said in rows]
                file.write("".join(line + "\n" for line in lines))
                file.flush()
                os.fsync(file.fileno())
                added += len(lines)
            update(start + len(some), len(waiting))
    return Summary(len(names) - len(waiting), added, broken)


def _readable(folder: Path, names: list[str], broken: dict[str, str]) -> Iterator[tuple[str, Any]]:
    for name in names:
        try:
            yield name, open_image(folder / name)
        except ValueError as error:
            broken[name] = str(error)


def read_answers(out: Path, run: dict[str, Any]) -> set[str]:
    """Pictures that the file holds answers of this run for; a line that was cut short is taken off its end."""
    require_plain(out)
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        return set()
    content = out.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    known = set()
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            row = json.loads(line)
            known.add(str(row["image"]))
            other = next((key for key in run if row.get(key) != run[key]), None)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"line {number} of {out} is no answer of `ask`; choose another file for --out") from error
        if other is not None:
            raise ValueError(
                f"{out} holds answers of another run ({other} is {row.get(other)!r} there and {run[other]!r} here); "
                "choose another file for --out"
            )
    if len(whole) < len(content):
        os.truncate(out, len(whole))
    return known
