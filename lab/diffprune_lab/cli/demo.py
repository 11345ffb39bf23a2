"""`diffprune demo`: the main job on the embedded model, with a page that shows what came out."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from diffprune.cli import JsonOption, Wide, announce, print_json, print_table, progress_bars, require_writable


def command(
    out: Annotated[Path, typer.Option(help="Folder for the page and the summary.")] = Path("out/demo"),
    seconds: Annotated[float, typer.Option(min=1.0, help="Training time of each of the two scorers.")] = 60.0,
    questions: Annotated[int, typer.Option(min=1, help="Scored questions of each of the ten tasks.")] = 80,
    seed: Annotated[int, typer.Option(help="Another seed is another training run.")] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="A few steps and questions: shows that everything runs, measures nothing.")
    ] = False,
    wide: Wide = False,
    as_json: JsonOption = False,
) -> None:
    """Train a scorer on a frozen model, drop tokens, compare with other methods, and show it on a page.

    Needs no download and no GPU: a vision-language model of 1.8 M parameters and the world it was trained on come with
    the package. About four minutes on two cores.

    \b
    Examples:
      diffprune demo
      diffprune demo --out out/longer --seconds 300
    """
    require_writable(out)
    require_writable(out.absolute().parent)
    announce("loading torch, then the embedded model", quiet=as_json)
    from diffprune_lab.demo.run import run_demo, summary
    from diffprune_lab.demo.story import QUICK, Settings
    from diffprune_lab.demo.words import ask_command

    settings = Settings(seconds=seconds, questions=questions)
    settings = dataclasses.replace(QUICK if quick else settings, seed=seed)
    with progress_bars(quiet=as_json) as progress:
        story = run_demo(out, settings, progress)
    if as_json:
        print_json(summary(story))
        return
    print_table(
        [row for row in story.rows if "retention" in row],
        ["method", "keep", "retention", "ci95", "unchanged"],
        wide=wide,
    )
    print(f"{story.num_prompts:,} questions over ten tasks (procedural stand-ins), {sum(story.seconds.values()):.0f} s")
    print(f"the page: {out / 'index.html'}")
    print(f"go on:    {ask_command(story, out)}")
