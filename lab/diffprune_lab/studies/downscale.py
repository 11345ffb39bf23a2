"""What a smaller picture does against every method that drops tokens before the language model, and writes the table.

    python -m diffprune_lab.studies.downscale --model scenes-qwen-m=WEIGHTS --pruner scenes-qwen-m=runs/a,runs/b \\
        --model scenes-llava-next=WEIGHTS --out results/scenes_downscale.json

Of each model all questions and hard ones (right with the full model, wrong with the smaller picture). Answers are
written down as they come, one file for each model beside the results file; started again, it goes on.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from diffprune.evaluate.downscale import DOWNSCALE
from diffprune.evaluate.session import Asked, Session
from diffprune.registry import METHODS
from diffprune.results import read_results, write_results

SHARES = "0.3333,0.2222,0.1111"
CONTROLS = ("random", "uniform_grid")


def before_the_language_model() -> list[str]:
    """Methods without training that drop tokens before the language model, the controls first."""
    kinds = {name: METHODS.get(name) for name in METHODS.names()}
    found = [name for name, kind in kinds.items() if not kind.trained and kind.place != "inside the LLM"]
    return [*CONTROLS, *(name for name in found if name not in (*CONTROLS, "full"))]


def measure(name: str, asked: Asked) -> tuple[list[dict[str, Any]], list[str], list[int]]:
    """Rows of one model, with its name, what must be said of it, and the seeds in them.

    A method that does not fit the model is left out and named; so is `downscale` where no share is reached.
    """
    methods, said = asked.methods.split(","), []
    while True:
        try:
            outcome = Session(replace(asked, methods=",".join(methods))).run()
            break
        except ValueError as error:
            unfit = next(
                (method for method in methods if method != DOWNSCALE and method in str(error).split("'")), None
            )
            if unfit is None:
                raise
            methods.remove(unfit)
            said.append(f"{unfit} was not measured on {name}: {error}")
    assert asked.out is not None
    sentences = [f"{name}: {sentence}" for sentence in outcome.sentences]
    return [{"backbone": name, **row} for row in outcome.rows], said + sentences, read_results(asked.out).seeds


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", action="append", required=True, help="NAME=FOLDER; may be repeated")
    add("--pruner", action="append", default=[], help="NAME=FOLDERS, as `diffprune eval --pruner` takes them")
    add("--methods", default="", help="comma-separated; default: all before the language model that need no training")
    add("--keep", default=SHARES)
    add("--seeds", default="0,1,2")
    add("--questions", type=int, default=200, help="scored questions of each task")
    add("--batch-size", type=int, default=64)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--out", type=Path, required=True, help="results file to write")
    add("--commit", help="commit to record where there is no git checkout")
    given = parser.parse_args(arguments)
    methods = given.methods.split(",") if given.methods else before_the_language_model()
    pruners = dict(one.split("=", 1) for one in given.pruner)
    rows: list[dict[str, Any]] = []
    notes = [f"{given.questions} scored questions a task; the scenes tasks are stand-ins"]
    seeds: list[int] = []
    for name, folder in (one.split("=", 1) for one in given.model):
        asked = Asked(
            model=folder,
            pruner=pruners.get(name, "none"),
            methods=",".join([*methods, DOWNSCALE]),
            keep=given.keep,
            seeds=given.seeds,
            questions=given.questions,
            batch_size=given.batch_size,
            device=given.device,
            hard=True,
            versus=DOWNSCALE,
            out=given.out.parent / f"{given.out.stem}-{name}.json",
            commit=given.commit,
        )
        own, said, drawn = measure(name, asked)
        rows, notes, seeds = rows + own, notes + said, [*seeds, *drawn]
        write_results(
            given.out,
            name=given.out.stem,
            rows=rows,
            commit=given.commit,
            seeds=sorted(set(seeds)),
            notes="; ".join(notes),
        )
        print(f"{name}: {len(own)} rows", *said, sep="\n  ", flush=True)


if __name__ == "__main__":
    main()
