"""What the demo's page says: the headline and the numbers below it, and how to go on."""

import shlex
import shutil
import sys
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from diffprune.evaluate.task import Question
from diffprune_lab.demo.story import BUDGETS, MODEL, Story

LABELS = {
    "full": "Full model",
    "diffprune": "DiffPrune",
    "diffprune-diverse": "DiffPrune, diverse",
    "gumbel_ste": "Gumbel-STE",
    "gots": "GOTS",
    "divprune": "DivPrune",
    "cls_attention": "[CLS] attention",
    "uniform_grid": "Uniform grid",
    "random": "Random",
    "oracle": "Oracle",
}
OURS = ("diffprune", "diffprune-diverse")
RIVALS = ("gots", "divprune", "cls_attention")  # that learn nothing
ENOUGH = 99.0  # percent of the full model's score


def summary_rows(story: Story) -> dict[tuple[str, int], Mapping[str, Any]]:
    """Summary rows by method and budget; the full model's budget is all tokens."""
    return {
        (row["method"], row["keep"] if isinstance(row["keep"], int) else story.num_visual): row
        for row in story.rows
        if "retention" in row
    }


def labels(story: Story) -> dict[str, str]:
    """The methods that were measured, by name, in the order of the page."""
    measured = {row["method"] for row in story.rows}
    return {name: label for name, label in LABELS.items() if name in measured}


def best_of_ours(story: Story) -> tuple[int, Mapping[str, Any]] | None:
    """The fewest tokens at which one of ours keeps 99 % and its row; where none does, the row of the middle budget."""
    rows = summary_rows(story)
    enough = [
        (keep, rows[name, keep])
        for keep in sorted(BUDGETS)
        for name in OURS
        if (name, keep) in rows and rows[name, keep]["retention"] >= ENOUGH
    ]
    middle = [(BUDGETS[1], rows[name, BUDGETS[1]]) for name in OURS if (name, BUDGETS[1]) in rows]
    fewest = [one for one in enough if one[0] == enough[0][0]]
    return max(fewest or middle, key=lambda one: one[1]["retention"], default=None)


def headline(story: Story) -> str:
    """How few tokens keep 99 % of the score, and in which world; the number is that of the tile below."""
    best = best_of_ours(story)
    if best is None:
        return "The full model answers nothing yet"
    keep, row = best
    return f"In a drawn world, {keep} of {story.num_visual} visual tokens keep {row['retention']:.1f} % of the score"


def lead(story: Story) -> str:
    """Where and how it was measured, and how the best rival did with as many tokens."""
    seconds = sum(story.seconds.values())
    time = f"{seconds:.0f} seconds" if seconds < 100 else f"{seconds / 60:.1f} minutes"
    best = best_of_ours(story)
    rivals = [
        (row, LABELS[name])
        for (name, keep), row in summary_rows(story).items()
        if name in RIVALS and best is not None and keep == best[0]
    ]
    beside = ""
    if rivals:
        row, label = max(rivals, key=lambda one: one[0]["retention"])
        beside = (
            f"With as many tokens {label}, which learns nothing, keeps {row['retention']:.1f} %: this world is easy. "
        )
    return escape(
        f"Measured just now, on this machine, in {time}. The model is {MODEL}: a vision-language model "
        f"of {story.num_parameters / 1e6:.1f} M parameters that we trained on procedural scenes, drawn things on plain "
        f"ground. {beside}The ten tasks borrow name and metric from real benchmarks and are stand-ins for them: "
        "the numbers show that the method runs from end to end, not how a large model would fare."
    )


def facts(story: Story) -> str:
    rows, best = summary_rows(story), best_of_ours(story)
    ours = "diffprune" if best is None else best[1]["method"]
    items = [
        (f"kept with {keep} tokens", f"{rows[ours, keep]['retention']:.1f} %", f"of the score, by {LABELS[ours]}")
        for keep in BUDGETS
        if (ours, keep) in rows
    ]
    full, pruned = story.flops[story.num_visual], story.flops[BUDGETS[1]]
    items.append((f"prefill at {BUDGETS[1]} tokens", f"{full / pruned:.1f}x", "fewer operations"))
    items.append(("asked of each method", f"{story.num_prompts:,}", "questions"))
    return "".join(
        f"<div><dt>{escape(a)}</dt><dd>{escape(b)} <small>{escape(c)}</small></dd></div>" for a, b, c in items
    )


def differing(story: Story) -> str:
    count = sum(example.differs for example in story.examples)
    if not count:
        return ""
    which = "The last one was" if count == 1 else f"The last {count} were"
    return f"{which} chosen for the opposite reason: with {min(BUDGETS)} tokens methods split most evenly on them."


def wording(question: Question) -> tuple[str, list[str]]:
    """The question, and its lettered options; the last line of a prompt with options only asks for the letter."""
    text, *lines = question.prompt.split("\n")
    return text, lines[:-1] if question.choices is not None else lines


def program() -> str:
    """How to call diffprune from here: by its name where the shell finds it, else by its path."""
    if shutil.which("diffprune"):
        return "diffprune"
    script = Path(sys.executable).with_name("diffprune")
    return str(script.relative_to(Path.cwd())) if script.is_relative_to(Path.cwd()) else str(script)


def ask_command(story: Story, out: Path) -> str:
    """The command that asks the pruner just trained about the first picture."""
    question, _ = wording(story.examples[0].question)
    picture, pruner = shlex.quote(f"{out}/picture.png"), shlex.quote(f"{out}/pruner")
    return f"{program()} ask --pruner {pruner} --image {picture} --keep {BUDGETS[1]} {shlex.quote(question)}"


def commands(story: Story, out: Path) -> str:
    call = program()
    pruner = shlex.quote(f"{out}/pruner")
    items = [
        (
            "Ask with the pruner you have just trained, about the first picture above:",
            ask_command(story, out),
        ),
        (
            "Measure it at other budgets:",
            f"{call} eval --pruner {pruner} --methods full,diffprune,gots --keep 64,24,4 --out results/mine.json",
        ),
        ("See all methods and models that can be combined:", f"{call} methods\n{call} backbones"),
        (
            "Prune a real model, with no training:",
            f"{call} ask --model llava-hf/llava-1.5-7b-hf --method divprune --keep 64 "
            '--image photo.jpg "What is this?"',
        ),
    ]
    return "".join(
        f'<div class="command"><p>{escape(text)}</p><pre>{escape(command)}</pre></div>' for text, command in items
    )
