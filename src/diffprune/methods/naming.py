"""Names of methods in a text, told apart and checked before torch is imported; `options` reads the rest of the text."""

from collections.abc import Iterable

from diffprune.registry import METHODS


def split_methods(text: str) -> list[str]:
    """The methods of a comma-separated text, each once, without empty ones; commas in brackets separate none."""
    parts, depth = [""], 0
    for letter in text:
        depth += {"[": 1, "]": -1}.get(letter, 0)
        if letter == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += letter
    return list(dict.fromkeys(part.strip() for part in parts if part.strip()))


def check_names(text: str, also: Iterable[str] = ()) -> None:
    """A `ValueError` for the first method of a comma-separated text that no file and no package declares.

    Args:
        also: Further names that a command knows, such as the labels of saved pruners.
    """
    for method in split_methods(text):
        METHODS.check(method.partition("[")[0].strip(), also)
