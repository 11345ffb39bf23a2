"""Questions from a file: JSONL or parquet, one row for each, about a user's own pictures.

A row has `question`, `image` (a path, or bytes in parquet; a list for several; none for text alone) and `answer`,
`answers` or `choices`; it may have `id`, `task`, `metric`, `group`, `subset` and `turns`. Paths are relative to the
file. Pictures stay where they are until they are encoded.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from PIL import Image

from diffprune.backbones.processors import check_header, image_size, open_image
from diffprune.evaluate.sources import Questions
from diffprune.evaluate.task import METRICS, Question, Task
from diffprune.extras import MissingExtraError
from diffprune.json_files import parse_json, short
from diffprune.terminal import first_line

Row = Mapping[str, Any]
KEYS = ("image", "question", "answer", "answers", "choices", "id", "task", "metric", "group", "subset", "turns")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
ONE_LETTER = "Answer with the option's letter from the given choices directly."
MANY = 10  # answers from which on they are annotators', and agreement with them is scored
YES_NO = ("pope", "mme")


@dataclass(frozen=True, slots=True)
class StoredImage:
    """A picture inside a parquet file; equal bytes are one picture, wherever they are stored."""

    digest: str
    file: Path = field(compare=False)
    group: int = field(compare=False)
    row: int = field(compare=False)
    place: int = field(compare=False)

    def read(self) -> bytes:
        return _bytes_of(_as_list(_image_column(self.file, self.group)[self.row])[self.place])


@dataclass(frozen=True)
class FileQuestions(Questions):
    """Questions of a file."""

    path: Path = Path()

    @property
    def note(self) -> str:
        return f"questions of {self.path.name}"

    def open(self, images: Sequence[Any]) -> list[Image.Image]:
        return [_open(image) for image in images]

    def sizes_of(self, images: Sequence[Any]) -> list[tuple[int, int]]:
        return [image_size(image.read() if isinstance(image, StoredImage) else image) for image in images]

    def identity(self, image: Any) -> str:
        return image.digest if isinstance(image, StoredImage) else _digest(image.read_bytes())


def read_questions(path: Path) -> FileQuestions:
    """The questions of a file, checked: whatever is wrong with a row is told before anything is asked."""
    rows: list[tuple[str, Question, str, str]] = []  # task, question, metric, where
    ids: dict[str, str] = {}
    for number, given in enumerate(_rows(path), 1):
        where = f"{path}, row {number}"
        row = {key: value for key, value in given.items() if value is not None}
        question, metric = _question(row, path, where, number)
        if question.id in ids:
            raise ValueError(f"{where} has the id {question.id!r} of {ids[question.id]}; give each question its own")
        ids[question.id] = f"row {number}"
        rows.append((str(row.get("task", "")) or path.stem, question, metric, where))
    if not rows:
        raise ValueError(f"{path} holds no questions; write a line for each")
    tasks: dict[str, list[tuple[Question, str, str]]] = {}
    for task, question, metric, where in rows:
        tasks.setdefault(task, []).append((question, metric, where))
    found = tuple(_task(name, asked) for name, asked in tasks.items())
    if not any(question.images for _, question, _, _ in rows):
        raise ValueError(f"no row of {path} has a picture, so nothing can be dropped; put it into the column `image`")
    return FileQuestions(found, path)


# Rows ----------------------------------------------------------------------------------------------------------------


def _rows(path: Path) -> Iterator[Row]:
    if not path.is_file():
        raise ValueError(f"there is no data file {path}; give a .jsonl or .parquet file with a row for each question")
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
    elif path.suffix in (".jsonl", ".json"):
        with path.open("rb") as file:
            for number, line in enumerate(filter(bytes.strip, file), 1):
                try:
                    row = parse_json(line)
                except ValueError as error:
                    raise ValueError(f"{path}, row {number} is no JSON ({error}); write one object a line") from error
                if not isinstance(row, dict):
                    raise ValueError(f"{path}, row {number} is a {type(row).__name__}; write one object a line")
                yield row
    else:
        raise ValueError(f"{path} is neither .jsonl nor .parquet; write the questions as one of them")


def _parquet_rows(path: Path) -> Iterator[Row]:
    """Rows with `StoredImage` in place of a picture's bytes, so that no more than a row group is in memory."""
    file = _parquet(path)
    _image_column.cache_clear()  # the file may have been written anew
    names = [name for name in file.schema_arrow.names if name in KEYS]
    for group in range(file.num_row_groups):
        with _reading(path):
            rows = file.read_row_group(group, columns=names).to_pylist()
        for place, row in enumerate(rows):
            row |= {key: _whole(value) for key, value in row.items()}
            images = _as_list(row.get("image"))
            row["image"] = [
                image if isinstance(image, str) else _stored(image, path, group, place, number)
                for number, image in enumerate(images)
            ]
            yield row


def _whole(value: Any) -> Any:
    """A whole float as the integer that it was: a column of integers is one of floats where some are missing."""
    if isinstance(value, list):
        return [_whole(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _parquet(path: Path) -> Any:
    try:
        import pyarrow.parquet as parquet  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise MissingExtraError(
            "pyarrow, which reads parquet files, is not installed: run pip install 'diffprune[train]'"
        ) from None
    with _reading(path):
        return parquet.ParquetFile(path)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Inside, whatever pyarrow raises of a damaged file is one sentence that names it."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{path} is damaged or no parquet file: {first_line(error)}") from error


def _stored(image: Any, path: Path, group: int, row: int, place: int) -> Any:
    """A picture's bytes as a note of where they lie; a struct without bytes (as datasets are saved) has its path."""
    if isinstance(image, Mapping) and image.get("bytes") is None:
        return image.get("path")
    if not isinstance(_bytes_of(image), bytes):
        return image  # no picture, which is told with its row
    return StoredImage(_digest(_bytes_of(image)), path, group, row, place)


def _digest(content: bytes) -> str:
    return blake2b(content, digest_size=16).hexdigest()


def _bytes_of(image: Any) -> Any:
    return image["bytes"] if isinstance(image, Mapping) else image


@lru_cache(maxsize=2)
def _image_column(path: Path, group: int) -> list[Any]:
    with _reading(path):
        return _parquet(path).read_row_group(group, columns=["image"]).column("image").to_pylist()


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]


# One question --------------------------------------------------------------------------------------------------------


def _question(row: Row, path: Path, where: str, number: int) -> tuple[Question, str]:
    """A row as a question, and the name of its metric."""
    text = row.get("question")
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{where} has no question; write it as a text in the column `question`")
    accepted = tuple(_text(one, "answer", where) for one in _as_list(row.get("answers")))
    given = row.get("answer", accepted[0] if accepted else "")
    answer, prompt = _text(given, "answer", where), text
    if not answer.strip():
        raise ValueError(f"{where} has no answer; give `answer` or `answers`, beside `choices` too")
    options = row.get("choices", [])
    if not isinstance(options, list):
        raise ValueError(f"{where} has the choices {short(options)}; write a list of them")
    choices = tuple(_text(option, "choice", where) for option in options)
    if choices:
        answer = _letter(given, options, where)
        listed = "\n".join(f"{letter}. {option}" for letter, option in zip(LETTERS, choices, strict=False))
        prompt, accepted = f"{text}\n{listed}\n{ONE_LETTER}", ()
    metric = str(row.get("metric") or ("choice" if choices else "vqa" if len(accepted) >= MANY else "exact"))
    if metric in YES_NO:
        answer = answer.strip().lower()
    elif metric == "exact" and answer not in accepted:
        accepted = (answer, *accepted)
    question = Question(
        id=str(row.get("id", number)),
        prompt=prompt,
        answer=answer,
        answers=accepted,
        images=tuple(_image(image, path, where) for image in _as_list(row.get("image"))),
        choices=choices or None,
        subset=str(row.get("subset", "")),
        group=None if row.get("group") is None else str(row["group"]),
        turns=_turns(row.get("turns"), where),
    )
    _require_fit(question, metric, where)
    return question, metric


def _text(value: Any, what: str, where: str) -> str:
    """A text, or a number as one."""
    if value is None or isinstance(value, bool | bytes | list | Mapping) or value != value:
        raise ValueError(f"{where} has the {what} {short(value)}; write it as a text or a number")
    return str(value)


def _letter(answer: Any, choices: Sequence[Any], where: str) -> str:
    """The letter of the right option, which a row gives as the option itself, its letter or its number from 0."""
    if len(choices) > len(LETTERS):
        raise ValueError(f"{where} has {len(choices)} choices; give {len(LETTERS)} at the most")
    letters = list(LETTERS[: len(choices)])
    meant = {letter for letter, option in zip(letters, choices, strict=True) if answer in (option, str(option))}
    if answer in letters:
        meant.add(answer)
    if isinstance(answer, int) and 0 <= answer < len(choices):
        meant.add(letters[answer])
    if len(meant) > 1:
        way_out = "letter" if isinstance(answer, int) else "number from 0"
        raise ValueError(f"{where}: the answer {answer!r} may mean {' or '.join(sorted(meant))}; give its {way_out}")
    if not meant:
        raise ValueError(
            f"{where}: the answer {answer!r} is none of its {len(choices)} choices; give one, its letter or its number "
            "from 0"
        )
    return meant.pop()


def _turns(turns: Any, where: str) -> tuple[tuple[str, str], ...]:
    """Earlier questions and answers: [question, answer] each, or {"question", "answer"}."""
    found = []
    for turn in _as_list(turns):
        pair = (turn.get("question"), turn.get("answer")) if isinstance(turn, Mapping) else turn
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise ValueError(f"{where} has the turn {short(turn)}; write [question, answer] for each")
        found.append(tuple(pair))
    return tuple(found)


def _image(image: Any, path: Path, where: str) -> Any:
    """Where a picture lies; an error where it cannot be opened."""
    if isinstance(image, str):
        image = path.parent / image
    elif not isinstance(image, StoredImage):
        raise ValueError(f"{where} has the image {short(image)}; give a path, or bytes in a parquet file")
    try:
        check_header(image.read() if isinstance(image, StoredImage) else image)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    return image


def _open(image: Any) -> Image.Image:
    if not isinstance(image, StoredImage):
        return open_image(image)
    try:
        return open_image(image.read())
    except ValueError as error:
        raise ValueError(f"{image.file}, row {image.row + 1} of group {image.group}: {error}") from error


# Tasks ---------------------------------------------------------------------------------------------------------------


def _require_fit(question: Question, metric: str, where: str) -> None:
    if metric not in METRICS:
        raise ValueError(f"{where} has the metric {metric!r}; choose from {', '.join(METRICS)}")
    wrong = ""
    if metric in ("choice", "circular") and not question.choices:
        wrong = "needs `choices`"
    elif question.choices and metric not in ("choice", "circular"):
        wrong = "does not score `choices`: take choice or circular"
    elif metric in YES_NO and question.answer not in ("yes", "no"):
        wrong = f"needs yes or no, not {question.answer!r}"
    elif metric.startswith("vqa") and len(question.answers) < 4:
        wrong = f"compares with at least 4 annotators' `answers`, not {len(question.answers)}: take exact"
    if wrong:
        raise ValueError(f"{where}: the metric {metric!r} {wrong}")


def _task(name: str, asked: Sequence[tuple[Question, str, str]]) -> Task:
    metric, first = asked[0][1:]
    for _, other, where in asked:
        if other != metric:
            raise ValueError(
                f"{where} scores the task {name!r} by {other!r} and {first} by {metric!r}; give them two `task` names"
            )
    return Task(name, [question for question, _, _ in asked], METRICS[metric])
