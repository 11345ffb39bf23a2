"""`diffprune eval`: methods and budgets side by side on the same questions, through the deployed path."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from diffprune.cli import (
    OPTIONS_HELP,
    Wide,
    announce_loading,
    choose_device,
    print_json,
    print_table,
    progress_bars,
    require_file,
)
from diffprune.methods.naming import check_names


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
            help="Comma-separated; saved pruners go by their label (their method's name) and come along anyway, and "
            "diffprune-diverse beside diffprune, or the other way round, is measured with the same weights; "
            f"`oracle` knows the boxes. {OPTIONS_HELP}"
        ),
    ] = "full",
    keep: Annotated[str, typer.Option(help="Comma-separated budgets: tokens (64) or shares (0.111).")] = "128,64,32",
    tasks: Annotated[
        str, typer.Option(help="A source of tasks for all of them (scenes), or a comma-separated list.")
    ] = "scenes",
    split: Annotated[
        str, typer.Option(help="Of the questions, as their source has them: train, validation or test.")
    ] = "test",
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
    wide: Wide = False,
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
    labels = [one.partition("=")[0].partition("@")[0] for one in pruner.split(",") if "=" in one]
    check_names(methods, also=["oracle", "blind", "downscale", *labels])
    announce_loading(f"{model if pruner == 'none' else pruner}, {methods}, keep {keep}", quiet=as_json)
    import torch

    from diffprune.evaluate.answers import answers_file, write_sheet
    from diffprune.evaluate.pruners import (
        ORACLE,
        load_pruners,
        measurements,
        needs_of,
        origins_of,
        parse_pruners,
        parse_seeds,
    )
    from diffprune.evaluate.rows import quality_rows
    from diffprune.evaluate.runner import Measurement, encode_questions, evaluate, make_sheet
    from diffprune.evaluate.sources import find_tasks
    from diffprune.methods.naming import split_methods
    from diffprune.results import write_results
    from diffprune.types import parse_budgets, require_distinct

    source, names = find_tasks(tasks)
    budgets, drawn, folders = parse_budgets(keep), parse_seeds(seeds) or [0], parse_pruners(pruner)
    require_distinct([*budgets, *(one.keep for one in folders if one.keep is not None)])
    if out is not None:
        require_file(out)
    where = choose_device(device)
    asked = source.build(names, split=split, count=questions, sizes=sizes)
    with progress_bars(quiet=as_json) as progress:
        vlm, saved = load_pruners(folders, model, where, throttled=throttled, names=split_methods(methods))
        wanted = list(dict.fromkeys([*split_methods(methods), *(one.label for one in saved)]))
        needs = needs_of(wanted, saved)
        if ORACLE in wanted:
            asked.oracle((), ())  # a source without one raises now, not after its pictures are encoded
        if versus and versus not in wanted:
            raise ValueError(f"--versus {versus!r} is not among the methods measured; choose from {', '.join(wanted)}")
        encoded = encode_questions(vlm, asked, needs=needs, batch_size=batch_size, progress=progress)
        planned = [one for name in wanted for one in measurements(name, budgets, drawn, vlm, encoded, saved)]
        if blind:
            planned.append(Measurement("blind", 1.0, 0, vlm.method, blind=True))
        answers = evaluate(vlm, encoded, planned, batch_size=batch_size, progress=progress)
    sheet = make_sheet(encoded, answers)
    rows = quality_rows(
        answers,
        answers[0],
        versus=versus or None,
        chance=sheet.chance,
        notes=sheet.notes,
        origins=origins_of(planned, saved),
    )
    if out is not None:
        note = encoded.questions.note
        write_results(
            out,
            name=out.stem,
            rows=rows,
            commit=commit,
            device="cpu" if vlm.base.device.type == "cpu" and torch.cuda.is_available() else None,
            seeds=list(dict.fromkeys([*drawn, *(one.seed for one in saved)])),
            notes=f"{questions} scored questions a task, {split} split" + (f"; {note}" if note else ""),
        )
        write_sheet(answers_file(out), sheet)
    if as_json:
        print_json(rows)
        return
    print_table(
        [row for row in rows if "task" in row and row["method"] in ("full", "blind")],
        ["method", "task", "score", "score_raw", "chance"],
        wide=wide,
    )
    print()
    print_table(
        [row for row in rows if "retention" in row],
        ["method", "keep", "retention", "retention_std", "ci95", "n_seeds", "unchanged"]
        + (["lead", "lead_ci95"] if versus else []),
        wide=wide,
    )
    nothing = [task for task, score in answers[0].score.items() if score == 0]
    if nothing:
        print(f"The full model has nothing right on {', '.join(nothing)}: not in the retention.")
