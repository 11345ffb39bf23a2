"""`diffprune plan`: what pruning will gain on a card, before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from diffprune.cli import print_json, print_table


def command(
    backbone: Annotated[
        str, typer.Option(help="A preset (llava-1.5-7b, qwen2.5-vl-7b, ...), scenes-llava or a folder.")
    ] = "llava-1.5-7b",
    image: Annotated[str, typer.Option(help="Width x height of the picture in pixels.")] = "336x336",
    keep: Annotated[str, typer.Option(help="Tokens per picture (64) or a share (0.111).")] = "0.1111",
    batch: Annotated[int, typer.Option(help="Requests that run at once.")] = 1,
    text: Annotated[int, typer.Option(help="Text tokens of a prompt.")] = 40,
    new_tokens: Annotated[int, typer.Option(help="Length of an answer, for requests per second.")] = 32,
    gpu: Annotated[str | None, typer.Option(help="A card by its name: h200, a100-80, rtx-4090, ...")] = None,
    tflops: Annotated[float | None, typer.Option(help="The card's dense float16 TFLOP/s.")] = None,
    bandwidth: Annotated[float | None, typer.Option(help="The card's memory bandwidth, GB/s.")] = None,
    memory: Annotated[float | None, typer.Option(help="The card's memory, GB.")] = None,
    path: Annotated[str, typer.Option(help="fast (compiled) or eager (the model as it is).")] = "fast",
    text_buckets: Annotated[
        str, typer.Option(help="Sizes to which the fast path pads the text: what compile() is given.")
    ] = "64,128",
    calibrate: Annotated[
        list[Path] | None, typer.Option(help="Fit the curves to this results file of diffprune profile first.")
    ] = None,
    against: Annotated[
        list[Path] | None,
        typer.Option(help="Instead, how far the plan is from what this results file of diffprune profile measured."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Predict operations, memory and times of a model with all its visual tokens and with some.

    Counts are exact. Times come from the card's datasheet and from efficiency curves, and the output says whether those
    were fitted to a measurement; see docs/profile.md. requests_s is for the largest batch that fits the card's memory;
    a batch that does not fit has no times.

    \b
    Examples:
      diffprune plan --backbone qwen2.5-vl-7b --image 1344x896 --keep 0.1111 --batch 8 --gpu h200
      diffprune plan --backbone llava-1.5-7b --keep 64 --gpu rtx-4090 --json
      diffprune plan --keep 64 --tflops 200 --bandwidth 1000 --memory 32
      diffprune plan --keep 64 --gpu h200 --calibrate results/ttft.json
      diffprune plan --keep 64 --gpu h200 --text 40 --text-buckets 40,100
      diffprune plan --against results/ttft.json
    """
    from diffprune.cli.profile import read_numbers
    from diffprune.speed import calibrate as fitted
    from diffprune.speed import plan as planned
    from diffprune.speed.accuracy import accuracy, ranges, read_profiles
    from diffprune.speed.gpus import find_gpu
    from diffprune.speed.subject import picture_size
    from diffprune.types import Budget

    if path not in planned.CALIBRATIONS:
        raise ValueError(f"path {path!r} is not known; give {' or '.join(planned.CALIBRATIONS)}")
    if against:
        if calibrate:
            raise ValueError("--against judges the curves as they are; drop --calibrate, which checks its own fit")
        numbers = {"tflops": tflops, "bandwidth": bandwidth, "memory": memory}
        is_given = gpu is not None or any(number is not None for number in numbers.values())
        card = find_gpu(gpu, **numbers) if is_given else None
        found = read_profiles(against)
        if as_json:
            stages, others = ranges(found, path, card)
            print_json({"stages": stages, "others": others})
        else:
            print(accuracy(found, path, card))
        return
    size, budget, buckets = picture_size(image), Budget.parse(keep).keep, read_numbers(text_buckets, "text-buckets")
    card = find_gpu(gpu, tflops=tflops, bandwidth=bandwidth, memory=memory)
    calibration, checked = planned.CALIBRATIONS[path], []
    if calibrate:
        found = read_profiles(calibrate)
        calibration = fitted.calibrate(found, path, card)
        checked = [
            row
            for results in found
            for row in fitted.compare(results, calibration, fitted.card_of([results], card), path)
        ]
        even = [row for row in checked if fitted.is_even(row)]
        for row, ratio in zip(even, fitted.held_out(found, path, card), strict=False):  # none where rows are few
            row["held_out"] = ratio
    rows = planned.plan(
        backbone,
        card,
        image=size,
        keep=budget,
        num_text=text,
        batch=batch,
        new_tokens=new_tokens,
        path=path,
        calibration=calibration,
        text_buckets=buckets,
    )
    for sentence in planned.remarks(rows, budget, card):
        typer.echo(sentence, err=True)
    if as_json:
        print_json({"gpu": card.name, "path": path, "curves": calibration.source, "rows": rows, "calibrated": checked})
        return
    if calibrate:
        print(fitted.as_source(calibration))
        print_table(checked, list(checked[0]))
    print(f"{backbone} on {card.name}, {path} path, batch {batch}, {text} text tokens:")
    print_table(rows, planned.COLUMNS)
    print(f"Efficiency curves: {calibration.source}.")
