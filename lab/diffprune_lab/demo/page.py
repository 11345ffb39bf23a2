"""The page: one HTML file that needs nothing else, made from a `Story`."""

import base64
import io
import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from PIL import Image

from diffprune.evaluate.task import Question
from diffprune.serve import LOOK
from diffprune_lab.demo.examples import Example, is_right
from diffprune_lab.demo.plots import Axes, Line, nice_ticks, plot, smooth
from diffprune_lab.demo.story import BUDGETS, TRAINED_BUDGETS, Story
from diffprune_lab.demo.words import (
    LABELS,
    OURS,
    commands,
    differing,
    facts,
    headline,
    labels,
    lead,
    summary_rows,
    wording,
)
from diffprune_lab.scenes.reference import ASSETS

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
        "style": "\n".join(file.read_text(encoding="utf-8").strip() for file in (LOOK, assets / "page.css")),
        "script": (assets / "page.js").read_text(encoding="utf-8").strip(),
        "headline": escape(headline(story)),
        "lead": lead(story),
        "facts": facts(story),
        "budget_buttons": _buttons({str(keep): f"{keep} tokens" for keep in BUDGETS}),
        "method_buttons": _buttons(labels(story)),
        "differing": differing(story),
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
        "commands": commands(story, out),
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
        "methods": [{"name": name, "label": label} for name, label in labels(story).items()],
        "examples": [_example(example) for example in story.examples],
        "larger": [_larger_example(example) for example in story.larger],
    }


def _example(example: Example) -> dict[str, Any]:
    question, options = wording(example.question)
    return {
        "png": png_address(example.picture),
        "grid": example.grid,
        "task": example.task,
        "differs": example.differs,
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


def _answer(question: Question, said: str) -> dict[str, Any]:
    return {"text": said, "right": is_right(question, said)}


def png_address(picture: Image.Image) -> str:
    """The picture itself as an address."""
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


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
    for name, label in labels(story).items():
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
    for name, label in labels(story).items():
        found = [rows.get((name, story.num_visual if name == "full" else keep)) for keep in BUDGETS]
        body.append(_row([escape(label), *map(_retention_cell, found)], ours=name in OURS))
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
                ours=name in OURS,
            )
            for name, label in labels(story).items()
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
    """Tokens and counted operations, before and after."""
    most = story.flops[story.num_visual]
    rows = [
        _row(
            [
                str(kept),
                f"{kept + story.num_text:.0f}",
                f"{flops / 1e6:,.0f} M<small>1 / {most / flops:.1f}</small>",
            ],
            ours=kept == BUDGETS[1],
        )
        for kept, flops in story.flops.items()
    ]
    head = ["Visual tokens", "Prompt, mean", "Prefill operations"]
    return _table("costs", head, rows)


def _footer(story: Story) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in story.versions.items())
    return (
        f"<p>{escape(story.device)}. {escape(versions)}. Seed {story.settings.seed}.</p>"
        f"<p>Made by <code>{escape(story.command)}</code>; the numbers are in summary.json beside this page.</p>"
    )
