"""Arguments of public calls held against their annotations: a value of another kind is refused in one sentence.

Kinds alone are looked at, never the values of a tensor, so nothing waits for a device; nothing is checked while
`torch.compile` traces. What an annotation cannot say (a range, a name among several) is checked by the call itself.
"""

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)

LARGEST, INFINITE = 2**63, (float("inf"), -float("inf"))
PLAIN = {bool: "True or False", int: "a whole number", float: "a number", str: "a text", type(None): "None"}


def checked(call: Callable[P, R], *, but: tuple[str, ...] = ()) -> Callable[P, R]:
    """The call, which first refuses arguments of another kind than it is annotated with by a `ValueError`.

    Args:
        but: Arguments that it checks itself.
    """

    @cache
    def kinds() -> tuple[tuple[str, ...], dict[str, tuple[Any, ...]]]:  # annotations may name what is imported later
        hints = typing.get_type_hints(call)
        named = [parameter for parameter in inspect.signature(call).parameters.values() if parameter.kind not in (2, 4)]
        arms = {parameter.name: _arms(hints.get(parameter.name, Any)) for parameter in named}
        return tuple(arms), {name: found for name, found in arms.items() if Any not in found and name not in but}

    @wraps(call)
    def refusing(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.compiler.is_compiling():
            order, wanted = kinds()
            _refuse_others({**dict(zip(order, args, strict=False)), **kwargs}, wanted)
        return call(*args, **kwargs)

    return refusing


def checked_methods(*names: str, but: tuple[str, ...] = ()) -> Callable[[C], C]:
    """Class decorator: these methods are `checked`."""

    def change(cls: C) -> C:
        for name in names:
            setattr(cls, name, checked(getattr(cls, name), but=but))
        return cls

    return change


def shown(value: object) -> str:
    """A value in a few words, on one line."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"
    try:
        text = " ".join(ascii(value).split())
    except Exception:  # of the value's own __repr__
        text = "..."
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def _refuse_others(given: Mapping[str, object], wanted: Mapping[str, tuple[Any, ...]]) -> None:
    sizes: dict[str, int] = {}
    for name, value in given.items():
        arms = wanted.get(name)
        if arms is None or any(_fits(value, arm) for arm in arms):
            continue
        matching = [arm for arm in arms if _is_shaped(arm)] if isinstance(value, Tensor) else []
        if any(_has_shape(cast(Tensor, value), arm, sizes) for arm in matching):
            continue
        bound = ", ".join(f"{letter} = {size}" for letter, size in sizes.items())
        where = f" where {bound}" if bound and matching else ""
        raise ValueError(f"{name} is {shown(value)}; give {' or '.join(dict.fromkeys(map(_words, arms)))}{where}")


def _arms(kind: Any) -> tuple[Any, ...]:
    """The kinds of a union, one by one."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return tuple(arm for part in typing.get_args(kind) for arm in _arms(part))
    return (kind,)


def _fits(value: object, kind: Any) -> bool:
    """Whether a value is of that kind; tensors with a shape are left to `_has_shape`."""
    if _is_shaped(kind):
        return False
    origin = typing.get_origin(kind)
    if origin is typing.Literal:
        return isinstance(value, str) and value in typing.get_args(kind)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind is float:  # never NaN, and no int past what a float can hold
        return (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and (abs(value) < LARGEST or value in INFINITE)
        )
    plain = origin or kind
    if not isinstance(plain, type):
        return True
    if origin is not Sequence:
        return isinstance(value, plain)
    items = _arms(typing.get_args(kind)[0])
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str | bytes)
        and all(any(_fits(item, arm) for arm in items) for item in cast(Sequence[object], value))
    )


def _is_shaped(kind: Any) -> bool:
    return hasattr(kind, "dim_str")


def _has_shape(value: Tensor, kind: Any, sizes: dict[str, int]) -> bool:
    """Whether a tensor has the type and the axes of a jaxtyping annotation; letters are bound in `sizes`."""
    known = kind.dtypes  # no tuple where any type is fine
    if isinstance(known, tuple) and str(value.dtype).removeprefix("torch.") not in known:
        return False
    names = cast(str, kind.dim_str).split()
    if any(name.startswith(("...", "*")) for name in names):
        return True
    if len(names) != value.ndim:
        return False
    for name, size in zip(names, value.shape, strict=True):
        if name == "_" or (name.startswith("#") and size == 1):
            continue
        expected = int(name) if name.isdecimal() else sizes.setdefault(name.lstrip("#"), size)
        if expected != size:
            return False
    return True


def _words(kind: Any) -> str:
    """A kind as a reader of a message would say it."""
    if _is_shaped(kind):
        axes = ", ".join(cast(str, kind.dim_str).split())
        return f"a tensor [{axes}] ({kind.__name__.partition('[')[0]})"
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(map(repr, typing.get_args(kind)))
    plain = typing.get_origin(kind) or kind
    if plain is Sequence:
        return f"a list, each {' or '.join(map(_words, _arms(typing.get_args(kind)[0])))}"
    return PLAIN.get(plain, f"a {plain.__name__}" if isinstance(plain, type) else str(plain))
