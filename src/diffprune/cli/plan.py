"""`diffprune plan`: what pruning will gain on a card, before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from diffprune.cli import BudgetsOption, JsonOption, Wide, announce, print_json, print_table
from diffprune.terminal import count_text, print_note

CHECKED = (
    "method", "batch", "num_text", "num_kept", "prefill_ms", "predicted_ms", "predicted_over_measured", "held_out",
    "backbone", "path",
)  # fmt: skip


def command(
    backbone: Annotated[
        str, typer.Option(help="A preset (llava-1.5-7b, qwen2.5-vl-7b, ...), scenes-llava or a folder.")
    ] = "llava-1.5-7b",
    image: Annotated[str, typer.Option(help="Width x height of the picture in pixels.")] = "336x336",
    keep: BudgetsOption = "0.1111",
    batch: Annotated[str, typer.Option(help="Comma-separated numbers of requests that run at once.")] = "1",
    text: Annotated[int, typer.Option(help="Text tokens of a prompt.")] = 40,
    new_tokens: Annotated[int, typer.Option(help="Length of an answer, for requests per second.")] = 32,
    gpu: Annotated[
        str | None, typer.Option(help="Cards by name, comma-separated: h200, a100-80, rtx-4090, ...")
    ] = None,
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
    wide: Wide = False,
    as_json: JsonOption = False,
) -> None:
    """Predict operations, memory and times of a model with all its visual tokens and with some.

    One table for all cards, batches and budgets. Counts are exact. Times come from the card's datasheet and from
    efficiency curves: "fitted" on the card they were fitted on, "extrapolated" on any other, "assumed" where they were
    fitted to nothing; see docs/profile.md. speedup is of the first token; decode_tok_s is of the whole batch;
    requests_s is for the largest batch that fits the card's memory. A batch that does not fit has no times.

    \b
    Examples:
      diffprune plan --backbone qwen2.5-vl-7b --image 1344x896 --keep 0.1111 --batch 8 --gpu h200
      diffprune plan --keep 128,64,32 --batch 1,32 --gpu h200,a100-80,rtx-4090
      diffprune plan --backbone llava-1.5-7b --keep 64 --gpu rtx-4090 --json
      diffprune plan --keep 64 --tflops 200 --bandwidth 1000 --memory 32
      diffprune plan --keep 64 --gpu h200 --calibrate results/ttft.json
      diffprune plan --keep 64 --gpu h200 --text 40 --text-buckets 40,100
      diffprune plan --against results/ttft.json
    """
    announce(f"{backbone}: counting what a picture becomes", quiet=as_json)
    from diffprune.cli.profile import read_numbers
    from diffprune.speed import calibrate as fitted
    from diffprune.speed import plan as planned
    from diffprune.speed.accuracy import accuracy, left_out_ranges, ranges, read_profiles
    from diffprune.speed.gpus import find_gpu
    from diffprune.speed.subject import picture_size
    from diffprune.types import parse_budgets

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
            print_json({"stages": stages, "others": others, "left_out": left_out_ranges(found, path, card)})
        else:
            print(accuracy(found, path, card))
        return
    names = [None] if gpu is None else [one for one in gpu.split(",") if one]
    if len(names) > 1 and any(number is not None for number in (tflops, bandwidth, memory)):
        raise ValueError("--tflops, --bandwidth and --memory are of one card; name one with --gpu, or leave them out")
    cards = [find_gpu(one, tflops=tflops, bandwidth=bandwidth, memory=memory) for one in names]
    calibration, checked = planned.CALIBRATIONS[path], []
    if calibrate:
        found = read_profiles(calibrate)
        calibration = fitted.calibrate(found, path, cards[0])
        checked = [
            row
            for results in found
            for row in fitted.compare(results, calibration, fitted.card_of([results], cards[0]), path)
        ]
        even = [row for row in checked if fitted.is_even(row)]
        told = [(row, one) for row, one in zip(even, fitted.held_out(found, path, cards[0]), strict=True) if one]
        for row, ratios in told:  # none where rows are few
            row["held_out"] = ratios["prefill"]
    rows, remarks = planned.plan_table(
        backbone,
        cards,
        image=picture_size(image),
        keeps=parse_budgets(keep),
        batches=read_numbers(batch, "batch"),
        num_text=text,
        new_tokens=new_tokens,
        path=path,
        calibration=calibration,
        text_buckets=read_numbers(text_buckets, "text-buckets"),
    )
    for sentence in remarks:
        typer.echo(sentence, err=True)
    if as_json:
        gpus = ", ".join(card.name for card in cards)
        print_json({"gpu": gpus, "path": path, "curves": calibration.source, "rows": rows, "calibrated": checked})
        return
    if calibrate:
        print(fitted.as_json(calibration), end="")
        print_table(checked, CHECKED, wide=wide)
        print()
    parameters = count_text(planned.describe(backbone).parameters)
    print_note(
        f"{backbone}, {parameters} parameters in 16 bits, {path} path; a picture of {image} is "
        f"{rows[0]['num_visual']:,} tokens, the text {text}:"
    )
    print_table(rows, planned.COLUMNS, wide=wide)
    print_note(f"Efficiency curves: {calibration.source}.")
