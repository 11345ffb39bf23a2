"""Versions of the libraries this one runs on: too old is an error, newer than what was tested a line of the log."""

from __future__ import annotations

import importlib.metadata
import logging
import re

logger = logging.getLogger("diffprune")

NEEDED = {"torch": (2, 8), "transformers": (5, 17)}  # as pyproject.toml has it
BEYOND = {"transformers": (5, 24)}  # the first that no test has run on


def numbers_of(version: str) -> tuple[int, int] | None:
    """The first two numbers of a version; None where it has none."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return None if found is None else (int(found[1]), int(found[2]))


def is_too_old(library: str, version: str) -> bool:
    """Whether that version lacks what is used here; one that says no number may have it."""
    numbers = numbers_of(version)
    return numbers is not None and numbers < NEEDED[library]


def check_version(name: str, version: str, least: tuple[int, int], beyond: tuple[int, int]) -> None:
    """A `ValueError` where a version is too old; a line of the log where it is none that was tested.

    Args:
        name: As people write it.
        least: The oldest that was tested.
        beyond: The first after those that were.
    """
    numbers = numbers_of(version)
    oldest, first_untested = (".".join(map(str, bound)) for bound in (least, beyond))
    if numbers is not None and numbers < least:
        raise ValueError(f"{name} {version} is too old: {oldest} is the oldest that was tested; update it")
    if numbers is None or numbers >= beyond:
        logger.warning(f"{name} {version} was not tested: versions from {oldest} to below {first_untested} were")


def check_transformers() -> None:
    """The same for the installed transformers, before it is imported."""
    version = importlib.metadata.version("transformers")
    check_version("transformers", version, NEEDED["transformers"], BEYOND["transformers"])
