"""How the scores of trained scorers are best used: choices side by side on the scenes tasks, in any world.

python -m diffprune_lab.studies.choice --list grid
python -m diffprune_lab.studies.choice --pruners A,B,C --split validation --methods diffprune,diffprune-diverse \
    --out out/pick.json
python -m diffprune_lab.studies.choice --best-of out/pick.json
python -m diffprune_lab.studies.choice --pruners A,B,C --methods 'diffprune,diffprune-diverse[beta=2],gots' --world 1 \
    --out out/choice_world1.json
"""

import argparse
import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import diffprune_lab
from diffprune.evaluate.answers import answers_file, write_sheet
from diffprune.evaluate.encoded import encode_questions
from diffprune.evaluate.pruners import load_pruners, measurements, needs_of, origins_of, parse_pruners
from diffprune.evaluate.rows import quality_rows
from diffprune.evaluate.runner import evaluate
from diffprune.evaluate.scoring import make_sheet
from diffprune.methods.options import split_methods
from diffprune.registry import METHODS
from diffprune.results import read_results, source_commit, write_results
from diffprune.types import parse_budgets
from diffprune_lab.scenes.source import ScenesQuestions
from diffprune_lab.scenes.tasks import TASKS, build_task

BETAS = (0.5, 1, 2, 3)
FEATURES = ("encoder", "scorer")
REACH = 3  # with the betas in the middle
DIVERSE = "diffprune-diverse"


def grid() -> list[str]:
    """Every setting of the diverse choice that is compared on the validation split, top-K before them."""
    plain = [f"beta={beta};features={of}" for of, beta in itertools.product(FEATURES, BETAS)]
    near = [f"beta={beta};features={of};reach={REACH}" for of, beta in itertools.product(FEATURES, BETAS[1:3])]
    return ["diffprune", *(f"{DIVERSE}[{setting}]" for setting in [*plain, *near])]


def rivals() -> list[str]:
    """Methods without training that drop before the language model; of two names for one rule the first."""
    names = [name for name in METHODS.names() if not METHODS.get(name).is_inside and not METHODS.get(name).trained]
    seen: dict[type, str] = {}
    for name in names:
        if name != "full":
            seen.setdefault(METHODS.get(name), name)
    return list(seen.values())


def best_choice(rows: Sequence[dict[str, Any]]) -> str:
    """The choice by our scorer with the highest retention, mean over the budgets; of equal ones the first."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if "retention" in row and row["method"].startswith("diffprune"):
            found.setdefault(row["method"], []).append(row["retention"])
    if not found:
        raise ValueError("no choice was measured, so none is the best; name some with --methods")
    return max(found, key=lambda name: statistics.fmean(found[name]))


def main(arguments: list[str] | None = None) -> None:
    """Answer the scenes tasks with every method asked for, and write the results file."""
    parser = argparse.ArgumentParser(prog="python -m diffprune_lab.studies.choice", description=main.__doc__)
    parser.add_argument("--pruners", default="none", help="comma-separated folders of saved pruners, or LABEL=FOLDER")
    parser.add_argument("--model", default="scenes-llava", help="where there is no pruner (default: %(default)s)")
    parser.add_argument("--methods", default="", help="comma-separated, options in brackets; `oracle` too")
    parser.add_argument("--list", choices=("grid", "rivals"), help="print settings of the choice, or methods, and end")
    parser.add_argument("--best-of", type=Path, help="print our best choice in that results file, and end")
    parser.add_argument("--keep", default="16,8,4", help="comma-separated budgets (default: %(default)s)")
    parser.add_argument("--split", default="test", choices=("validation", "test"))
    parser.add_argument("--world", type=int, default=0, help="seed of the world (default: %(default)s)")
    parser.add_argument("--tasks", default=",".join(TASKS), help="comma-separated (default: all)")
    parser.add_argument("--questions", type=int, default=500, help="scored questions a task (default: %(default)s)")
    parser.add_argument("--versus", default="", help="a method whose lead over each other one is given")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="results file; answers are kept beside it")
    parser.add_argument("--commit", help="commit to name in the file, where there is no git checkout")
    options = parser.parse_args(arguments)
    diffprune_lab.join()  # where the packages are not installed
    if options.list is not None:
        print("\n".join(grid() if options.list == "grid" else rivals()))
        return
    if options.best_of is not None:
        print(best_choice(read_results(options.best_of).rows))
        return
    if options.out is None:
        parser.error("--out: name the results file to write")
    commit, console = options.commit or source_commit(), Console()
    names, budgets = split_methods(options.methods), parse_budgets(options.keep)
    asked = tuple(
        build_task(name, options.split, options.questions, seed=options.world) for name in options.tasks.split(",")
    )
    vlm, saved = load_pruners(parse_pruners(options.pruners), options.model, options.device, names=names)
    wanted = list(dict.fromkeys(names or [one.label for one in saved]))
    encoded = encode_questions(
        vlm, ScenesQuestions(asked), needs=needs_of(wanted, saved), batch_size=options.batch_size
    )
    planned = [one for name in wanted for one in measurements(name, budgets, [0], vlm, saved)]
    answers = evaluate(vlm, encoded, planned, batch_size=options.batch_size)
    sheet = make_sheet(encoded.questions, answers)
    rows = quality_rows(answers, answers[0], versus=options.versus or None, origins=origins_of(planned, saved))
    notes = f"{options.questions} scored questions a task, {options.split} split, world {options.world}"
    seeds = list(dict.fromkeys(one.seed for one in saved))
    write_results(options.out, name=options.out.stem, rows=rows, seeds=seeds, commit=commit, notes=notes)
    write_sheet(answers_file(options.out), sheet)
    for row in rows:
        if "retention" in row:
            low, high = row["ci95"]
            console.print(
                f"{row['method']:50} {row['keep']!s:>4} {row['retention']:6.2f} ({low:.1f} to {high:.1f})", markup=False
            )


if __name__ == "__main__":
    main()
