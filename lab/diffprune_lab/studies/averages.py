"""Write the key `average` into the rows of a results file that was written before `diffprune eval` gave it.

    python -m diffprune_lab.studies.averages results/scenes_main.json --model scenes-llava

The number is derived, not measured: it follows from the model's layers, the tokens of a picture and each method's own
rule, with the options its name says. Nothing else of the file changes, and the answers beside it get it too.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from diffprune.evaluate.answers import answers_file, read_sheet, write_sheet
from diffprune.evaluate.runner import visual_average
from diffprune.loading import load_base
from diffprune.methods.options import parse_method
from diffprune.model import PrunedVLM
from diffprune.registry import METHODS
from diffprune.results import read_results, write_results
from diffprune_lab.scenes.encode import encode_scenes, own_sizes
from diffprune_lab.scenes.tasks import build_task

Rule = Callable[[str, int | float], float | None]  # of a method and a budget, as a row has them


def average_of(model: str) -> Rule:
    """The rule for a model whose pictures have one number of tokens, as all do that are drawn at one size."""
    vlm = PrunedVLM(*load_base(model))
    if own_sizes(vlm) == "varying":
        raise ValueError(f"pictures of {model} differ in their number of tokens; measure the file anew")
    backbone = vlm.backbone
    scene = build_task("gqa", "test", 1).questions[0].scene
    num_visual = encode_scenes(vlm, [scene], seeds=False, sizes=own_sizes(vlm)).tokens.counts.tolist()

    def rule(method: str, keep: int | float) -> float | None:
        if method.partition("[")[0] not in METHODS:  # a label of its own, the oracle
            return None
        built = parse_method(method).build(block=backbone.block, language=backbone.language)
        return visual_average(vlm.with_method(built, keep=keep), num_visual)

    return rule


def add_averages(path: Path, rule: Rule) -> int:
    """Add the key to every row that lacks it and for which the rule has a number; returns how many there were."""
    results = read_results(path)
    rows: list[dict[str, Any]] = []
    for row in results.rows:
        average = rule(row["method"], row["keep"]) if "method" in row and "average" not in row else None
        rows.append(row if average is None else row | {"average": average})
    changed = sum(new is not old for new, old in zip(rows, results.rows, strict=True))
    if not changed:
        return 0
    said = {key: getattr(results, key) for key in ("name", "command", "commit", "device", "seeds", "notes", "date")}
    write_results(path, rows=rows, versions=results.versions, **said)
    beside = answers_file(path)
    if beside.exists():
        sheet = read_sheet(beside)
        answers = [replace(one, average=rule(one.entry.method, one.entry.keep)) for one in sheet.answers]
        write_sheet(beside, replace(sheet, answers=answers))
    return changed


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line above."""
    parser = argparse.ArgumentParser(
        prog="python -m diffprune_lab.studies.averages", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("files", nargs="+", type=Path, help="results files of `diffprune eval`")
    parser.add_argument("--model", required=True, help="the model all of them were measured on")
    given = parser.parse_args(arguments)
    rule = average_of(given.model)
    for path in given.files:
        print(f"{path}: {add_averages(path, rule)} rows")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"error: {error}")
