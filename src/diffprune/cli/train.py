"""`diffprune train`: from pictures with captions to a saved pruner."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from diffprune.cli import JsonOption, announce, hush_loader, print_json, require_writable
from diffprune.methods.naming import check_names

RUN_FILE = "run.yaml"  # of a run's folder, as `diffprune.config` has it, which is imported where it is used


def command(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Values that win over the file, like optim.lr=1e-4; with --resume the run's folder may stand here.",
            metavar="KEY=VALUE",
        ),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of the run; with --resume that of the folder.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the run and, in the end, of the pruner.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the folder's last checkpoint.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Train a pruner on pictures with captions; the model it is for stays frozen.

    Several processes: `accelerate launch -m diffprune train ...`, with the same options. SIGTERM or Ctrl-C finishes the
    step, saves and leaves. `--resume FOLDER` goes on after that, and after any crash, with the losses of an unbroken
    run; nothing has to be typed again, and optim.steps=MORE makes the run longer, also one that has ended.

    \b
    Examples:
      diffprune train --config configs/llava/diffprune_k64.yaml --out runs/llava-k64 optim.lr=1e-4
      diffprune train --config configs/your_captions.yaml --out runs/mine data.name=my-captions
      diffprune train --config configs/llava/diffprune_k64.yaml --out runs/gumbel method.name=gumbel_ste budget.keep=128
      diffprune train --resume runs/llava-k64
      diffprune train --resume runs/llava-k64 optim.steps=12000
    """
    from diffprune.config import load_config

    file, folder, changes = find_run(list(overrides or []), config, out, resume=resume)
    run = load_config(file, changes)
    check_names(run.method.name)
    require_writable(folder)
    announce(f"{run.backbone.name}, {run.method.name}: loading", quiet=as_json)
    from diffprune.train.run import train_pruner

    hush_loader()
    summary = train_pruner(run, folder, resume=resume, quiet=as_json)
    if summary.pop("main"):
        if as_json:
            print_json(summary)
        else:
            print(describe(summary))
    if summary["ended"] == "stopped":
        raise typer.Exit(143)


def find_run(words: list[str], config: Path | None, out: Path | None, *, resume: bool) -> tuple[Path, Path, list[str]]:
    """The config file, the folder and the overrides that a command line names; a word without "=" is a folder."""
    folders = [word for word in words if "=" not in word]
    changes = [word for word in words if "=" in word]
    if folders and (not resume or out is not None or len(folders) > 1):
        raise ValueError(
            f"{folders[-1]!r} is no KEY=VALUE; a folder stands there once, with --resume and without --out"
        )
    folder = Path(folders[0]) if folders else out
    if folder is None or (config is None and not resume):
        raise ValueError(
            "a run needs --config FILE and --out FOLDER, and one that goes on --resume FOLDER; configs/ has files to "
            "start from"
        )
    if config is not None:
        return config, folder, changes
    if not (folder / RUN_FILE).is_file():
        raise ValueError(
            f"{folder} holds no run ({RUN_FILE} is not there); start one with --config FILE --out {folder}"
        )
    return folder / RUN_FILE, folder, changes


def describe(summary: dict) -> str:
    """What came out, in a line or two."""
    steps = f"{summary['step']:,} of {summary['steps']:,} steps, {summary['samples_s']:.1f} samples/s"
    if summary["ended"] == "stopped":
        return f"stopped after {steps}; everything is saved, go on with: diffprune train --resume {summary['out']}"
    best = summary["best"]
    found = warning = ""
    if best is not None:
        found = f"; best at step {best['step']}: hard top-K loss {best['hard']:.4f}, gap {best['gap']:+.4f}"
        chance = summary["random"]  # None where an older version ended the run
        if chance is not None and best["hard"] >= chance:
            warning = (
                f"\nno better than random choice, whose loss is {chance:.4f}: do not deploy it; give it "
                "more steps, or another seed (docs/training.md)"
            )
    early = ", ended early" if summary["ended"] == "early" else ""
    if summary["skipped"]:
        early += f", {summary['skipped']} steps not taken (gradient not finite)"
    return f"{steps}{early}{found}\nthe pruner: {summary['out']}{warning}"
