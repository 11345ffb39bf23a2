"""What studies over several models share: the command line, rows of two ways side by side, one results file of all."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import diffprune_lab
from diffprune.evaluate.answers import OTHERWISE, Answers
from diffprune.evaluate.rows import quality_rows
from diffprune.evaluate.session import Asked
from diffprune.results import write_results

Measured = tuple[list[dict[str, Any]], list[str]]  # rows of a model, and what must be said of it
ORIGIN = ("recipe", "choice")  # of a trained method's rows


def run(
    description: str | None,
    measure: Callable[[str, Asked], Measured],
    arguments: Sequence[str] | None = None,
    *,
    methods: str,
    keep: str,
) -> None:
    """Measure each model of the command line, and write the rows of all so far after each.

    Answers are written down as they come, beside the results file; started again, it goes on.

    Args:
        description: Of the command line.
        measure: Gives the rows of a model by its name and how it is asked.
        methods, keep: Defaults of the command line.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", action="append", required=True, help="NAME=FOLDER; may be repeated")
    add("--pruner", action="append", default=[], help="NAME=FOLDERS, as `diffprune eval --pruner` takes them")
    add("--methods", default=methods, help="comma-separated; saved pruners come along anyway")
    add("--keep", default=keep)
    add("--seeds", default="0,1,2")
    add("--questions", type=int, default=200, help="scored questions of each task")
    add("--batch-size", type=int, default=64)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--out", type=Path, required=True, help="results file to write")
    add("--commit", help="commit to record where there is no git checkout")
    given = vars(parser.parse_args(arguments))
    diffprune_lab.join()  # where it is not installed its tasks and models are known all the same
    models, out = given.pop("model"), given.pop("out")
    pruners = dict(one.split("=", 1) for one in given.pop("pruner"))
    rows: list[dict[str, Any]] = []
    notes = [f"{given['questions']} scored questions a task; the scenes tasks are stand-ins"]
    for name, folder in (one.split("=", 1) for one in models):
        own_out = out.parent / f"{out.stem}-{name}.json"
        methods = given["methods"] + (",diffprune-diverse" if name in pruners else "")  # by the same scorers
        asked = Asked(model=folder, pruner=pruners.get(name, "none"), out=own_out, **{**given, "methods": methods})
        own, said = measure(name, asked)
        rows, notes = rows + own, notes + said
        seeds = sorted({row["seed"] for row in rows if "seed" in row})
        write_results(out, name=out.stem, rows=rows, commit=given["commit"], seeds=seeds, notes="; ".join(notes))
        print(f"{name}: {len(own)} rows", *said, sep="\n  ", flush=True)


def rows_both_ways(
    answers: Sequence[Answers], *, key: str, ways: Sequence[str], origins: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Rows of methods that were each measured two ways; those of the second carry the `lead` of the first over them.

    Every percentage is of the full model measured the first way, whose answers come first.

    Args:
        answers: Of both, `OTHERWISE` behind a method's name telling the second.
        key: Under which a row says its way, which is one of the two `ways`.
        origins: Rows that say where trained methods come from.
    """
    full = answers[0]
    known = {row["method"]: {name: row[name] for name in ORIGIN if name in row} for row in origins if "method" in row}
    rows: list[dict[str, Any]] = []
    for method in dict.fromkeys(one.entry.method.removesuffix(OTHERWISE) for one in answers):
        some = [one for one in answers if one.entry.method.removesuffix(OTHERWISE) == method]
        for row in quality_rows(some, full, versus=method):
            way = ways[row["method"].endswith(OTHERWISE)]
            versus = {"versus": ways[0]} if "versus" in row else {}
            row.pop("rank", None)  # best of two ways is not best of the methods
            rows.append({**row, "method": method, key: way, **versus, **known.get(method, {})})
    return rows
