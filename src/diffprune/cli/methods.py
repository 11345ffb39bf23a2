"""`diffprune methods`: every pruning method, where it works, what it needs and where it comes from."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from diffprune.cli import Wide, announce, print_json, print_table


def list_methods() -> list[dict[str, Any]]:
    """One dict per method, as `--json` prints it."""
    from diffprune.registry import METHODS

    found = []
    for name in METHODS.names():
        method = METHODS.get(name)
        found.append(
            {
                "name": name,
                "place": method.place,
                "needs": sorted(method.needs),
                "trained": method.trained,
                **dataclasses.asdict(method.card),
            }
        )
    return found


def command(
    wide: Wide = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
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
