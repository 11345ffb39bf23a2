"""`diffprune train`: from pictures with captions to a saved pruner."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from diffprune.cli import announce, hush_loader, print_json, require_writable
from diffprune.methods.naming import check_names


def command(
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Values that win over the file, like optim.lr=1e-4.", metavar="KEY=VALUE")
    ] = None,
    config: Annotated[Path, typer.Option(help="YAML file of the run.")] = ...,  # type: ignore[assignment]
    out: Annotated[Path, typer.Option(help="Folder of the run and, in the end, of the pruner.")] = ...,  # type: ignore[assignment]
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the folder's last checkpoint.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what came out as JSON.")] = False,
) -> None:
    """Train a pruner on pictures with captions; the model it is for stays frozen.

    Several processes: `accelerate launch -m diffprune train ...`, with the same options. SIGTERM or Ctrl-C finishes the
    step, saves and leaves; --resume goes on after that, and after any crash, with the losses of an unbroken run.

    \b
    Examples:
      diffprune train --config configs/llava/diffprune_k64.yaml --out runs/llava-k64 optim.lr=1e-4
      diffprune train --config configs/llava/diffprune_k64.yaml --out runs/gumbel method.name=gumbel_ste budget.keep=128
      diffprune train --config configs/llava/diffprune_k64.yaml --out runs/llava-k64 --resume optim.lr=1e-4
    """
    from diffprune.config import load_config

    run = load_config(config, overrides or [])
    require_writable(out)

    check_names(run.method.name)
    announce(f"{run.backbone.name}, {run.method.name}: loading", quiet=as_json)
    from diffprune.train.run import train_pruner

    hush_loader()
    summary = train_pruner(run, out, resume=resume, quiet=as_json)
    if summary.pop("main"):
        if as_json:
            print_json(summary)
        else:
            print(describe(summary))
    if summary["ended"] == "stopped":
        raise typer.Exit(143)


def describe(summary: dict) -> str:
    """What came out, in a line or two."""
    steps = f"{summary['step']:,} of {summary['steps']:,} steps, {summary['samples_s']:.1f} samples/s"
    if summary["ended"] == "stopped":
        return f"stopped after {steps}; everything is saved, go on with --resume"
    best = summary["best"]
    found = warning = ""
    if best is not None:
        found = f"; best at step {best['step']}: hard top-K loss {best['hard']:.4f}, gap {best['gap']:+.4f}"
        chance = summary["random"]  # None where an older version ended the run
        if chance is not None and best["hard"] >= chance:
            warning = (
                f"\nno better than random choice, whose loss is {chance:.4f}: do not deploy it; give it "
                "more steps, another seed, or tau.start=auto or 0.25 (docs/training.md)"
            )
    early = ", ended early" if summary["ended"] == "early" else ""
    if summary["skipped"]:
        early += f", {summary['skipped']} steps not taken (gradient not finite)"
    return f"{steps}{early}{found}\nthe pruner: {summary['out']}{warning}"
