"""The signatures of docs/api.md: every public name with its parameters and the first line of its docstring."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

START, END = "<!-- signatures, made from the code -->", "<!-- end of signatures -->"
# Methods that a user calls; what else a class has is for those who extend it.
SHOWN = {
    "PrunedVLM": (
        "from_pretrained", "generate", "chat", "stream", "select", "prepare", "loss", "compile", "save_pretrained",
        "push_to_hub",
    ),
    "Budget": ("parse", "count"),
    "Pruner": (),
    "VisualTokens": (),
    "Selection": (),
    "ImageSelection": (),
    "Config": (),
}  # fmt: skip


def api_block() -> str:
    """Public names of the package, of `ops` and of `nn`, each as a heading of code with what it gives."""
    import diffprune
    import diffprune.nn
    import diffprune.ops
    from diffprune.config import load_config
    from diffprune.train.run import train_pruner

    parts = ["## Signatures", "", "Made by `make docs` from the code.", "", "```text"]
    for name in diffprune.__all__:
        if name in ("backbones", "methods"):
            parts += [f"dp.{name}() -> list[str]", f"    # Names of the {name} there are.", ""]
        elif name == "train":
            parts += [*entry("dp.train", train_pruner), *entry("diffprune.config.load_config", load_config)]
        elif name != "ops":
            parts += entry(f"dp.{name}", getattr(diffprune, name), SHOWN.get(name, ()))
    parts += ["```", ""]
    for package in ("ops", "nn"):
        module = getattr(diffprune, package)
        parts += ["```text", f"# diffprune.{package}", ""]
        for name in module.__all__:
            item = getattr(module, name)
            if callable(item) and not hasattr(item, "__args__"):
                parts += entry(f"{package}.{name}", item)
        parts += ["```", ""]
    return "\n".join(parts).rstrip() + "\n"


def entry(name: str, item: Any, methods: tuple[str, ...] = ()) -> Iterator[str]:
    """A signature and what it gives; of a class also the methods named."""
    yield signature(name, item)
    yield f"    # {first_line(item)}"
    yield ""
    for method in methods:
        found = inspect.getattr_static(item, method, None)
        if found is None:
            continue
        plain = found.__func__ if isinstance(found, classmethod | staticmethod) else found
        yield signature(f"{name}.{method}", plain, skip_first=not isinstance(found, staticmethod))
        yield f"    # {first_line(plain)}"
        yield ""


def signature(name: str, item: Callable[..., Any], *, skip_first: bool = False) -> str:
    """`name(parameters) -> result`, on several lines where one is too long."""
    found = inspect.signature(item)
    listed = [one for index, one in enumerate(found.parameters.values()) if not (skip_first and index == 0)]
    words: list[str] = []
    for one in listed:
        if one.kind is one.KEYWORD_ONLY and "*" not in words and not any(word.startswith("*") for word in words):
            words.append("*")
        words.append(parameter(one, item))
    result = (
        ""
        if found.return_annotation is found.empty or inspect.isclass(item)
        else f" -> {annotation(found.return_annotation)}"
    )
    line = f"{name}({', '.join(words)}){result}"
    if len(line) <= 100:
        return line
    return "\n".join([f"{name}(", *(f"    {word}," for word in words), f"){result}"])


def parameter(one: inspect.Parameter, item: Any) -> str:
    """A parameter with its type and default."""
    star = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
    kind = "" if one.annotation is one.empty else f": {annotation(one.annotation)}"
    if one.default is one.empty:
        return f"{star}{one.name}{kind}"
    default = "..." if dataclasses.is_dataclass(item) and "factory" in repr(one.default) else repr(one.default)
    return f"{one.name}{kind} = {default}"


def annotation(kind: Any) -> str:
    """A type as the source writes it."""
    text = kind if isinstance(kind, str) else inspect.formatannotation(kind)
    text = re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Z])", "", text)
    return re.sub(r"^ForwardRef\('(.*)'\)$", r"\1", text).replace("NoneType", "None")


def first_line(item: Any) -> str:
    """The first sentence of a docstring."""
    text = inspect.getdoc(item) or ""
    return text.partition("\n\n")[0].replace("\n", " ").strip()


def with_block(page: Path, block: str) -> str:
    """The page with the block between its markers made anew; at its end where it has none yet."""
    before, found, rest = page.read_text(encoding="utf-8").partition(START)
    after = rest.partition(END)[2] if found else "\n"
    head = before if found else before.rstrip() + "\n\n"
    return f"{head}{START}\n\n{block}\n{END}{after}"
