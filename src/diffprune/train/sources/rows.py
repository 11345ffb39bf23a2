"""Rows of columns as samples; one that cannot be used is named, not fatal."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from diffprune.backbones.processors import open_image
from diffprune.config import DataConfig
from diffprune.train.feed import Broken, Sample

Row = Mapping[str, Any]
QUESTION = "question"  # a column that wins over data.prompt, where a row has one


def read_row(number: int, row: Row | ValueError, config: DataConfig, root: Path) -> Sample | Broken:
    """A row of columns as a sample, or what is wrong with it."""
    if isinstance(row, ValueError):
        return Broken(number, str(row))
    try:
        return Sample(
            id=number,
            picture=read_picture(row.get(config.image), config, root),
            question=_text(str(row.get(QUESTION) or config.prompt), "question"),
            answer=_caption(row.get(config.caption), config),
        )
    except ValueError as error:
        return Broken(number, str(error))


def _caption(value: object, config: DataConfig) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"the caption is {value!r}: column {config.caption!r} must hold a text")
    return _text(value, "caption").strip()


def _text(value: str, what: str) -> str:
    """The text itself, where all of it is characters: JSON can hold half of a surrogate pair, a tokenizer cannot."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"the {what} holds half a surrogate pair at {error.start}, which is no character") from None
    return value


def read_picture(value: Any, config: DataConfig, root: Path) -> Image.Image:
    """A picture from a file's name, a file's bytes, the hub's {"bytes", "path"}, or a decoded one."""
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, str) and value:
        return open_image(root / value)
    if isinstance(value, bytes | Image.Image):
        return open_image(value)
    raise ValueError(f"there is no picture: column {config.image!r} holds {value!r}")


def require_columns(rows: Iterable[Row | ValueError], config: DataConfig, where: Path | str) -> None:
    """Raise where no row at all has the picture's or the caption's column."""
    found = dict.fromkeys(key for row in rows if not isinstance(row, ValueError) for key in row)
    for column, option in ((config.image, "data.image"), (config.caption, "data.caption")):
        if column not in found:
            kind = "pictures" if option == "data.image" else "captions"
            raise ValueError(
                f"{where} has no column {column!r} with {kind}; it has {', '.join(found) or 'none'}: "
                f"name the right one with {option}=..."
            )
