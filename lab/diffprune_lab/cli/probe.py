"""`diffprune probe`: the paper's probes on image classifiers, each with its results file and its figure."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from diffprune.cli import (
    OPTIONS_HELP,
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
    device: Annotated[str, typer.Option(help="cpu, cuda, ...; empty takes a GPU where there is one.")] = "",
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
    commit: Annotated[str | None, typer.Option(help="Commit to record where there is no git checkout.")] = None,
    wide: Wide = False,
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
      diffprune probe coherence --backbone scarce-llava --weights runs/a,runs/b --out results
      diffprune probe qualitative --out results --figures docs/img
      diffprune probe temperature --weights runs/scenes --out results --figures docs/img
      diffprune probe scaling --weights out/scaling/models --work out/scaling --out results --figures docs/img
    """
    check_names(methods)
    announce(f"probe {name}: loading", quiet=as_json)
    import torch

    from diffprune.evaluate.pruners import parse_seeds
    from diffprune_lab.probes.bench import Bench
    from diffprune_lab.probes.deit import WIDTHS
    from diffprune_lab.probes.run import ON_BACKBONES, probe_module, run_probes
    from diffprune_lab.probes.settings import SIZES

    begun = time.monotonic()
    if name in ("qualitative", "temperature"):
        return _model_probe(
            name, weights, out, figures or out, size=size, device=device, commit=commit, wide=wide, as_json=as_json
        )
    if name == "scaling":
        return _scaling(
            backbone,
            out,
            figures=figures,
            weights=weights,
            size=size,
            device=device,
            seeds=seeds,
            methods=methods,
            work=work,
            deadline=None if minutes is None else begun + 60 * minutes,
            fresh=fresh,
            commit=commit,
            wide=wide,
            as_json=as_json,
        )
    backbone = backbone or "deit-tiny"
    if backbone in VLMS and name in (*SCORER_PROBES, "all"):
        return _scorers(
            name,
            backbone,
            out,
            weights=weights,
            size=size,
            device=device,
            seeds=seeds,
            fresh=fresh,
            commit=commit,
            wide=wide,
            as_json=as_json,
        )
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
            deadline=None if minutes is None else begun + 60 * minutes,
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


def _model_probe(
    name: str,
    weights: str | None,
    out: Path,
    figures: Path,
    *,
    size: str,
    device: str,
    commit: str | None,
    wide: bool,
    as_json: bool,
) -> None:
    """`diffprune probe qualitative` and `temperature`: they look at saved pruners, and train nothing."""
    from diffprune.results import write_results
    from diffprune_lab.probes import qualitative, temperature

    probe = {"qualitative": qualitative, "temperature": temperature}[name]
    settings = choose_size(size, probe.SIZES)
    require_writable(out)
    require_writable(figures)
    hush_loader()
    picture, file = figures / f"{name}.png", out / f"{name}.json"
    rows, notes = probe.run(weights, settings, choose_device(device), picture)
    write_results(file, name=name, rows=rows, commit=commit, notes=notes)
    if as_json:
        print_json(rows)
    else:
        print_table(rows, list(rows[0]), wide=wide)
        print(f"{len(rows)} rows in {file}, drawn in {picture}")


def _scorers(
    name: str,
    backbone: str,
    out: Path,
    *,
    weights: str | None,
    size: str,
    device: str,
    seeds: str,
    fresh: bool,
    commit: str | None,
    wide: bool,
    as_json: bool,
) -> None:
    """`diffprune probe coherence`, `landscape` and `alignment` of trained scorers of a vision-language model."""
    from diffprune.evaluate.pruners import parse_seeds
    from diffprune_lab.probes import scorers

    names = list(SCORER_PROBES) if name == "all" else [name]
    settings = choose_size(size, scorers.SIZES)
    require_writable(out)
    hush_loader()
    bench = scorers.ScorerBench(
        [Path(folder) for folder in (weights or "").split(",") if folder],
        backbone,
        settings,
        device=choose_device(device),
        seeds=parse_seeds(seeds) if seeds else (),
        say=lambda text: None if as_json else print(text, file=sys.stderr),
    )
    if fresh:
        for probe in names:
            scorers.open_store(probe, bench, out).path.unlink(missing_ok=True)
    found = scorers.run_probes(names, bench, out, commit=commit)
    if as_json:
        rows = {probe: rows for probe, (_, rows) in found.items()}
        print_json(rows if name == "all" else rows[name])
        return
    for file, rows in found.values():
        hidden = ("by_seed", "digest")
        print_table(
            rows, [key for key in dict.fromkeys(k for row in rows for k in row) if key not in hidden], wide=wide
        )
        print(f"{len(rows)} rows in {file}")


def _scaling(
    backbone: str | None,
    out: Path,
    *,
    figures: Path | None,
    weights: str | None,
    size: str,
    device: str,
    seeds: str,
    methods: str,
    work: Path | None,
    deadline: float | None,
    fresh: bool,
    commit: str | None,
    wide: bool,
    as_json: bool,
) -> None:
    """`diffprune probe scaling`: it asks vision-language models, and answers lie in files of their own."""
    import shutil

    import torch

    from diffprune.evaluate.pruners import parse_seeds
    from diffprune.methods.naming import split_methods
    from diffprune_lab.probes import scaling, scaling_figure

    settings, tiny = choose_size(size, scaling.SIZES), size == "tiny"
    names = [name for name in (backbone or "").split(",") if name] or scaling.BACKBONES[: 1 if tiny else None]
    for name in names:
        if name not in scaling.BACKBONES:
            raise ValueError(f"backbone {name!r} is not of this probe; choose from {', '.join(scaling.BACKBONES)}")
    chosen = scaling.check_methods(split_methods(methods) if methods else scaling.METHODS[size])
    drawn = parse_seeds(seeds) if seeds else list(scaling.SEEDS)
    drawn = drawn[:1] if tiny and not seeds else drawn
    require_seeds(drawn)
    require_writable(out)
    folder = work or out / scaling.NAME
    if fresh:
        (out / f"{scaling.NAME}.json").unlink(missing_ok=True)
        for made in scaling.MADE:
            shutil.rmtree(folder / made, ignore_errors=True)
    if tiny:
        torch.set_num_threads(1)  # on tensors this small threads only wait for one another
    with progress_bars(quiet=as_json) as progress:
        rows, is_complete = scaling.run_parts(
            scaling.parts(names, chosen, drawn[:1] if tiny else drawn),
            out,
            weights=None if weights is None else Path(weights),
            work=folder,
            settings=settings,
            device=choose_device(device),
            tiny=tiny,
            deadline=deadline,
            commit=commit,
            say=lambda text: None if as_json else print(text, file=sys.stderr),
            progress=progress,
        )
    picture = (figures or out) / f"{scaling.NAME}.png"
    scaling_figure.draw(rows, picture)
    if as_json:
        print_json(rows)
    else:
        columns = ["backbone", "method", "pruned", "retention", "retention_std", "ci95", "lead", "lead_ci95", "n_seeds"]
        print_table([row for row in rows if "retention" in row], columns, wide=wide)
        print(f"{len(rows)} rows in {out / scaling.NAME}.json, drawn in {picture}")
    if not is_complete:
        raise ValueError("the minutes are over and some methods are not done; run the same command again")
