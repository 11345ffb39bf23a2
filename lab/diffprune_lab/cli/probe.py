"""`diffprune probe`: the paper's probes on image classifiers, each with its results file and its figure."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer

from diffprune.cli import (
    OPTIONS_HELP,
    CommitOption,
    DeviceOption,
    JsonOption,
    Wide,
    announce,
    choose_device,
    hush_loader,
    print_json,
    print_table,
    progress_bars,
    require_writable,
)
from diffprune.methods.naming import check_names

SEEDS = "42,123,456,789,1000"
VLMS = ("scenes-llava", "scarce-llava", "scenes-nano")
SCORER_PROBES = ("coherence", "landscape", "alignment")  # they can be asked of these models' scorers too
TRAIN_SHARE = 0.25  # of --minutes, for training the classifier


def command(
    name: Annotated[
        str,
        typer.Argument(
            help="coherence, landscape, alignment, relevance, bias, qualitative, scaling, temperature, or all (the "
            "first four)."
        ),
    ],
    backbone: Annotated[
        str | None,
        typer.Option(
            help="deit-tiny (the default), deit-small or deit-base; for coherence, landscape and alignment also "
            "scenes-llava, scarce-llava or scenes-nano, with runs on it in --weights; for scaling scenes-qwen-s, -m or "
            "-l, comma-separated; default: all three."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for <name>.json; what it holds already is not done again.")] = Path(
        "results"
    ),
    figures: Annotated[Path | None, typer.Option(help="Folder for <name>.png; default: that of --out.")] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Parquet files with image, label and box; those called train... are for training."),
    ] = None,
    train_data: Annotated[
        str | None, typer.Option(help="Pictures to train on, where --data has only some to measure on.")
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            help="Folder or hub id of a DeiT or ViT; without it one is trained first. For scaling the folder of the "
            "trained models, for qualitative a saved pruner (default: scenes-llava-diffprune), for temperature and "
            "for vision-language models runs of `diffprune train`, comma-separated."
        ),
    ] = None,
    save_weights: Annotated[str | None, typer.Option(help="Folder to keep the classifier trained here.")] = None,
    size: Annotated[str, typer.Option(help="full, or tiny: a trial of seconds that measures nothing.")] = "full",
    device: DeviceOption = "",
    seeds: Annotated[
        str,
        typer.Option(
            help="Comma-separated; default: 42,123,456,789,1000, for scaling the first three; the tiny size takes "
            "the first."
        ),
    ] = "",
    methods: Annotated[
        str,
        typer.Option(help=f"Of scaling alone: comma-separated; default: all, three at the tiny size. {OPTIONS_HELP}"),
    ] = "",
    work: Annotated[
        Path | None, typer.Option(help="Of scaling: folder for scorers and answers; default: below --out.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Time for all; what is not done then is done next time.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start anew instead of adding to what --out holds.")] = False,
    commit: CommitOption = None,
    wide: Wide = False,
    as_json: JsonOption = False,
) -> None:
    """Ask one question of the paper, with intervals, and draw the figure.

    Without --weights a classifier is trained from scratch on the pictures first. Results grow seed by seed: a run that
    was cut short goes on where it stopped. `bias` needs neither pictures nor a backbone.

    \b
    Examples:
      diffprune probe bias --out results --figures docs/img
      diffprune probe coherence --backbone deit-tiny --out out/probe --size tiny --device cpu
      diffprune probe all --backbone deit-base --data tiny-imagenet-40 --minutes 9 --out results
      diffprune probe coherence --backbone scarce-llava --weights runs/a,runs/b --out results
      diffprune probe qualitative --out results --figures docs/img
      diffprune probe temperature --weights runs/scenes --out results --figures docs/img
      diffprune probe scaling --weights out/scaling/models --work out/scaling --out results --figures docs/img
    """
    given = SimpleNamespace(**locals())  # the options by name
    check_names(methods, also=["oracle"])
    announce(f"probe {name}: loading", quiet=as_json)
    import torch

    from diffprune.evaluate.pruners import parse_seeds
    from diffprune_lab.probes.bench import Bench
    from diffprune_lab.probes.deit import WIDTHS
    from diffprune_lab.probes.run import ON_BACKBONES, probe_module, run_probes
    from diffprune_lab.probes.settings import SIZES

    given.deadline = None if minutes is None else time.monotonic() + 60 * minutes
    if name in ("qualitative", "temperature"):
        return _model_probe(given)
    if name == "scaling":
        return _scaling(given)
    backbone = backbone or "deit-tiny"
    if backbone in VLMS and name in (*SCORER_PROBES, "all"):
        return _scorers(given)
    names = list(ON_BACKBONES) if name == "all" else [probe_module(name).NAME]
    if backbone not in WIDTHS:
        known = [*WIDTHS, *(VLMS if name in SCORER_PROBES else ())]
        raise ValueError(f"backbone {backbone!r} is none of {name}'s; choose from {', '.join(known)}")
    settings = choose_size(size, SIZES)
    drawn = tuple(parse_seeds(seeds or SEEDS))
    require_seeds(drawn)
    drawn = drawn[:1] if size == "tiny" else drawn
    if minutes is not None and minutes <= 0:
        raise ValueError(f"--minutes {minutes:g}: give time above 0")
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
            minutes=None if minutes is None else minutes * TRAIN_SHARE,
            device=choose_device(device),
            seeds=drawn,
            say=lambda text: None if as_json else print(text, file=sys.stderr),
        )
        found, is_complete = run_probes(
            names,
            bench,
            out,
            figures=figures or out,
            deadline=given.deadline,
            commit=commit,
            progress=progress,
        )
    if as_json:
        print_json(found if name == "all" else found[names[0]])
    else:
        for probe, rows in found.items():
            plain = [key for key in dict.fromkeys(key for row in rows for key in row) if key != "by_seed"]
            print_table(rows, plain, wide=wide)
            if rows:
                print(f"{len(rows)} rows in {out / probe}.json, drawn in {(figures or out) / probe}.png")
    if not is_complete:
        raise ValueError(f"the {minutes:g} minutes are over and some seeds are not done; run the same command again")


def require_seeds(seeds: Sequence[int]) -> None:
    """Refuse a run without seeds."""
    if not seeds:
        raise ValueError("no seed was named; give at least one seed, for example --seeds 42")


def choose_size(size: str, sizes: Mapping[str, Any]) -> Any:
    """The settings of a probe at this size."""
    if size not in sizes:
        raise ValueError(f"size {size!r} is not known; choose from {', '.join(sizes)}")
    return sizes[size]


def _model_probe(given: SimpleNamespace) -> None:
    """`diffprune probe qualitative` and `temperature`: they look at saved pruners, and train nothing."""
    from diffprune.results import write_results
    from diffprune_lab.probes import qualitative, temperature

    probe = {"qualitative": qualitative, "temperature": temperature}[given.name]
    settings = choose_size(given.size, probe.SIZES)
    figures = given.figures or given.out
    require_writable(given.out)
    require_writable(figures)
    hush_loader()
    picture, file = figures / f"{given.name}.png", given.out / f"{given.name}.json"
    rows, notes = probe.run(given.weights, settings, choose_device(given.device), picture)
    write_results(file, name=given.name, rows=rows, commit=given.commit, notes=notes)
    if given.as_json:
        print_json(rows)
    else:
        print_table(rows, list(rows[0]), wide=given.wide)
        print(f"{len(rows)} rows in {file}, drawn in {picture}")


def _scorers(given: SimpleNamespace) -> None:
    """`diffprune probe coherence`, `landscape` and `alignment` of trained scorers of a vision-language model."""
    from diffprune.evaluate.pruners import parse_seeds
    from diffprune_lab.probes import scorers

    names = list(SCORER_PROBES) if given.name == "all" else [given.name]
    settings = choose_size(given.size, scorers.SIZES)
    require_writable(given.out)
    hush_loader()
    bench = scorers.ScorerBench(
        [Path(folder) for folder in (given.weights or "").split(",") if folder],
        given.backbone,
        settings,
        device=choose_device(given.device),
        seeds=parse_seeds(given.seeds) if given.seeds else (),
        say=lambda text: None if given.as_json else print(text, file=sys.stderr),
    )
    if given.fresh:
        for probe in names:
            scorers.open_store(probe, bench, given.out).path.unlink(missing_ok=True)
    found = scorers.run_probes(names, bench, given.out, commit=given.commit)
    if given.as_json:
        rows = {probe: rows for probe, (_, rows) in found.items()}
        print_json(rows if given.name == "all" else rows[given.name])
        return
    for file, rows in found.values():
        hidden = ("by_seed", "digest")
        print_table(
            rows, [key for key in dict.fromkeys(k for row in rows for k in row) if key not in hidden], wide=given.wide
        )
        print(f"{len(rows)} rows in {file}")


def _scaling(given: SimpleNamespace) -> None:
    """`diffprune probe scaling`: it asks vision-language models, and answers lie in files of their own."""
    import shutil

    import torch

    from diffprune.evaluate.pruners import parse_seeds
    from diffprune.methods.naming import split_methods
    from diffprune_lab.probes import scaling, scaling_figure

    out: Path = given.out
    settings, tiny = choose_size(given.size, scaling.SIZES), given.size == "tiny"
    names = [name for name in (given.backbone or "").split(",") if name] or scaling.BACKBONES[: 1 if tiny else None]
    for name in names:
        if name not in scaling.BACKBONES:
            raise ValueError(f"backbone {name!r} is not of this probe; choose from {', '.join(scaling.BACKBONES)}")
    chosen = scaling.check_methods(split_methods(given.methods) if given.methods else scaling.METHODS[given.size])
    drawn = parse_seeds(given.seeds) if given.seeds else list(scaling.SEEDS)
    drawn = drawn[:1] if tiny and not given.seeds else drawn
    require_seeds(drawn)
    require_writable(out)
    folder = given.work or out / scaling.NAME
    if given.fresh:
        (out / f"{scaling.NAME}.json").unlink(missing_ok=True)
        for made in scaling.MADE:
            shutil.rmtree(folder / made, ignore_errors=True)
    if tiny:
        torch.set_num_threads(1)  # on tensors this small threads only wait for one another
    with progress_bars(quiet=given.as_json) as progress:
        rows, is_complete = scaling.run_parts(
            scaling.parts(names, chosen, drawn[:1] if tiny else drawn),
            out,
            weights=None if given.weights is None else Path(given.weights),
            work=folder,
            settings=settings,
            device=choose_device(given.device),
            tiny=tiny,
            deadline=given.deadline,
            commit=given.commit,
            say=lambda text: None if given.as_json else print(text, file=sys.stderr),
            progress=progress,
        )
    picture = (given.figures or out) / f"{scaling.NAME}.png"
    scaling_figure.draw(rows, picture)
    if given.as_json:
        print_json(rows)
    else:
        columns = ["backbone", "method", "pruned", "retention", "retention_std", "ci95", "lead", "lead_ci95", "n_seeds"]
        print_table([row for row in rows if "retention" in row], columns, wide=given.wide)
        print(f"{len(rows)} rows in {out / scaling.NAME}.json, drawn in {picture}")
    if not is_complete:
        raise ValueError("the minutes are over and some methods are not done; run the same command again")
