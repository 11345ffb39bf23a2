"""JSON as it comes from outside, and files of JSON lines that a run adds to and a later run goes on from.

Whatever is wrong with a text is a `ValueError` of one line, which the reader of a file puts its name before.
"""

import json
import os
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def parse_json(content: str | bytes, *, constants: bool = True) -> Any:
    """The value of a JSON text in UTF-8, with a byte order mark or without.

    Args:
        constants: Take NaN and Infinity too, which Python writes and which are not part of JSON.
    """
    text = content.decode("utf-8-sig") if isinstance(content, bytes) else content
    try:
        value = json.loads(text, parse_constant=None if constants else _no_constant)
        if "\\u" in text:  # an escape can be half of a surrogate pair, which cannot be written or tokenized
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("it holds half a surrogate pair, which is no text") from None
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not part of JSON")


def read_json(path: Path) -> Any:
    """The value of a JSON file."""
    return parse_json(path.read_bytes())


# Lines ---------------------------------------------------------------------------------------------------------------


def read_lines(path: Path) -> tuple[list[Any], int]:
    """The values of a file's lines, and how many bytes these take.

    A last line that does not end was cut off while it was written. It is left out, and stays in the file until whoever
    reads it knows that the file is its own (`keep_lines`).
    """
    content = path.read_bytes()
    size = content.rfind(b"\n") + 1
    values = []
    for number, line in enumerate(content[:size].split(b"\n")[:-1], start=1):
        try:
            values.append(parse_json(line))
        except ValueError as error:
            raise ValueError(f"line {number} of {path} is no JSON ({error})") from error
    return values, size


def keep_lines(path: Path, size: int) -> None:
    """Take off a file's end what `read_lines` left out."""
    if size < path.stat().st_size:
        os.truncate(path, size)


def add_lines(path: Path, values: Iterable[Any]) -> None:
    """Put values at a file's end, a line each; they are on the disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write("".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values).encode("utf-8"))
        file.flush()
        os.fsync(file.fileno())


def require_same(path: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any], *, way_out: str) -> None:
    """A `ValueError` that names the first thing that differs where the answers in a file follow from something else.

    Args:
        theirs, ours: What the answers in the file follow from, and what new ones would.
        way_out: What to do then, the end of the sentence.
    """
    for key in dict.fromkeys([*ours, *theirs]):
        there, here = theirs.get(key, "not known"), ours.get(key, "not known")
        if there != here:
            raise ValueError(f"{path} holds answers with other {key} ({there!s:.80}; now {here!s:.80}); {way_out}")


# Types ---------------------------------------------------------------------------------------------------------------


def require_kind(value: Any, kind: Any, where: str) -> None:
    """A `ValueError` that names the first place where a JSON value is not of a type.

    Args:
        kind: str, bool, int, float (any finite number), None, Any, list[...], dict[str, ...] or a union of these.
        where: What the value is, in words.
    """
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if not any(_is(value, part) for part in parts):
            raise ValueError(f"{where} is {short(value)}, no {' or '.join(map(_name, parts))}")
        kind = next(part for part in parts if _is(value, part))
        return require_kind(value, kind, where)
    if not _is(value, kind):
        raise ValueError(f"{where} is {short(value)}, no {_name(kind)}")
    if Any in parts:
        return None  # whatever it holds
    if origin is list:
        for place, item in enumerate(value):
            require_kind(item, parts[0], f"{where}[{place}]")
    elif origin is dict:
        for key, item in value.items():
            require_kind(item, parts[1], f"{where}.{key}")
    return None


def _is(value: Any, kind: Any) -> bool:
    """Whether a value is of a type, what it holds aside."""
    kind = typing.get_origin(kind) or kind
    if kind is Any:
        return True
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300  # no inf, no NaN
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63
    return value is None if kind in (None, types.NoneType) else isinstance(value, kind)


def _name(kind: Any) -> str:
    kind = typing.get_origin(kind) or kind
    names = {str: "text", bool: "true or false", int: "whole number", float: "number", list: "list", dict: "object"}
    return names.get(kind, "null")


def short(value: Any) -> str:
    """A value as a message shows it."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."
