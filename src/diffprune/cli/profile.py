"""`diffprune profile`: where the time to the first token goes, for every method in one run."""

from __future__ import annotations

from collections.abc import Mapping
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
    choose_device,
    hush_loader,
    print_json,
    print_table,
    require_file,
)
from diffprune.methods.naming import check_names

if TYPE_CHECKING:
    from diffprune.speed.profile import ProfileSettings


def command(
    backbone: Annotated[
        str, typer.Option(help="A preset (llava-1.5-7b, qwen2.5-vl-7b, ...), scenes-llava, scenes-nano or a folder.")
    ] = "scenes-llava",
    random_weights: Annotated[
        bool,
        typer.Option("--random-weights", help="Build the preset at its real size, no download: speed is the same."),
    ] = False,
    size: Annotated[str, typer.Option(help="real, or tiny for a small model of the same kind.")] = "real",
    methods: Annotated[
        str,
        typer.Option(
            help="Comma-separated (diffprune methods); `downscale` is a smaller picture before the full model. "
            f"{OPTIONS_HELP}"
        ),
    ] = "full,diffprune",
    keep: BudgetsOption = "64",
    text: Annotated[str, typer.Option(help="Comma-separated numbers of text tokens.")] = "40",
    batch: Annotated[str, typer.Option(help="Comma-separated batch sizes.")] = "1",
    paths: Annotated[str, typer.Option(help="eager, fast or both.")] = "eager,fast",
    image: Annotated[str, typer.Option(help="Width x height of the picture in pixels.")] = "336x336",
    dtype: Annotated[str, typer.Option(help="float16, bfloat16 or float32; empty: float16 on a GPU.")] = "",
    device: DeviceOption = "",
    runs: Annotated[int, typer.Option(min=1, help="Timed calls of each stage; the median counts.")] = 30,
    text_buckets: Annotated[str, typer.Option(help="Of the fast path; empty takes its own.")] = "",
    seconds: Annotated[float, typer.Option(min=1, help="Time for the whole run; the rest is not run.")] = 3600.0,
    decode: Annotated[
        bool, typer.Option("--decode/--no-decode", help="Time decoding too; without, the fast path compiles faster.")
    ] = True,
    decode_methods: Annotated[
        str, typer.Option(help="Comma-separated: time decoding of these alone; empty: of all.")
    ] = "",
    eager_methods: Annotated[
        str, typer.Option(help="Comma-separated: these alone run on the eager path too; empty: all.")
    ] = "",
    kernels: Annotated[
        int, typer.Option(min=0, help="At the end, list so many of the slowest kernels of each stage.")
    ] = 0,
    precision: Annotated[str, typer.Option(help="Of the decoder on the fast path: model, or fp8.")] = "model",
    throughput: Annotated[
        bool, typer.Option("--throughput", help="Instead, a closed loop of requests through the fast path.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Results file, written anew after every row.")] = None,
    append: Annotated[
        bool, typer.Option("--append", help="Keep the rows that --out has of the same commit and device.")
    ] = False,
    figure: Annotated[Path | None, typer.Option(help="Picture of the bars; default: beside --out.")] = None,
    commit: CommitOption = None,
    wide: Wide = False,
    as_json: JsonOption = False,
) -> None:
    """Measure vision encoding, pruner, prefill, time to first token, decoding and memory of a model with each method.

    Medians after a warm-up, every method in one run, on the model as it is (eager) and compiled (fast). A method that
    fails gives a row with its error. How everything is counted: docs/profile.md.

    \b
    Examples:
      diffprune profile --backbone llava-1.5-7b --random-weights --methods full,diffprune,holov,pyramiddrop --keep 64 --out results/ttft.json
      diffprune profile --backbone qwen2.5-vl-7b --random-weights --image 1008x1008 --keep 0.1111 --text 40,100 --batch 1,32
      diffprune profile --backbone qwen2.5-vl-7b --random-weights --image 1008x1008 --methods full,diffprune,downscale --keep 0.1111
      diffprune profile --backbone llava-1.5-7b --random-weights --size tiny --device cpu
      diffprune profile --backbone llava-1.5-7b --random-weights --throughput --paths fast --batch 1,8,32,64 --out results/throughput.json
    """  # noqa: E501
    given = dict(locals())  # the options by name
    check_names(methods, also=["downscale"])
    announce(f"{backbone}, {methods}, keep {keep}: loading", quiet=as_json)
    from diffprune.speed import output
    from diffprune.speed import profile as measured
    from diffprune.speed import throughput as loop

    settings = read_settings(given)
    if throughput and precision != "model":
        raise ValueError("--throughput measures the model's own precision; leave --precision out")
    for path in (out, figure):
        if path is not None:
            require_file(path)
    hush_loader()
    notes, columns = (loop.NOTES, loop.COLUMNS) if throughput else (output.NOTES, measured.COLUMNS)

    earlier = None
    if append and out is not None:
        earlier = output.read_earlier(out, device=settings.device, commit=commit)

    shown: list[str] = []

    def report(rows: list[dict[str, Any]]) -> None:
        if out is not None:
            output.save(
                out,
                rows,
                device=settings.device,
                commit=commit,
                notes=notes,
                missing=measured.not_run(settings, rows),
                earlier=earlier,
            )
        line = output.one_line(rows[-1])
        if not as_json and line not in shown:  # a row is reported again when its kernels are added
            shown.append(line)
            typer.echo(line, err=True)

    rows = loop.throughput(settings, report) if throughput else measured.profile(settings, report)
    picture = figure or (out.with_suffix(".png") if out is not None else None)
    if picture is not None and not throughput:
        output.draw_bars([*(earlier.rows if earlier else []), *rows], picture)
    if as_json:
        print_json(rows)
    else:
        print_table([row for row in rows if "path" in row and "error" not in row], columns, wide=wide)
    missing = measured.not_run(settings, rows)
    if missing:
        typer.echo(f"{output.NOT_RUN}{'; '.join(missing)}.", err=True)
    if not any("path" in row for row in rows):
        raise ValueError(f"no row could be measured in {seconds:g} s; give more with --seconds")
    failed = [row for row in rows if "error" in row]
    if failed and len(failed) == sum("path" in row for row in rows):
        raise ValueError(f"no row could be measured; the first says: {failed[0]['error']}")


def read_settings(given: Mapping[str, Any]) -> ProfileSettings:
    """The command's options as settings, each checked before anything is built."""
    import torch

    from diffprune.fast.precision import PRECISIONS
    from diffprune.speed.profile import ProfileSettings
    from diffprune.speed.subject import check_methods, picture_size
    from diffprune.types import parse_budgets

    size, paths, dtype = given["size"], given["paths"], given["dtype"]
    if size not in ("real", "tiny"):
        raise ValueError(f"size {size!r} is not known; give real or tiny")
    wanted = [path for path in paths.split(",") if path]
    if not wanted or set(wanted) - {"eager", "fast"}:
        raise ValueError(f"paths {paths!r} are not known; give eager, fast or eager,fast")
    if given["precision"] not in PRECISIONS:
        raise ValueError(f"precision {given['precision']!r} is not known; give {' or '.join(PRECISIONS)}")
    named = check_methods(given["methods"])
    device = choose_device(given["device"])
    dtype = dtype or ("float16" if device.startswith("cuda") else "float32")
    if dtype not in ("float16", "bfloat16", "float32"):
        raise ValueError(f"dtype {dtype!r} is not known; give float16, bfloat16 or float32")
    return ProfileSettings(
        **{
            name: given[name]
            for name in ("backbone", "random_weights", "runs", "seconds", "decode", "kernels", "precision")
        },
        tiny=size == "tiny",
        methods=named,
        keeps=parse_budgets(given["keep"]),
        texts=read_numbers(given["text"], "text"),
        batches=read_numbers(given["batch"], "batch"),
        paths=wanted,
        image=picture_size(given["image"]),
        device=device,
        dtype=getattr(torch, dtype),
        text_buckets=read_numbers(given["text_buckets"], "text-buckets") if given["text_buckets"] else (),
        decode_methods=_some(given["decode_methods"], named, "decode-methods"),
        eager_methods=_some(given["eager_methods"], named, "eager-methods"),
    )


def _some(text: str, methods: list[str], name: str) -> list[str]:
    """Methods of those that are measured, separated by commas."""
    from diffprune.methods.naming import split_methods

    wanted = split_methods(text)
    for method in wanted:
        if method not in methods:
            raise ValueError(f"--{name} names {method!r}, which is not measured; there are {', '.join(methods)}")
    return wanted


def read_numbers(text: str, name: str) -> list[int]:
    """Whole numbers from 1, separated by commas."""
    try:
        numbers = [int(item) for item in text.split(",") if item]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ValueError(f"--{name} {text!r} is no list of whole numbers from 1; write it as 1,32")
    return list(dict.fromkeys(numbers))
