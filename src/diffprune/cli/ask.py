"""`diffprune ask`: one question about one or more pictures, with most of their tokens dropped."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from diffprune.cli import OPTIONS_HELP, choose_device, print_json


def command(
    question: Annotated[str, typer.Argument(help="What to ask.")],
    image: Annotated[list[Path], typer.Option(help="A picture; give the option again for more.")],
    pruner: Annotated[str, typer.Option(help="Folder or hub id of a saved pruner, or none.")] = "none",
    model: Annotated[
        str | None,
        typer.Option(help="Base model for --pruner none: a folder, a hub id or scenes-nano; default: scenes-llava."),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="Method for --pruner none, or one that takes a saved one's weights (diffprune methods); "
            f"default: full. {OPTIONS_HELP}"
        ),
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(help="Tokens per picture (64) or a share (0.111); needs --pruner or --method."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Length of the answer at most.")] = 64,
    fast: Annotated[
        bool, typer.Option("--fast", help="Compile first (static shapes, on a GPU CUDA graphs), then answer.")
    ] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...; empty takes a GPU where there is one.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Ask a vision-language model about a picture.

    \b
    Examples:
      diffprune ask --pruner runs/llava-k64 --image a.jpg --keep 64 "What does the sign say?"
      diffprune ask --model llava-hf/llava-1.5-7b-hf --method cls_attention --image a.jpg --keep 64 "What is this?"
      diffprune ask --pruner runs/llava-k64 --image a.jpg --fast "What does the sign say?"
    """
    from diffprune.api import load_vlm
    from diffprune.backbones.processors import open_image

    pictures = [open_image(path) for path in image]
    where = choose_device(device)
    vlm = load_vlm(pruner, model=model, method=method, keep=keep, device=where)
    extra = {}
    if fast:
        try:
            report = vlm.compile(image_sizes=[picture.size for picture in pictures], max_new_tokens=max_new_tokens)
            extra["compile_seconds"] = sum(report.seconds.values())
        except ValueError as reason:
            typer.echo(f"{reason}. The answer is the reference path's, without --fast.", err=True)
    start = time.perf_counter()
    answer = vlm.generate(images=pictures, text=question, max_new_tokens=max_new_tokens, do_sample=False)
    seconds = time.perf_counter() - start
    if as_json:
        named = method or vlm.method.name
        print_json({"answer": answer, "keep": vlm.budget.keep, "method": named, "seconds": seconds, **extra})
    else:
        print(answer)
