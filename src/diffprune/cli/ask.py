"""`diffprune ask`: a question about one or more pictures, or about every picture of a folder."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from diffprune.cli import (
    DeviceOption,
    JsonOption,
    MethodOption,
    ModelOption,
    PrunerOption,
    announce,
    announce_loading,
    choose_device,
    collector_at_rest,
    describe_model,
    print_json,
)
from diffprune.methods.naming import check_names

SECONDS_BETWEEN = 10  # lines of progress where stderr is no terminal


def command(
    subject: Annotated[str, typer.Argument(help="What to ask; with --question, a folder of pictures.")],
    image: Annotated[list[Path] | None, typer.Option(help="A picture; give the option again for more.")] = None,
    question: Annotated[str, typer.Option(help="What to ask of every picture of the folder.")] = "",
    out: Annotated[
        Path | None, typer.Option(help="File of the folder's answers, a line of JSON each; an ended run goes on in it.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Pictures of the folder asked at a time.")] = 8,
    pruner: PrunerOption = "none",
    model: ModelOption = None,
    method: MethodOption = None,
    keep: Annotated[
        str | None,
        typer.Option(help="Tokens per picture (64) or a share (0.111); needs --pruner or --method."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Length of the answer at most.")] = 64,
    fast: Annotated[
        bool, typer.Option("--fast", help="Compile first (static shapes, on a GPU CUDA graphs), then answer.")
    ] = False,
    device: DeviceOption = "",
    as_json: JsonOption = False,
) -> None:
    """Ask a vision-language model about a picture, or about every picture of a folder.

    \b
    Examples:
      diffprune ask --pruner runs/llava-k64 --image a.jpg --keep 64 "What does the sign say?"
      diffprune ask --model llava-hf/llava-1.5-7b-hf --method cls_attention --image a.jpg --keep 64 "What is this?"
      diffprune ask --pruner runs/llava-k64 --image a.jpg --fast "What does the sign say?"
      diffprune ask my/photos --question "Is there a person?" --out answers.jsonl --pruner runs/llava-k64 --keep 64
    """
    check_names(method or "")
    named = model or "scenes-llava" if pruner == "none" else pruner
    announce_loading(named, quiet=as_json)
    if question:
        if not subject:  # a shell's variable that is not set; as a path it would be the folder the command runs in
            raise ValueError("SUBJECT is empty; with --question it names a folder of pictures")
        made = {"pruner": pruner, "model": model, "method": method, "keep": keep}
        run = {"question": question, **made, "max_new_tokens": max_new_tokens}
        _ask_folder(Path(subject), image, out, run, named, batch=batch, fast=fast, device=device, as_json=as_json)
        return
    if out is not None:
        raise ValueError(f"--out {out} is for the answers of a folder; give --question and a folder of pictures")
    if not image:
        raise ValueError("no picture is named; give --image FILE, or a folder with --question and --out")
    with collector_at_rest():
        from diffprune.backbones.processors import open_image

        pictures = [open_image(path) for path in image]
        from diffprune.api import load_vlm  # with transformers, which a picture that is refused does not need

        vlm = load_vlm(pruner, model=model, method=method, keep=keep, device=choose_device(device))
    chosen = method or vlm.method.name
    announce(describe_model(named, vlm.base, method=chosen, keep=vlm.budget.keep), quiet=as_json)
    extra = {}
    if fast:
        try:
            report = vlm.compile(image_sizes=[picture.size for picture in pictures], max_new_tokens=max_new_tokens)
            extra["compile_seconds"] = sum(report.seconds.values())
        except ValueError as reason:
            typer.echo(f"{reason}. The answer is the reference path's, without --fast.", err=True)
    start = time.perf_counter()
    answer = vlm.generate(images=pictures, text=subject, max_new_tokens=max_new_tokens, do_sample=False)
    seconds = time.perf_counter() - start
    if as_json:
        print_json({"answer": answer, "keep": vlm.budget.keep, "method": chosen, "seconds": seconds, **extra})
    else:
        print(answer)


def _ask_folder(
    folder: Path,
    image: list[Path] | None,
    out: Path | None,
    run: dict[str, Any],
    named: str,
    *,
    batch: int,
    fast: bool,
    device: str,
    as_json: bool,
) -> None:
    """Every picture of the folder; what can be refused is refused before a model is loaded."""
    if image:
        raise ValueError("--image and a folder are both given; ask about one or the other")
    if out is None:
        raise ValueError("the answers of a folder need a file; give --out answers.jsonl")
    if fast:
        raise ValueError("--fast compiles for the size of one picture; leave it out for a folder")
    with collector_at_rest():
        from diffprune.answering import answer_folder, find_pictures, read_answers

        find_pictures(folder)
        read_answers(out, run)
        from diffprune.api import load_vlm

        where = choose_device(device)
        vlm = load_vlm(run["pruner"], model=run["model"], method=run["method"], keep=run["keep"], device=where)
    chosen = run["method"] or vlm.method.name
    announce(describe_model(named, vlm.base, method=chosen, keep=vlm.budget.keep), quiet=as_json)
    start = last = time.monotonic()

    def update(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if as_json or not (sys.stderr.isatty() or done == total or now - last > SECONDS_BETWEEN):
            return
        last = now
        end = "\r" if sys.stderr.isatty() and done < total else "\n"
        print(progress_line(done, total, now - start), end=end, file=sys.stderr, flush=True)

    summary = answer_folder(vlm, folder, out, run, batch=batch, update=update)
    for name, reason in summary.broken.items():
        typer.echo(f"{name} was left out: {reason}", err=True)
    seconds = time.monotonic() - start
    if as_json:
        counts = {"answered": summary.added, "before": summary.before, "broken": sorted(summary.broken)}
        print_json({**counts, "out": str(out), "seconds": seconds})
    else:
        there = f", {summary.before} were there before" if summary.before else ""
        print(f"{summary.added} answers added to {out}{there}")
    if summary.broken:
        raise typer.Exit(1)


def progress_line(done: int, total: int, seconds: float) -> str:
    """How far a run is, how fast it goes and how long it will take."""
    if not done:
        return f"{total} pictures to ask"
    rate, left = done / max(seconds, 1e-9), (total - done) * seconds / done
    return f"{done} of {total} pictures, {rate:.2g} a second, {_clock(seconds)}, {_clock(left)} left"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
