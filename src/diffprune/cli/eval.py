"""`diffprune eval`: methods and budgets side by side on the same questions, through the deployed path."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diffprune.cli import OPTIONS_HELP, choose_device, print_json, print_table, progress_bars, require_writable

if TYPE_CHECKING:
    from diffprune.evaluate.native import Gallery, Run, Throttle
    from diffprune.methods.base import Pruner
    from diffprune.model import PrunedVLM

THROTTLED = "-throttled"  # behind the label of a pruner that is run as in training


@dataclass(frozen=True, slots=True)
class Given:
    """A saved pruner as `--pruner` names it: `FOLDER`, `LABEL=FOLDER` or `LABEL@KEEP=FOLDER`.

    Args:
        label: What it is listed as; its method's name where left out.
        keep: The only budget it is measured at; every one of `--keep` where left out.
    """

    folder: str
    label: str = ""
    keep: int | float | None = None

    @classmethod
    def parse(cls, text: str) -> Given:
        from diffprune.types import Budget

        name, equals, folder = text.rpartition("=")
        label, at, budget = name.partition("@")
        if not folder or (equals and not label):
            raise ValueError(f"--pruner {text!r} is no pruner; give FOLDER, LABEL=FOLDER or LABEL@KEEP=FOLDER")
        return cls(folder, label, Budget.parse(budget).keep if at else None)


@dataclass(frozen=True, slots=True)
class Saved:
    """A saved pruner, loaded. Of one label there may be several, from trainings with other seeds."""

    label: str
    keep: int | float | None
    seed: int
    pruner: Pruner
    throttle: Throttle | None = None


def command(
    pruner: Annotated[
        str,
        typer.Option(
            help="Comma-separated folders of saved pruners, or none for the base model. LABEL=FOLDER lists one under "
            "another name (the same several times: training seeds), LABEL@64=FOLDER measures it at that budget alone."
        ),
    ] = "none",
    model: Annotated[
        str, typer.Option(help="Base model for --pruner none: scenes-llava, scenes-nano, a folder or hub id.")
    ] = "scenes-llava",
    methods: Annotated[
        str,
        typer.Option(
            help="Comma-separated; saved pruners go by their label (their method's name) and come along anyway; "
            f"`oracle` knows the boxes. {OPTIONS_HELP}"
        ),
    ] = "full",
    keep: Annotated[str, typer.Option(help="Comma-separated budgets: tokens (64) or shares (0.111).")] = "128,64,32",
    tasks: Annotated[str, typer.Option(help="scenes (all ten) or a comma-separated list.")] = "scenes",
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "test",
    questions: Annotated[int, typer.Option(min=1, help="Scored questions per task.")] = 500,
    sizes: Annotated[
        str,
        typer.Option(help="Of the pictures: fixed (192 x 192), 384 or varying; empty takes the model's own, or fixed."),
    ] = "",
    seeds: Annotated[str, typer.Option(help="Comma-separated seeds for methods that draw at random.")] = "0,1,2",
    blind: Annotated[bool, typer.Option("--blind", help="Also ask without the picture (method `blind`).")] = False,
    throttled: Annotated[
        bool,
        typer.Option(
            "--throttled", help="Also run the saved pruners as in training (LABEL-throttled): nothing dropped."
        ),
    ] = False,
    versus: Annotated[
        str, typer.Option(help="A method whose lead over each other one is given, with a paired interval.")
    ] = "",
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
      diffprune eval --methods 'fastv,fastv[budget=average],holov[variant=paper]' --keep 224
      diffprune eval --pruner runs/a42,runs/a123,dedicated@64=runs/b64 --methods random --versus diffprune
    """
    import torch

    from diffprune.evaluate.answers import answers_file, quality_rows, write_sheet
    from diffprune.evaluate.native import Run, answer, evaluate, make_sheet, open_gallery, scenes_tasks, score_run
    from diffprune.methods.options import split_methods
    from diffprune.results import write_results
    from diffprune.types import parse_budgets, require_distinct
    from diffprune_lab.scenes import SPLITS
    from diffprune_lab.scenes.sizes import require_way

    names = scenes_tasks(tasks)
    if split not in SPLITS:
        raise ValueError(f"there is no split {split!r}; choose from {', '.join(SPLITS)}")
    if sizes:
        require_way(sizes)
    budgets = parse_budgets(keep)
    drawn = list(dict.fromkeys(_seed(text) for text in seeds.split(",") if text)) or [0]
    given = [Given.parse(text) for text in pruner.split(",") if text and text != "none"]
    require_distinct([*budgets, *(one.keep for one in given if one.keep is not None)])
    if out is not None:
        if out.is_dir():
            raise ValueError(f"--out {out} is a folder; name a file, such as {out / 'quality.json'}")
        require_writable(out.parent)
    where = choose_device(device)
    with progress_bars(quiet=as_json) as progress:
        vlm, saved = _load(given, model, where, throttled=throttled)
        wanted = list(dict.fromkeys([*split_methods(methods), *(one.label for one in saved)]))
        needs = _check_methods(wanted, saved)
        if versus and versus not in wanted:
            raise ValueError(f"--versus {versus!r} is not among the methods measured; choose from {', '.join(wanted)}")
        gallery = open_gallery(
            vlm,
            names,
            split=split,
            count=questions,
            sizes=sizes or None,
            needs=needs,
            batch_size=batch_size,
            progress=progress,
        )
        runs = [run for name in wanted for run in _runs(name, budgets, drawn, vlm, gallery, saved)]
        answers = evaluate(vlm, gallery, runs, batch_size=batch_size, progress=progress)
        if blind:
            said = answer(vlm, gallery, keep=1.0, blind=True, batch_size=batch_size)
            answers.append(score_run(gallery, Run(method="blind", keep=1.0, seed=0, pruner=vlm.method), said))
    sheet = make_sheet(gallery, answers)
    rows = quality_rows(answers, answers[0], versus=versus or None, chance=sheet.chance)
    if out is not None:
        write_results(
            out,
            name=out.stem,
            rows=rows,
            commit=commit,
            device="cpu" if vlm.base.device.type == "cpu" and torch.cuda.is_available() else None,
            seeds=list(dict.fromkeys([*drawn, *(one.seed for one in saved)])),
            notes=f"{questions} scored questions a task, {split} split; the scenes tasks are stand-ins"
            + ("" if gallery.sizes == "fixed" else f"; pictures of sizes {gallery.sizes}"),
        )
        write_sheet(answers_file(out), sheet)
    if as_json:
        print_json(rows)
        return
    print_table(
        [row for row in rows if "task" in row and row["method"] in ("full", "blind")],
        ["method", "task", "score", "score_raw", "chance"],
    )
    print_table(
        [row for row in rows if "retention" in row],
        ["method", "keep", "retention", "retention_std", "ci95", "n_seeds", "unchanged"]
        + (["lead", "lead_ci95"] if versus else []),
    )
    nothing = [task for task, score in answers[0].score.items() if score == 0]
    if nothing:
        print(f"The full model has nothing right on {', '.join(nothing)}: left out of the retention.")


def _seed(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"seed {text!r} is no whole number; give seeds as 0,1,2") from None


def _load(given: list[Given], model: str, device: str, *, throttled: bool) -> tuple[PrunedVLM, list[Saved]]:
    """The full model, and the saved pruners, all on the one base they must share."""
    from diffprune.loading import load_base
    from diffprune.model import PrunedVLM
    from diffprune.train.throttled import load_throttled, run_config

    if not given:
        base, processor = load_base(model)
        return PrunedVLM(base.to(device), processor, method="full"), []
    first = PrunedVLM.from_pretrained(given[0].folder)
    saved: list[Saved] = []
    for one in given:
        vlm = PrunedVLM.from_pretrained(one.folder, base=first.base, processor=first.processor)
        rules = [(each.positions, each.backbone.keeps_newlines, each.budget_rule) for each in (first, vlm)]
        if rules[0] != rules[1]:
            raise ValueError(
                f"{one.folder} was saved with other rules for positions, newlines or tiles ({rules[1]}) than "
                f"{given[0].folder} ({rules[0]}); measure them in two runs"
            )
        label, run = one.label or vlm.method.name, run_config(Path(one.folder))
        taken = [each.seed for each in saved if (each.label, each.keep) == (label, one.keep)]
        seed = run.seed if run is not None else len(taken)
        if seed in taken:
            raise ValueError(f"two pruners are listed as {label!r} with seed {seed}; give them labels: LABEL=FOLDER")
        saved.append(Saved(label, one.keep, seed, vlm.method))
        if throttled:
            pruner, throttle = load_throttled(Path(one.folder), vlm.method)
            saved.append(Saved(label + THROTTLED, one.keep, seed, pruner, throttle))
    first.base.to(device)
    return first.with_method("full"), saved


def _check_methods(names: list[str], saved: list[Saved]) -> frozenset[str]:
    """What the methods need of the encoder; an error where one is not known or has no weights."""
    from diffprune.methods.base import NEEDS
    from diffprune.methods.options import parse_method, require_weights

    needs = frozenset[str]().union(*(one.pruner.needs for one in saved))
    for name in names:
        if name != "oracle" and name not in {one.label for one in saved}:
            named = parse_method(name)
            require_weights(named.name)
            needs |= named.build().needs  # options may change them
    return needs & NEEDS


def _runs(
    name: str, budgets: list[int | float], seeds: list[int], vlm: PrunedVLM, gallery: Gallery, saved: list[Saved]
) -> list[Run]:
    """A method at every budget; one that draws at random or was trained more than once, with every seed."""
    from diffprune.evaluate.native import Run
    from diffprune.methods.options import parse_method

    if name == "full":
        return []  # always there
    own = [one for one in saved if one.label == name]
    if own:
        return [
            Run(name, keep, one.seed, one.pruner, one.throttle)
            for one in own
            for keep in (budgets if one.keep is None else [one.keep])
        ]
    if name == "oracle":
        return [Run(name, keep, 0, gallery.oracle()) for keep in budgets]
    named = parse_method(name)
    draws = "seed" in {field.name for field in dataclasses.fields(named.kind.Options)}
    drawn = [named.options["seed"]] if "seed" in named.options else seeds if draws else [0]
    settings: list[tuple[int, dict[str, Any]]] = [(seed, {"seed": seed} if draws else {}) for seed in drawn]
    return [
        Run(name, keep, seed, named.build(block=vlm.backbone.block, **options))
        for keep in budgets
        for seed, options in settings
    ]
