"""`diffprune probe`: the paper's probes on image classifiers, each with its results file and its figure."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from diffprune.cli import print_json, print_table, progress_bars, require_writable


def command(
    name: Annotated[
        str, typer.Argument(help="coherence, landscape, alignment, relevance, bias, or all (every one but bias).")
    ],
    backbone: Annotated[str, typer.Option(help="deit-tiny, deit-small or deit-base.")] = "deit-tiny",
    out: Annotated[Path, typer.Option(help="Folder for <name>.json; what it holds already is not done again.")] = Path(
        "results"
    ),
    figures: Annotated[Path | None, typer.Option(help="Folder for <name>.png; that of --out where left out.")] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Parquet files with image, label and box; those called train... are for training."),
    ] = None,
    train_data: Annotated[
        str | None, typer.Option(help="Pictures to train on, where --data has only some to measure on.")
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="Folder or hub id of a DeiT or ViT; without it one is trained first.")
    ] = None,
    save_weights: Annotated[str | None, typer.Option(help="Folder to keep the classifier trained here.")] = None,
    size: Annotated[str, typer.Option(help="full, or tiny: a trial of seconds that measures nothing.")] = "full",
    device: Annotated[str, typer.Option(help="cpu, cuda, ...; empty takes a GPU where there is one.")] = "",
    seeds: Annotated[str, typer.Option(help="Comma-separated; the tiny size takes the first.")] = (
        "42,123,456,789,1000"
    ),
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps of a scorer.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Pictures per step of a scorer's training.")] = None,
    cut: Annotated[int | None, typer.Option(min=1, help="Blocks that run before tokens are dropped.")] = None,
    noise: Annotated[str | None, typer.Option(help="What replaces a token: matched or unit.")] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Time for all; what is not done then is done next time.")
    ] = None,
    train_share: Annotated[float, typer.Option(help="Share of --minutes for training the classifier.")] = 0.5,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start anew instead of adding to what --out holds.")] = False,
    commit: Annotated[str | None, typer.Option(help="Commit to record where there is no git checkout.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """Ask one question of the paper, with intervals, and draw the figure.

    Without --weights a classifier is trained from scratch on the pictures first. Results grow seed by seed: a run that
    was cut short goes on where it stopped. `bias` needs neither pictures nor a backbone.

    \b
    Examples:
      diffprune probe bias --out results --figures docs/img
      diffprune probe coherence --backbone deit-tiny --out out/probe --size tiny --device cpu
      diffprune probe all --backbone deit-base --data tiny-imagenet-40 --minutes 9 --out results
    """
    import torch

    from diffprune.cli.eval import _device, _seed
    from diffprune.probes.bench import SIZES, Bench
    from diffprune.probes.deit import WIDTHS
    from diffprune.probes.run import ON_BACKBONES, probe_module, run_probes

    begun = time.monotonic()
    names = list(ON_BACKBONES) if name == "all" else [probe_module(name).NAME]
    if backbone not in WIDTHS:
        raise ValueError(f"backbone {backbone!r} is none of the probes'; choose from {', '.join(WIDTHS)}")
    if size not in SIZES:
        raise ValueError(f"size {size!r} is not known; choose from {', '.join(SIZES)}")
    settings = SIZES[size].changed(steps=steps, batch=batch, cut=cut, noise=noise)
    drawn = tuple(dict.fromkeys(_seed(text) for text in seeds.split(",") if text))
    if not 0 < len(drawn) <= settings.steps:
        raise ValueError(
            f"{len(drawn)} seeds for {settings.steps} steps of training; give at least one seed and --steps "
            f"{max(1, len(drawn))} or more"
        )
    drawn = drawn[:1] if size == "tiny" else drawn
    if minutes is not None and not (minutes > 0 and 0 < train_share < 1):
        raise ValueError(f"--minutes {minutes} and --train-share {train_share}: give time above 0 and a share below 1")
    require_writable(out)
    if size == "tiny":
        torch.set_num_threads(1)  # on tensors this small threads only wait for one another
    if fresh:
        for probe in names:
            (out / f"{probe}.json").unlink(missing_ok=True)
    with progress_bars(quiet=as_json) as progress:
        bench = Bench(
            backbone=backbone,
            settings=settings,
            data=data,
            train_data=train_data,
            weights=weights,
            save_weights=save_weights,
            minutes=None if minutes is None else minutes * train_share,
            device=_device(device),
            seeds=drawn,
            say=lambda text: None if as_json else print(text, file=sys.stderr),
        )
        found, is_complete = run_probes(
            names,
            bench,
            out,
            figures=figures or out,
            deadline=None if minutes is None else begun + 60 * minutes,
            commit=commit,
            progress=progress,
        )
    if as_json:
        print_json(found if name == "all" else found[names[0]])
    else:
        for probe, rows in found.items():
            plain = [key for key in dict.fromkeys(key for row in rows for key in row) if key != "by_seed"]
            print_table(rows, plain)
            print(f"{len(rows)} rows in {out / probe}.json, drawn in {(figures or out) / probe}.png")
    if not is_complete:
        raise ValueError(f"the {minutes:g} minutes are over and some seeds are not done; run the same command again")
