"""`diffprune methods`: every pruning method, where it works, what it needs and where it comes from."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import diffprune.methods
from diffprune.cli import JsonOption, Wide, announce, print_json, print_table
from diffprune.registry import METHODS

CATALOGUE = Path(diffprune.methods.__path__[0], "catalogue.json")  # made by `make docs`


def list_methods() -> list[dict[str, Any]]:
    """One dict per method, as `--json` prints it: own ones from the catalogue, the rest by importing them."""
    written = {one["name"]: one for one in json.loads(CATALOGUE.read_text(encoding="utf-8"))}
    return [written.get(name) or describe(name) for name in METHODS.known()]


def describe(name: str) -> dict[str, Any]:
    """What a method's class says of it."""
    method = METHODS.get(name)
    said = {"name": name, "place": method.place, "needs": sorted(method.needs), "trained": method.trained}
    return {**said, **dataclasses.asdict(method.card)}


def command(
    wide: Wide = False,
    as_json: JsonOption = False,
) -> None:
    """List the pruning methods.

    First how each works, then where it comes from. "needs" is what a method asks of the model besides the visual
    features, "budget" how it spends K, "licence" that of the original's code; "certainty" says how our rule was found:
    our own, from the paper's formula, from reading the release, or unofficial.

    \b
    Examples:
      diffprune methods
      diffprune methods --json
    """
    announce("reading the methods", quiet=as_json)
    found = list_methods()
    if as_json:
        print_json(found)
        return
    rows = [
        {**method, "needs": ", ".join(method["needs"]), "year": str(method["year"] or "")}  # a year has no comma
        for method in found
    ]
    print_table(rows, ["name", "place", "needs", "trained", "budget"], wide=wide)
    print()
    print_table(rows, ["name", "paper", "year", "licence", "certainty"], wide=wide)
    print("\nthe idea of each in a sentence: diffprune methods --json")
