"""One question about every picture of a folder, answered into a file of lines that a later run goes on from.

Every line is whole by itself: the picture, the question, the answer, and how it was made. A run that was ended anywhere
is started again by the same command; what is in the file is not asked again. Lines of another run are never added to.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffprune.atomic import require_plain
from diffprune.backbones.processors import open_image
from diffprune.json_files import add_lines, keep_lines, read_lines, require_same

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
            add_lines(out, [{"image": name, "answer": said, **run} for name, said in rows])
            added += len(pictures)
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
    way_out = "choose another file for --out"
    if not out.exists():
        try:
            add_lines(out, [])  # now, where it cannot be written, and not after the first batch
        except OSError as error:
            raise ValueError(f"cannot write to {out} ({error.strerror}); {way_out}") from error
        return set()
    try:
        rows, size = read_lines(out)
    except ValueError as error:
        raise ValueError(f"{error}, so no answer of `ask`; {way_out}") from error
    known = set()
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict) or not isinstance(row.get("image"), str):
            raise ValueError(f"line {number} of {out} is no answer of `ask`; {way_out}")
        require_same(out, {key: row.get(key) for key in run}, run, way_out=way_out)
        known.add(row["image"])
    keep_lines(out, size)
    return known
