"""What kept tokens lose where they are numbered without gaps: original against packed positions, and writes the table.

    python -m diffprune_lab.studies.positions --model scenes-llava=scenes-llava --model scenes-qwen-m=WEIGHTS \\
        --pruner scenes-llava=runs/a,runs/b,runs/c --pruner scenes-qwen-m=runs/d,runs/e,runs/f \\
        --out results/scenes_positions.json

Every model answers the same questions twice. Percentages are of the full model at its own, original positions in both
cases: a model whose positions are three numbers is another one when it counts by one. Packed rows carry the `lead` of
the original ones over them. Answers are written down as they come, one file for each model and rule beside the results
file; started again, it goes on.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from diffprune.evaluate.answers import Answers
from diffprune.evaluate.rows import quality_rows
from diffprune.evaluate.session import Asked, Outcome, Session
from diffprune.fitting import POSITIONS
from diffprune.results import write_results

PACKED = " packed"  # behind a method's name while rows are made
ORIGIN = ("recipe", "choice")  # of a trained method's rows


def measure(name: str, asked: Asked) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of one model by both rules, with its name, and what must be said of it."""
    outcomes: dict[str, Outcome] = {}
    for rule in POSITIONS:
        assert asked.out is not None
        out = asked.out.with_name(f"{asked.out.stem}-{rule}.json")
        outcomes[rule] = Session(replace(asked, positions=rule, out=out)).run()
    return [{"backbone": name, **row} for row in joined_rows(outcomes)], [
        f"{name}: {sentence}" for sentence in dict.fromkeys(s for one in outcomes.values() for s in one.sentences)
    ]


def joined_rows(outcomes: dict[str, Outcome]) -> list[dict[str, Any]]:
    """Rows of both rules, each with its `positions`; every percentage is of the full model at original positions."""
    original, packed = (outcomes[rule] for rule in POSITIONS)
    full = original.answers[0]
    renamed = [replace(one, entry=replace(one.entry, method=one.entry.method + PACKED)) for one in packed.answers]
    methods = list(dict.fromkeys(one.entry.method for one in original.answers[1:]))
    rows: list[dict[str, Any]] = []
    for method in ["", *methods]:  # the full model first, by both rules
        some: list[Answers] = (
            [full, renamed[0]]
            if not method
            else [
                one for one in (*original.answers[1:], *renamed[1:]) if one.entry.method.removesuffix(PACKED) == method
            ]
        )
        rows += quality_rows(some, full, versus=method or full.entry.method)
    origins = {
        row["method"]: {key: row[key] for key in ORIGIN if key in row} for row in original.rows if "method" in row
    }
    out = []
    for row in rows:
        method = row["method"].removesuffix(PACKED)
        rule = POSITIONS[row["method"].endswith(PACKED)]
        more = {"versus": POSITIONS[0]} if "versus" in row else {}
        out.append({**row, "method": method, "positions": rule, **more, **origins.get(method, {})})
    return out


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", action="append", required=True, help="NAME=FOLDER; may be repeated")
    add("--pruner", action="append", default=[], help="NAME=FOLDERS, as `diffprune eval --pruner` takes them")
    add("--methods", default="random,divprune", help="comma-separated; saved pruners come along anyway")
    add("--keep", default="128,64,32")
    add("--seeds", default="0,1,2")
    add("--questions", type=int, default=200, help="scored questions of each task")
    add("--batch-size", type=int, default=64)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--out", type=Path, required=True, help="results file to write")
    add("--commit", help="commit to record where there is no git checkout")
    given = parser.parse_args(arguments)
    pruners = dict(one.split("=", 1) for one in given.pruner)
    rows: list[dict[str, Any]] = []
    notes = [f"{given.questions} scored questions a task; the scenes tasks are stand-ins"]
    for name, folder in (one.split("=", 1) for one in given.model):
        asked = Asked(
            model=folder,
            pruner=pruners.get(name, "none"),
            methods=given.methods,
            keep=given.keep,
            seeds=given.seeds,
            questions=given.questions,
            batch_size=given.batch_size,
            device=given.device,
            out=given.out.parent / f"{given.out.stem}-{name}.json",
            commit=given.commit,
        )
        own, said = measure(name, asked)
        rows, notes = rows + own, notes + said
        write_results(
            given.out,
            name=given.out.stem,
            rows=rows,
            commit=given.commit,
            seeds=sorted({row["seed"] for row in rows if "seed" in row}),
            notes="; ".join(notes),
        )
        print(f"{name}: {len(own)} rows", *said, sep="\n  ", flush=True)


if __name__ == "__main__":
    main()
