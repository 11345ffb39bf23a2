"""`diffprune eval`: methods and budgets side by side on the same questions, through the deployed path."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diffprune.cli import (
    OPTIONS_HELP,
    BudgetsOption,
    CommitOption,
    DeviceOption,
    JsonOption,
    Wide,
    announce,
    announce_loading,
    choose_device,
    describe_model,
    print_json,
    print_table,
    progress_bars,
    require_file,
)
from diffprune.methods.naming import check_names
from diffprune.results import Row

if TYPE_CHECKING:
    from diffprune.evaluate.session import Outcome
    from diffprune.model import PrunedVLM


def command(
    pruner: Annotated[
        str,
        typer.Option(
            help="Comma-separated folders of saved pruners, or none for the base model. LABEL=FOLDER lists one under "
            "another name (the same several times: training seeds), LABEL@64=FOLDER measures it at that budget alone."
        ),
    ] = "none",
    model: Annotated[
        str | None,
        typer.Option(help="Base model for --pruner none: a folder, a hub id or scenes-nano; default: scenes-llava."),
    ] = None,
    methods: Annotated[
        str,
        typer.Option(
            help="Comma-separated; saved pruners go by their label (their method's name) and come along anyway, and "
            "diffprune-diverse beside diffprune, or the other way round, is measured with the same weights; "
            f"`oracle` knows the boxes, `downscale` is a smaller picture before the full model. {OPTIONS_HELP}"
        ),
    ] = "full",
    keep: BudgetsOption = "128,64,32",
    data: Annotated[
        Path | None,
        typer.Option(help="Your own questions instead of --tasks: a .jsonl or .parquet file, a row each."),
    ] = None,
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
    world_seed: Annotated[
        int, typer.Option(min=0, help="Of tasks that are drawn: another seed draws other pictures and questions.")
    ] = 0,
    seeds: Annotated[str, typer.Option(help="Comma-separated seeds for methods that draw at random.")] = "0,1,2",
    hard: Annotated[
        bool,
        typer.Option("--hard", help="Sum up once more over what the full model has right and `downscale` has wrong."),
    ] = False,
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
    hold: Annotated[int, typer.Option(min=1, help="Pictures whose features are in memory at a time.")] = 512,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer in tokens; default: 8, and 32 with --data.")
    ] = None,
    shard: Annotated[
        str, typer.Option(help="Answer a part, 0/4 to 3/4; `python -m diffprune.evaluate.join` puts parts together.")
    ] = "",
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Forget what was answered for --out before; default: go on with it.")
    ] = False,
    harness: Annotated[
        str, typer.Option(help="lmms: public benchmarks through lmms-eval, which poses the questions and judges.")
    ] = "",
    suite: Annotated[
        str,
        typer.Option(help="With --harness: paper, its ten benchmarks; --tasks names some, or the harness's others."),
    ] = "paper",
    include: Annotated[
        list[Path] | None, typer.Option(help="With --harness: a folder with further tasks of it; may be repeated.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="With --harness: the first rows of each benchmark alone.")
    ] = None,
    device: DeviceOption = "",
    out: Annotated[
        Path | None, typer.Option(help="Results file to write; answers are kept beside it, from the first batch on.")
    ] = None,
    commit: CommitOption = None,
    wide: Wide = False,
    as_json: JsonOption = False,
) -> None:
    """Measure what is left of a model's quality when tokens are dropped.

    Asks your own questions (--data), or tasks that a package brings. The ten scenes tasks are stand-ins: procedural
    pictures, each scored with the metric of the benchmark it is named after. Retention is the mean over tasks of score
    / full model's score. A run that was killed goes on where it was when it is started again.

    \b
    Examples:
      diffprune eval --pruner none --tasks scenes
      diffprune eval --pruner runs/llava-k64 --methods full,diffprune,random --keep 128,64,32 --out results/x.json
      diffprune eval --data q.parquet --pruner runs/llava-k64 --methods full,divprune,random --keep 64,0.1111
      diffprune eval --model MODEL --data q.jsonl --methods random,downscale --keep 0.3333 --hard --out results/q.json
      diffprune eval --methods 'fastv,fastv[budget=average],holov[variant=paper]' --keep 224
      diffprune eval --pruner runs/a42,runs/a123,dedicated@64=runs/b64 --methods random --versus diffprune
      diffprune eval --harness lmms --suite paper --pruner runs/llava-k64 --methods random --keep 64 --batch-size 16
    """
    given = dict(locals())  # the options, called as the settings they are for
    labels = [one.partition("=")[0].partition("@")[0] for one in pruner.split(",") if "=" in one]
    check_names(methods, also=["oracle", "blind", "downscale", *labels])
    given["model"] = model or "scenes-llava"
    named = given["model"] if pruner == "none" else pruner
    announce_loading(f"{named}, {methods}, keep {keep}", quiet=as_json)
    from diffprune.api import refuse_second_model
    from diffprune.evaluate.session import Asked, Session

    refuse_second_model(pruner, model)
    if out is not None:
        require_file(out)
    given["device"] = choose_device(device)
    settings = Asked(**{field.name: given[field.name] for field in fields(Asked) if field.name in given})
    of_harness = {"limit": limit is not None, "include": bool(include), "suite": suite != "paper"}
    if not harness and (odd := [name for name, is_given in of_harness.items() if is_given]):
        raise ValueError(f"--{odd[0]} is for --harness; leave it out")
    if harness:
        from diffprune.integrations.evaluation import HarnessRun

        found = HarnessRun(asked=settings, harness=harness, suite=suite, include=include or (), limit=limit).run()
        if found is None:  # the first of several processes has the answers
            return
        outcome = found
    else:
        session = Session(settings)

        def told(vlm: PrunedVLM) -> None:
            announce(describe_model(named, vlm.base, method=methods, keep=keep), quiet=as_json)

        with progress_bars(quiet=as_json) as progress:
            outcome = session.run(progress, told)
    if as_json:
        print_json(outcome.rows)
        return
    print_outcome(outcome, versus, wide=wide)


def print_outcome(outcome: Outcome, versus: str, *, wide: bool) -> None:
    """The tables of an evaluation, and what must be said beside them."""
    from diffprune.evaluate.hard import HARD

    rows = outcome.rows
    by_task = [row for row in rows if "task" in row]
    summaries = [_shown(row, versus) for row in rows if "retention" in row]
    if summaries:
        references = [row for row in by_task if row["method"] in ("full", "blind")]
        print_table(references, ["method", "task", "score", "score_raw", "chance"], wide=wide)
    else:  # nothing sums the others up
        columns = ["method", "keep", "seed", "task", "score", "first_token_kl", "first_token_same", "score_raw"]
        print_table(by_task, [column for column in columns if any(column in row for row in by_task)], wide=wide)
    columns = ["method", "keep", "retention", "retention_std", "ci95", *_lead_columns(versus), "n_seeds", "unchanged"]
    columns += ["first_token_kl", "first_token_same", "num_kept", "num_hard"]
    for some in ([row for row in summaries if (row.get("tasks") == HARD) is hard] for hard in (False, True)):
        if some:
            print()
            print_table(some, [column for column in columns if any(column in row for row in some)], wide=wide)
    nothing = [task for task, score in outcome.answers[0].score.items() if score == 0]
    if nothing:
        print(f"The full model has nothing right on {', '.join(nothing)}: not in the retention.")
    for sentence in outcome.sentences:
        print(f"{sentence[0].upper()}{sentence[1:]}.")


def _lead_columns(versus: str) -> list[str]:
    return [f"lead of {versus} over it", "ci95 of the lead"] if versus else []


def _shown(row: Row, versus: str) -> dict[str, Any]:
    """A summary row as the table has it: all of the full model's tokens by number, and whose lead it is."""
    shown = dict(row)
    if "lead" in row:
        shown |= dict(zip(_lead_columns(versus), (row["lead"], row["lead_ci95"]), strict=True))
    if row["method"] == "full" and "num_kept" in row:
        shown["keep"] = round(row["num_kept"], 1)  # a mean, where pictures differ in size
    if row.get("n_seeds", 1) < 2:
        shown.pop("retention_std", None)
    return shown
