"""A method in one text: `fastv`, or with options `fastv[layer=3;budget=average]`. Read here and nowhere else.

Several are separated by commas, options by semicolons, the numbers of a list by commas: `pyramiddrop[layers=2,4,6]`. A
shell must be given all of it in quotes.
"""

import dataclasses
import difflib
import inspect
import numbers
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diffprune.methods.base import Pruner
from diffprune.methods.naming import split_methods as split_methods
from diffprune.nn import BlockSpec
from diffprune.nn.language import LanguageSpec
from diffprune.registry import METHODS

FORM = "write NAME, or with options NAME[OPTION=VALUE;OPTION=VALUE]"


@dataclass(frozen=True, slots=True)
class NamedMethod:
    """A known method with checked options.

    Args:
        label: The text as given: what results call it.
        name: As it is registered.
        options: Those given.
    """

    label: str
    name: str
    options: dict[str, Any]

    @property
    def kind(self) -> type[Pruner]:
        """The class of the method."""
        return METHODS.get(self.name)

    def build(self, *, block: BlockSpec | None = None, language: LanguageSpec | None = None, **more: Any) -> Pruner:
        """The method itself; `more` are options that give way to those of the text."""
        return build_method(self.name, block=block, language=language, **(more | self.options))


def require_weights(name: str) -> None:
    """An error for a learned method that is asked for by name alone: its scorer would be at its random start."""
    if METHODS.get(name).trained:
        raise ValueError(f"method {name!r} is learned and needs weights; give a saved one with --pruner")


def require_trainable(name: str, options: Mapping[str, Any]) -> None:
    """An error where a method of that name and options has nothing to train; no model is needed to tell."""
    kind = METHODS.get(name)
    if kind.deploys:
        raise ValueError(
            f"method {name!r} has nothing to train: it chooses by the weights of {kind.deploys!r}; train that one, and "
            "name this one when it is deployed"
        )
    if not kind.trained:
        raise ValueError(f"method {name!r} has nothing to train; choose a learned one")
    make_options(name, options)


def build_method(
    name: str, *, block: BlockSpec | None = None, language: LanguageSpec | None = None, **options: Any
) -> Pruner:
    """The method of that name, with its options checked against its own dataclass.

    Args:
        block: The kind of block the vision tower is made of, for methods that learn.
        language: The sizes of the language model, for methods that learn inside it.
        options: Of the method; `native`, whether it does as its release does, is taken by all: one without such an
            option has a single behaviour.
    """
    cls = METHODS.get(name)
    made = make_options(name, options)
    inside = {"language": language} if "language" in inspect.signature(cls.__init__).parameters else {}
    method = cls(made, block=block, **inside)
    method.name = name
    return method


def deployed_as(trained: Pruner, choice: Mapping[str, Any] | None = None, asked: str | None = None) -> Pruner:
    """A trained method as it chooses when it is deployed: by its own rule, by a saved choice, or as it is asked to.

    Args:
        trained: With its weights; another rule shares them.
        choice: Of a saved pruner: `name` (`diverse` is method `diffprune-diverse`) and its options. None: its own rule.
        asked: A method that takes those weights, with options in brackets, instead; a choice of the same rule gives
            the options that are not named.
    """
    saved = dict(choice or {})
    rule = f"{trained.name.partition('-')[0]}-{saved.pop('name')}" if saved else trained.name
    named = NamedMethod(rule, rule, {}) if asked is None else parse_method(asked)
    if named.name == trained.name and not named.options:
        return trained
    require_choice_of(named, trained.name)
    known = {field.name for field in dataclasses.fields(named.kind.Options)}
    shared = {key: value for key, value in dataclasses.asdict(trained.options).items() if key in known}
    options = {**shared, **(saved if named.name == rule else {}), **named.options}
    made: Any = build_method(named.name, block=trained.block, **options)
    made.scorer, made.trained_as = trained.scorer, (trained,)
    return made.to(next(trained.parameters()).device).eval()


def require_choice_of(named: NamedMethod, trained: str) -> None:
    """An error where that method does not choose by the weights of a trained one."""
    if (named.name, named.options) == (trained, {}) or is_choice_of(named.name, METHODS.get(trained)):
        return
    others = sorted(name for name in METHODS.names() if is_choice_of(name, METHODS.get(trained)))
    raise ValueError(
        f"weights of {trained!r} cannot be deployed as {named.label!r}; they go with "
        f"{', '.join([trained, *others])}: leave the method out for what was saved, or load the base model"
    )


def is_choice_of(name: str, trained: type[Pruner]) -> bool:
    """Whether that method is another choice by the weights of a trained one."""
    deploys = METHODS.get(name).deploys
    return bool(deploys) and METHODS.get(deploys) is trained


def make_options(name: str, options: Mapping[str, Any]) -> Any:
    """The method's `Options` of these values; a `ValueError` where it has no such option, or it not such a value."""
    cls = METHODS.get(name)
    known = [field.name for field in dataclasses.fields(cls.Options)]
    given = dict(options)
    if "native" not in known and isinstance(given.get("native"), bool):
        del given["native"]
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            all_known = ", ".join(known) or "none"
            hint = f"did you mean {near[0]} (of {all_known})?" if near else f"it takes {all_known}"
            raise ValueError(f"method {name!r} has no option {key[:80]!r}; {hint}")
    kinds = typing.get_type_hints(cls.Options)
    for key, value in given.items():
        arms = typing.get_args(kinds[key]) if isinstance(kinds[key], types.UnionType) else (kinds[key],)
        if not any(_fits(value, arm) for arm in arms):
            takes = " or ".join(_words(arm) for arm in arms)
            raise ValueError(f"option {key!r} of method {name!r} takes {takes}, not {str(value)[:80]!r}")
    preset = getattr(cls, "presets", {}).get(name, {})
    return cls.Options(**{**preset, **given})


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value may be given for an option of that type; of types without words of their own any may."""
    if typing.get_origin(kind) is Sequence:
        return isinstance(value, Sequence) and not isinstance(value, str | bytes)
    if kind in (int, float):
        return isinstance(value, numbers.Integral if kind is int else numbers.Real) and not isinstance(value, bool)
    return isinstance(value, kind) if kind in (bool, str, type(None)) else True


def parse_method(text: str) -> NamedMethod:
    """The method that the text names; a `ValueError` of one sentence where it, an option or a value is not known."""
    text = text.strip()
    name, bracket, rest = text.partition("[")
    name = name.strip()
    if not bracket:
        METHODS.get(name)
        return NamedMethod(text, name, {})
    if not rest.endswith("]") or "[" in rest or rest.count("]") > 1:
        raise ValueError(f"method {text!r} cannot be read; {FORM}")
    kinds = typing.get_type_hints(METHODS.get(name).Options)
    options: dict[str, Any] = {}
    for item in rest[:-1].split(";"):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not (key and equals and value):
            raise ValueError(f"{item.strip()!r} in method {text!r} is no option with a value; {FORM}")
        if key in options:
            raise ValueError(f"method {text!r} has option {key!r} twice; give it once")
        kind = kinds.get(key, bool if key == "native" else str)  # an unknown one is refused below, by its name
        try:
            options[key] = read_value(value, kind)
        except ValueError as error:
            raise ValueError(f"option {key!r} of method {name!r} takes {error}, not {value!r}") from None
    make_options(name, options)
    return NamedMethod(text, name, options)


def read_value(text: str, kind: Any) -> Any:
    """The text as a value of that type; a `ValueError` says in a few words what the type takes."""
    arms = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    for arm in sorted(arms, key=lambda arm: (float, str).index(arm) + 1 if arm in (float, str) else 0):  # widest last
        try:
            return _read_plain(text, arm)
        except (ValueError, KeyError):
            continue
    raise ValueError(" or ".join(_words(arm) for arm in arms))


def _read_plain(text: str, kind: Any) -> Any:
    if kind is type(None):
        return {"none": None}[text.lower()]
    if kind is bool:
        return {"true": True, "false": False}[text.lower()]
    if typing.get_origin(kind) is Sequence:
        (inner,) = typing.get_args(kind)
        return tuple(_read_plain(part, inner) for part in text.split(","))
    return kind(text)


def _words(kind: Any) -> str:
    if typing.get_origin(kind) is Sequence:
        return "numbers separated by commas"
    return {type(None): "none", bool: "true or false", int: "a whole number", float: "a number", str: "a text"}[kind]
