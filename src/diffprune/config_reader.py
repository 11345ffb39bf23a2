"""A strict reader: YAML and dotted overrides into frozen dataclasses, every key and type checked.

An unknown key is answered with the near one; a wrong value is a `ValueError` that names its dotted key.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal

import yaml

from diffprune.json_files import short


def _describe(kind: Any) -> str:
    """A type as a reader of an error message would say it."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " or ".join(_describe(part) for part in typing.get_args(kind))
    if typing.get_origin(kind) is Literal:
        return " or ".join(repr(choice) for choice in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return f"a list of {len(typing.get_args(kind))}"
    if typing.get_origin(kind) is dict:
        return "a mapping"
    return {int: "an integer", float: "a number", bool: "true or false", str: "a text", type(None): "null"}[kind]


def _matches(value: object, kind: Any) -> bool:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return any(_matches(value, part) for part in arguments)
    if origin is Literal:
        return value in arguments
    if origin is tuple:
        return isinstance(value, tuple) and len(value) == len(arguments) and all(map(_matches, value, arguments))
    if origin is dict:
        return isinstance(value, dict)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind is float:
        return isinstance(value, float) and math.isfinite(value)
    return isinstance(value, kind)


def coerce(kind: Any, value: object, key: str) -> Any:
    """`value` as `kind`; converted are lists to tuples and, where no int is asked for, ints to floats or choices."""
    if isinstance(value, list):
        value = tuple(value)
    if not _matches(value, kind) and isinstance(value, int) and not isinstance(value, bool):
        if _matches(0.0, kind):
            value = float(value)
        elif not _matches("", kind) and _matches(str(value), kind):  # a choice like "384", which YAML reads as a number
            value = str(value)
    if not _matches(value, kind):
        raise ValueError(f"{key} is {short(value)}: must be {_describe(kind)}")
    return value


def _unknown_key(key: str, known: Sequence[str]) -> ValueError:
    key = key if len(key) <= 80 else f"{key[:77]}..."
    near = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
    return ValueError(f"unknown key {key}; {hint}")


def build(cls: type, values: object, prefix: str = "") -> Any:
    """An instance of the dataclass `cls` from plain values, every key and type checked."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{prefix or 'the file'} is {short(values)}: must be a mapping of keys to values")
    kinds = typing.get_type_hints(cls)
    known = [item.name for item in dataclasses.fields(cls)]
    dot = f"{prefix}." if prefix else ""
    for key in values:
        if key not in known:
            raise _unknown_key(f"{dot}{key}", [f"{dot}{name}" for name in known])
    arguments: dict[str, Any] = {}
    for item in dataclasses.fields(cls):
        key = f"{dot}{item.name}"
        if item.name in values:
            convert = build if dataclasses.is_dataclass(kinds[item.name]) else coerce
            arguments[item.name] = convert(kinds[item.name], values[item.name], key)
        elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            raise ValueError(f"{key} is missing: add it to the file or give {key}=... on the command line")
    try:
        return cls(**arguments)
    except ValueError as error:  # a range check of the dataclass, which knows its own keys only
        raise ValueError(f"{dot}{error}") from None


# --- YAML -------------------------------------------------------------------------------------------------------------


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML that reads `1e-4` as a number and refuses a key given twice, and an alias.

    A dozen lines of aliases to aliases stand for a billion values. A config needs none: it names each value once.
    """

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise ValueError(
                f"the alias *{event.anchor} on line {event.start_mark.line + 1} is not taken; write the value out"
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=deep)
            if key in seen:
                raise ValueError(f"key {key} is given twice, again on line {key_node.start_mark.line + 1}")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


_StrictLoader.add_implicit_resolver(  # YAML 1.1 wants a dot in a float; people write 1e-4
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"{where} is not YAML: {' '.join(str(error).split())}") from error
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with the values of `over` laid on it, mappings merged key by key."""
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return merged


def parse_override(text: str) -> dict[str, Any]:
    """`"optim.lr=1e-4"` as `{"optim": {"lr": 0.0001}}`; the value is read as YAML."""
    if not isinstance(text, str):
        raise ValueError(f"override {short(text)} is no text of the form key.name=value, for example optim.lr=1e-4")
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ValueError(f"override {short(text)} is not of the form key.name=value, for example optim.lr=1e-4")
    nested: Any = parse_yaml(value, f"override {text!r}")
    for part in reversed(parts):
        nested = {part: nested}
    return nested
