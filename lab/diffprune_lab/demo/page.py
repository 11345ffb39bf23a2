"""The page: one HTML file that needs nothing else, made from a `Story`."""

import base64
import io
import json
import shlex
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from PIL import Image

from diffprune.evaluate.task import Question
from diffprune_lab.demo.examples import Example, is_right
from diffprune_lab.demo.plots import Axes, Line, nice_ticks, plot, smooth
from diffprune_lab.demo.story import BUDGETS, MODEL, TRAINED_BUDGETS, Story
from diffprune_lab.scenes.reference import ASSETS

LABELS = {
    "full": "Full model",
    "diffprune": "DiffPrune",
    "gumbel_ste": "Gumbel-STE",
    "cls_attention": "[CLS] attention",
    "uniform_grid": "Uniform grid",
    "random": "Random",
    "oracle": "Oracle",
}
PARTS = {
    "load": "load the model",
    "train diffprune": "train DiffPrune",
    "train gumbel_ste": "train Gumbel-STE",
    "encode pictures": "draw and encode pictures",
    "answer": "answer and score",
    "pictures": "pictures for this page",
}


def render_page(story: Story, out: Path) -> str:
    """The whole page; `out` is where it will lie, for the commands it shows."""
    assets = ASSETS / "demo"
    parts = {
        "style": (assets / "page.css").read_text(encoding="utf-8").strip(),
        "script": (assets / "page.js").read_text(encoding="utf-8").strip(),
        "headline": escape(headline(story)),
        "lead": lead(story),
        "facts": facts(story),
        "budget_buttons": _buttons({str(keep): f"{keep} tokens" for keep in BUDGETS}),
        "method_buttons": _buttons(LABELS),
        "larger": _larger_section(story),
        "retention_plot": retention_plot(story),
        "table": retention_table(story),
        "task_tables": task_tables(story),
        "loss_plot": loss_plot(story),
        "scorer_size": f"{story.scorer_parameters / 1e3:,.0f}",
        "budget_range": "{} to {}".format(*TRAINED_BUDGETS),
        "steps": escape(_steps(story)),
        "seconds": seconds_bars(story),
        "cost_table": cost_table(story),
        "commands": _commands(story, out),
        "footer": _footer(story),
        "data": json.dumps(page_data(story), ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/"),
    }
    page = (assets / "page.html").read_text(encoding="utf-8")
    for name, text in parts.items():
        slot = "{{" + name + "}}"
        assert page.count(slot) == 1, slot
        page = page.replace(slot, text)
    return page


# What the script shows -----------------------------------------------------------------------------------------------


def page_data(story: Story) -> dict[str, Any]:
    """Pictures, kept tokens and answers by method and budget."""
    return {
        "budgets": list(BUDGETS),
        "num_visual": story.num_visual,
        "methods": [{"name": name, "label": label} for name, label in LABELS.items()],
        "examples": [_example(example) for example in story.examples],
        "larger": [_larger_example(example) for example in story.larger],
    }


def _example(example: Example) -> dict[str, Any]:
    question, options = _wording(example.question)
    return {
        "png": png_address(example.picture),
        "grid": example.grid,
        "task": example.task,
        "question": question,
        "options": options,
        "full": _answer(example.question, example.full),
        "kept": example.kept,
        "said": {
            method: {keep: _answer(example.question, said) for keep, said in by_budget.items()}
            for method, by_budget in example.said.items()
        },
    }


def _larger_example(example: Example) -> dict[str, Any]:
    (method,) = example.kept
    return {
        "grid": example.grid,
        "budgets": list(example.kept[method]),
        "full": _answer(example.question, example.full),
        "kept": example.kept[method],
        "said": {keep: _answer(example.question, said) for keep, said in example.said[method].items()},
    }


def _wording(question: Question) -> tuple[str, list[str]]:
    """The question, and its lettered options; the last line of a prompt with options only asks for the letter."""
    text, *lines = question.prompt.split("\n")
    return text, lines[:-1] if question.choices is not None else lines


def _answer(question: Question, said: str) -> dict[str, Any]:
    return {"text": said, "right": is_right(question, said)}


def png_address(picture: Image.Image) -> str:
    """The picture itself as an address."""
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


# What is said --------------------------------------------------------------------------------------------------------


def summary_rows(story: Story) -> dict[tuple[str, int], Mapping[str, Any]]:
    """Summary rows by method and budget; the full model's budget is all tokens."""
    return {
        (row["method"], row["keep"] if isinstance(row["keep"], int) else story.num_visual): row
        for row in story.rows
        if "retention" in row
    }


def headline(story: Story) -> str:
    row = summary_rows(story).get(("diffprune", BUDGETS[1]))
    if row is None:
        return "The full model answers nothing yet"
    return f"{BUDGETS[1]} of {story.num_visual} visual tokens keep {row['retention']:.0f} % of the full model's score"


def lead(story: Story) -> str:
    seconds = sum(story.seconds.values())
    time = f"{seconds:.0f} seconds" if seconds < 100 else f"{seconds / 60:.1f} minutes"
    return escape(
        f"Measured just now, on this machine, in {time}. The model is {MODEL}: a vision-language model "
        f"of {story.num_parameters / 1e6:.1f} M parameters that we trained on procedural pictures. The ten tasks "
        "borrow name and metric from real benchmarks and are stand-ins for them: the numbers show that the method "
        "runs from end to end, not how a large model would fare."
    )


def facts(story: Story) -> str:
    rows = summary_rows(story)
    items = [
        (f"kept with {keep} tokens", f"{rows['diffprune', keep]['retention']:.1f} %", "of the score")
        for keep in BUDGETS
        if ("diffprune", keep) in rows
    ]
    full, pruned = story.flops[story.num_visual], story.flops[BUDGETS[1]]
    items.append((f"prefill at {BUDGETS[1]} tokens", f"{full / pruned:.1f}x", "fewer operations"))
    items.append(("asked of each method", f"{story.num_prompts:,}", "questions"))
    return "".join(
        f"<div><dt>{escape(a)}</dt><dd>{escape(b)} <small>{escape(c)}</small></dd></div>" for a, b, c in items
    )


def _buttons(values: Mapping[str, str]) -> str:
    return "".join(
        f'<button type="button" data-value="{escape(value)}" aria-pressed="false">{escape(label)}</button>'
        for value, label in values.items()
    )


def _larger_section(story: Story) -> str:
    if not story.larger:
        return ""
    rows, columns = story.larger[0].grid
    return (
        '<section class="wide" id="larger"><h2>The same share of a larger model</h2><p class="note">'
        f"Left the scorer trained just now, right a saved one on scenes-llava, which sees the same picture as "
        f"{rows} x {columns} = {rows * columns} tokens. Both keep the same share of them.</p>"
        '<div class="cards" id="larger-cards"></div></section>'
    )


# Plots and tables ----------------------------------------------------------------------------------------------------


def retention_plot(story: Story) -> str:
    """Retention over the number of kept tokens, with intervals."""
    rows = summary_rows(story)
    budgets = sorted(BUDGETS)
    lines = []
    for name, label in LABELS.items():
        found = [(keep, rows[name, keep]) for keep in budgets if (name, keep) in rows]
        if name != "full" and found:
            lines.append(
                Line(
                    label=label,
                    css=name,
                    points=[(keep, row["retention"]) for keep, row in found],
                    interval=[tuple(row["ci95"]) for _, row in found],
                )
            )
    ends = [value for line in lines for pair in line.interval for value in pair]
    axes = Axes(
        x_ticks=budgets,
        y_ticks=nice_ticks(min(ends, default=0.0), max(100.0, *ends) if ends else 100.0),
        x_name=f"visual tokens kept, of {story.num_visual}",
        y_name="retention, %",
        log_x=True,
    )
    return plot(lines, axes, title="Retention by number of kept tokens")


def retention_table(story: Story) -> str:
    """Retention with its interval, by method and budget."""
    rows = summary_rows(story)
    body = []
    for name, label in LABELS.items():
        found = [rows.get((name, story.num_visual if name == "full" else keep)) for keep in BUDGETS]
        body.append(_row([escape(label), *map(_retention_cell, found)], ours=name == "diffprune"))
    return _table("retention", ["Retention, %", *(f"{keep} tokens" for keep in BUDGETS)], body)


def _retention_cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return ""
    if row["method"] == "full":
        return "100"
    low, high = row["ci95"]
    return f"{row['retention']:.1f}<small>{low:.1f} to {high:.1f}</small>"


def task_tables(story: Story) -> str:
    """For each budget the scores of every method on every task."""
    scores = {(row["method"], row["keep"], row["task"]): row["score"] for row in story.rows if "task" in row}
    chances = ["Chance", *(f"{story.chance[task]:.1f}" for task in story.chance)]
    tables = []
    for keep in BUDGETS:
        body = [
            _row(
                [
                    escape(label),
                    *(f"{scores[name, 1.0 if name == 'full' else keep, task]:.1f}" for task in story.chance),
                ],
                ours=name == "diffprune",
            )
            for name, label in LABELS.items()
        ]
        table = _table(f"tasks-{keep}", ["Score", *map(escape, story.chance)], [*body, _row(chances)])
        tables.append(f'<div class="scroll" data-budget="{keep}"><h3>{keep} tokens</h3>{table}</div>')
    return "".join(tables)


def _row(cells: Sequence[str], *, ours: bool = False) -> str:
    mark = ' class="ours"' if ours else ""
    return f"<tr{mark}>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _table(name: str, head: Sequence[str], rows: Sequence[str]) -> str:
    cells = "".join(f"<th>{cell}</th>" for cell in head)
    return f'<table class="data" id="{name}"><thead><tr>{cells}</tr></thead><tbody>{"".join(rows)}</tbody></table>'


def loss_plot(story: Story) -> str:
    """Both training losses over the share of the training time."""
    lines = [
        Line(label=LABELS[name], css=name, points=_over_time(smooth(values)), faint=_over_time(values))
        for name, values in story.losses.items()
    ]
    heights = [value for values in story.losses.values() for value in values]
    axes = Axes(
        x_ticks=(0, 25, 50, 75, 100),
        y_ticks=nice_ticks(0.0, max(heights)),
        x_name="share of the training time, %",
        y_name="caption loss, nats per token",
    )
    return plot(lines, axes, title="Training losses")


def _over_time(values: Sequence[float]) -> list[tuple[float, float]]:
    last = max(1, len(values) - 1)
    return [(100.0 * step / last, value) for step, value in enumerate(values)]


def _steps(story: Story) -> str:
    counts = " and ".join(f"{len(values):,} steps for {LABELS[name]}" for name, values in story.losses.items())
    return f"{counts}, {story.settings.batch_size} captions each"


def seconds_bars(story: Story) -> str:
    """How long each part took."""
    longest = max(story.seconds.values())
    bars = [
        f"<dt>{escape(PARTS[part])}</dt>"
        f'<dd><div class="bar" style="width:{100 * value / longest:.1f}%"></div></dd><dd>{value:.1f} s</dd>'
        for part, value in story.seconds.items()
    ]
    total = f"<dt>in all</dt><dd></dd><dd>{sum(story.seconds.values()):.1f} s</dd>"
    return f'<dl class="bars">{"".join(bars)}{total}</dl>'


def cost_table(story: Story) -> str:
    """Tokens, counted operations and measured seconds, before and after."""
    most, longest = story.flops[story.num_visual], story.answer_seconds[story.num_visual]
    rows = [
        _row(
            [
                str(kept),
                f"{kept + story.num_text:.0f}",
                f"{flops / 1e6:,.0f} M<small>1 / {most / flops:.1f}</small>",
                f"{story.answer_seconds[kept]:.1f} s<small>1 / {longest / story.answer_seconds[kept]:.1f}</small>",
            ],
            ours=kept == BUDGETS[1],
        )
        for kept, flops in story.flops.items()
    ]
    head = ["Visual tokens", "Prompt, mean", "Prefill operations", f"{story.num_prompts:,} answers"]
    return _table("costs", head, rows)


def _commands(story: Story, out: Path) -> str:
    question, _ = _wording(story.examples[0].question)
    folder = str(out)
    picture, pruner = shlex.quote(f"{folder}/picture.png"), shlex.quote(f"{folder}/pruner")
    items = [
        (
            "Ask with the pruner you have just trained, about the first picture above:",
            f"diffprune ask --pruner {pruner} --image {picture} --keep {BUDGETS[1]} {shlex.quote(question)}",
        ),
        (
            "Measure it at other budgets:",
            f"diffprune eval --pruner {pruner} --methods full,diffprune,random --keep 64,24,4 --out results/mine.json",
        ),
        ("See all methods and models that can be combined:", "diffprune methods\ndiffprune backbones"),
        (
            "Prune a real model, with no training:",
            "diffprune ask --model llava-hf/llava-1.5-7b-hf --method cls_attention --keep 64 "
            '--image photo.jpg "What is this?"',
        ),
    ]
    return "".join(
        f'<div class="command"><p>{escape(text)}</p><pre>{escape(command)}</pre></div>' for text, command in items
    )


def _footer(story: Story) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in story.versions.items())
    return (
        f"<p>{escape(story.device)}. {escape(versions)}. Seed {story.settings.seed}.</p>"
        f"<p>Made by <code>{escape(story.command)}</code>; the numbers are in summary.json beside this page.</p>"
    )
