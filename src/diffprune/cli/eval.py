"""`diffprune eval`: methods and budgets side by side on the same questions, through the deployed path."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from diffprune.cli import print_json, print_table, progress_bars, require_writable

if TYPE_CHECKING:
    from diffprune.evaluate.native import Gallery, Run
    from diffprune.methods.base import Pruner
    from diffprune.model import PrunedVLM


def command(
    pruner: Annotated[str, typer.Option(help="Folder of a saved pruner, or none for the base model.")] = "none",
    model: Annotated[
        str, typer.Option(help="Base model for --pruner none: scenes-llava, scenes-nano, a folder or hub id.")
    ] = "scenes-llava",
    methods: Annotated[
        str, typer.Option(help="Comma-separated; the saved pruner goes by its method's name, `oracle` knows the boxes.")
    ] = "full",
    keep: Annotated[str, typer.Option(help="Comma-separated budgets: tokens (64) or shares (0.111).")] = "128,64,32",
    tasks: Annotated[str, typer.Option(help="scenes (all ten) or a comma-separated list.")] = "scenes",
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "test",
    questions: Annotated[int, typer.Option(min=1, help="Scored questions per task.")] = 500,
    seeds: Annotated[str, typer.Option(help="Comma-separated seeds for methods that draw at random.")] = "0,1,2",
    blind: Annotated[bool, typer.Option("--blind", help="Also ask without the picture (method `blind`).")] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts per batch.")] = 64,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...; empty takes a GPU where there is one.")] = "",
    out: Annotated[Path | None, typer.Option(help="Results file to write; answers are kept beside it.")] = None,
    commit: Annotated[str | None, typer.Option(help="Commit to record where there is no git checkout.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """Measure what is left of a model's quality when tokens are dropped.

    The ten scenes tasks are stand-ins: procedural pictures, each scored with the metric of the benchmark it is named
    after. Retention is the mean over tasks of score / full model's score.

    \b
    Examples:
      diffprune eval --pruner none --tasks scenes
      diffprune eval --pruner runs/llava-k64 --methods full,diffprune,random --keep 128,64,32 --out results/x.json
    """
    import torch

    from diffprune.evaluate.native import (
        Run,
        answer,
        evaluate,
        open_gallery,
        quality_rows,
        save_answers,
        scenes_tasks,
        score_run,
    )
    from diffprune.results import write_results
    from diffprune.scenes import SPLITS
    from diffprune.types import Budget

    names = scenes_tasks(tasks)
    if split not in SPLITS:
        raise ValueError(f"there is no split {split!r}; choose from {', '.join(SPLITS)}")
    budgets = list(dict.fromkeys(Budget.parse(text).keep for text in keep.split(",") if text))
    drawn = list(dict.fromkeys(_seed(text) for text in seeds.split(",") if text)) or [0]
    wanted = [name for name in dict.fromkeys(methods.split(",")) if name]
    if out is not None:
        require_writable(out.parent)
    where = _device(device)
    with progress_bars(quiet=as_json) as progress:
        vlm, saved = _load(pruner, model, where)
        needs = _check_methods(wanted, saved)
        gallery = open_gallery(
            vlm, names, split=split, count=questions, needs=needs, batch_size=batch_size, progress=progress
        )
        runs = [run for name in wanted for run in _runs(name, budgets, drawn, vlm, gallery, saved)]
        answers = evaluate(vlm, gallery, runs, batch_size=batch_size, progress=progress)
        if blind:
            said = answer(vlm, gallery, keep=1.0, blind=True, batch_size=batch_size)
            answers.append(score_run(gallery, Run(method="blind", keep=1.0, seed=0, pruner=vlm.method), said))
    rows = quality_rows(answers, answers[0])
    chance = {task.name: task.chance for task in gallery.tasks}
    for row in rows:
        if "task" in row:
            row["chance"] = chance[row["task"]]
    if out is not None:
        write_results(
            out,
            name=out.stem,
            rows=rows,
            commit=commit,
            device="cpu" if vlm.base.device.type == "cpu" and torch.cuda.is_available() else None,
            seeds=drawn,
            notes=f"{questions} scored questions a task, {split} split; the scenes tasks are stand-ins",
        )
        save_answers(out.with_suffix(".answers.json"), gallery, answers)
    if as_json:
        print_json(rows)
        return
    print_table(
        [row for row in rows if "task" in row and row["method"] in ("full", "blind")],
        ["method", "task", "score", "score_raw", "chance"],
    )
    print_table(
        [row for row in rows if "retention" in row],
        ["method", "keep", "retention", "retention_std", "ci95", "n_seeds", "unchanged"],
    )
    nothing = [task for task, score in answers[0].score.items() if score == 0]
    if nothing:
        print(f"The full model has nothing right on {', '.join(nothing)}: left out of the retention.")


def _seed(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"seed {text!r} is no whole number; give seeds as 0,1,2") from None


def _device(text: str) -> str:
    """The device that is asked for, where it is there; a GPU where there is one and none is asked for."""
    import torch

    if not text:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.zeros(1, device=text)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device {text!r} cannot be used here ({reason}); try --device cpu") from None
    return text


def _load(pruner: str, model: str, device: str) -> tuple[PrunedVLM, dict[str, Pruner]]:
    """The full model, and the saved pruner's method under its name."""
    from diffprune.loading import load_base
    from diffprune.model import PrunedVLM

    if pruner == "none":
        base, processor = load_base(model)
        return PrunedVLM(base.to(device), processor, method="full"), {}
    loaded = PrunedVLM.from_pretrained(pruner)
    loaded.base.to(device)
    vlm = loaded.with_method("full")
    return vlm, {loaded.method.name: loaded.method}


def _check_methods(names: list[str], saved: dict[str, Pruner]) -> frozenset[str]:
    """What the methods need of the encoder; an error where one is not known or has no weights."""
    from diffprune.methods.base import NEEDS, require_weights
    from diffprune.registry import METHODS

    needs: frozenset[str] = frozenset()
    for name in names:
        if name in saved:
            needs |= saved[name].needs & NEEDS
        elif name != "oracle":
            require_weights(name)
            needs |= METHODS.get(name).needs & NEEDS
    return needs


def _runs(
    name: str, budgets: list[int | float], seeds: list[int], vlm: PrunedVLM, gallery: Gallery, saved: dict[str, Pruner]
) -> list[Run]:
    """A method at every budget; one that draws at random, with every seed."""
    from diffprune.evaluate.native import Run
    from diffprune.methods.base import build_method
    from diffprune.registry import METHODS

    if name == "full":
        return []  # always there
    if name == "oracle" or name in saved:
        method = gallery.oracle() if name == "oracle" else saved[name]
        return [Run(method=name, keep=keep, seed=0, pruner=method) for keep in budgets]
    draws = "seed" in {field.name for field in dataclasses.fields(METHODS.get(name).Options)}
    return [
        Run(name, keep, seed, build_method(name, block=vlm.backbone.block, **({"seed": seed} if draws else {})))
        for keep in budgets
        for seed in (seeds if draws else [0])
    ]
