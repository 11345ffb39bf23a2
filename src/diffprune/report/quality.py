"""Tables of quality: what is left by method and budget, which recipe a row is, which leads hold, scores by task."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from diffprune.evaluate.answers import THROTTLED
from diffprune.registry import METHODS
from diffprune.report.cells import DASH, LONG, budget_order, heading, noted_table, pivot
from diffprune.results import CI_OVER, Row, markdown_table

NAMES = {"taught": "supervised upper bound", "holov[variant=paper]": "holov-paper"}  # rows that are called otherwise
ONE_RULE = {"cls_attention": "fastervlm"}  # two names of one rule: one row
TRAINED = "recipe, choice"  # the column that says what a trained row is
OURS = "diffprune"
SMALLER = "downscale"  # the control that shrinks the picture
VARIANTS = ("method", "positions", "precision")  # what makes a row another row
FEW = 6  # methods of a list; of a longer one that is nearly everybody the exceptions are named


def name_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows with the names that tables use; of one rule under two names one row stays."""
    present = {row.get("method") for row in rows}
    found = []
    for row in rows:
        name = row.get("method")
        if name in ONE_RULE and ONE_RULE[name] in present:
            continue
        found.append({**row, "method": NAMES.get(name, ONE_RULE.get(name, name))} if name is not None else dict(row))
    return found


# --- which recipe, which choice ---------------------------------------------------------------------------------------


def trained_by(row: Row) -> str:
    """`bridge, top-k` of our own scorers, "own" of other trained methods, a dash of those without training.

    Rows of before recipe and choice were recorded say it by their label: `diffprune` was trained by the bridge, a label
    with `-paper` by the paper's recipe, and all chose the K best.
    """
    name = str(row["method"])
    if name.startswith(OURS):
        recipe = row.get("recipe") or ("paper" if "-paper" in name else "bridge")
        choice = "none dropped" if name.endswith(THROTTLED) else row.get("choice", "top-k")
        return f"{recipe}, {choice}"
    rule = name.partition("[")[0]
    is_trained = "recipe" in row or (rule in METHODS.names() and METHODS.get(rule).trained)
    return "own" if is_trained else DASH


def about_rows(rows: Sequence[Row], *, leads: bool = True) -> list[str]:
    """What a reader must know of a summary table: its intervals, leads that hold, repetitions, settings, labels.

    Args:
        leads: Say them here; they may stand above the table already.
    """
    parts: list[str] = []
    if any("ci95" in row for row in rows) and not any("ci_over" in row for row in rows):
        parts.append(f"Intervals are over {CI_OVER[0]} alone, seeds averaged: no lead is claimed from them.")
    parts += _leads(rows) if leads else []
    parts += _of_one_training(rows)
    parts += _counts(rows)
    parts += _first_tokens(rows)
    apart = [
        f"{row['method']} at {row['keep']} by {row['repeat_std']:.1f} ({row['repeat_of']})"
        for row in rows
        if "repeat_std" in row
    ]
    parts += [f"Runs of one training with one seed lie apart (deviation): {', '.join(apart)}."] if apart else []
    trained = {str(row["method"]): trained_by(row) for row in rows}
    if "own" in trained.values() and any(name.startswith(OURS) for name in trained):
        found: dict[str, dict[str, None]] = {}
        for row in rows:
            if "tuned" in row:
                found.setdefault(row["tuned"], {})[row["method"]] = None
        said = "; ".join(f"{', '.join(names)}: {words}" for words, names in found.items())
        parts.append(f"Settings of trained methods: {said or 'how they were found is not recorded in this file'}.")
    if any(text != DASH for text in trained.values()) and not any("recipe" in row for row in rows):
        parts.append("Recipe and choice by label: the file is of before they were recorded.")
    return [" ".join(parts) + "\n"] if parts else []


def _leads(rows: Sequence[Row]) -> list[str]:
    """Of whom over whom a lead holds, at which budgets; of several models each by itself."""
    known = [row for row in rows if "lead_holds" in row]
    models = dict.fromkeys(row.get("backbone") for row in known)
    return [
        (f"{model}: " if len(models) > 1 else "") + _leads_of([row for row in known if row.get("backbone") == model])
        for model in models
    ]


def _of_one_training(rows: Sequence[Row]) -> list[str]:
    """Trained methods in leads whose interval knows nothing of their other seeds."""
    compared = {name for row in rows if "lead_holds" in row for name in (row["method"], row["versus"])}
    alone = [row["method"] for row in rows if row.get("n_seeds") == 1 and trained_by(row) != DASH]
    names = [name for name in dict.fromkeys(alone) if name in compared]
    words = "Of one training alone, so that leads over it or of it say nothing of other seeds"
    return [f"{words}: {', '.join(names)}."] if names else []


def _leads_of(known: Sequence[Row]) -> str:
    ours, verb, count = known[0]["versus"], "is", str(len(known))
    if any(key in row for row in known for key in VARIANTS[1:]):  # each method against itself
        ours, verb = ("the model's own precision", "is") if "precision" in known[0] else (f"{ours} positions", "are")
        count = "the budgets of each method"
    parts = []
    for words, sign in (("ahead of", 1), ("behind", -1)):
        said = []
        for keep in sorted({row["keep"] for row in known}, key=budget_order):
            rows = [row for row in known if row["keep"] == keep]
            if held := {
                row["method"]: sign * row["lead"] for row in rows if row["lead_holds"] and sign * row["lead"] > 0
            }:
                said.append(f"at {keep} {_list_leads(held, [row['method'] for row in rows])}")
        parts.append(f"{ours} {verb} {words}: {'; '.join(said) or 'none'}.")
    return f"Leads that hold (95 % interval without 0, Holm's correction over {count}): {' '.join(parts)}"


def _list_leads(held: Mapping[str, float], compared: Sequence[str]) -> str:
    """Each method with its lead in points; of nearly all that are compared those that are not among them."""
    others = [method for method in compared if method not in held]
    if len(held) <= FEW or 3 * len(others) > len(held):
        return ", ".join(f"{method} ({lead:.1f})" for method, lead in held.items())
    exceptions = f" but {', '.join(others)}" if others else ""
    return f"all {len(compared)} others{exceptions} ({min(held.values()):.1f} to {max(held.values()):.1f})"


def _counts(rows: Sequence[Row]) -> list[str]:
    """How many questions are hard, and how many tokens a smaller picture has beside what others keep."""
    parts = []
    for model in dict.fromkeys(row.get("backbone") for row in rows):
        own = sorted((row for row in rows if row.get("backbone") == model), key=lambda row: budget_order(row["keep"]))
        hard = {row["keep"]: row["num_hard"] for row in own if "num_hard" in row}
        kept = {row["keep"]: row["num_kept"] for row in own if row["method"] != SMALLER and "num_kept" in row}
        smaller = [
            f"{row['num_kept']:.1f} at {row['keep']} (others {kept[row['keep']]:.1f})"
            for row in own
            if row["method"] == SMALLER and row["keep"] in kept
        ]
        of = f" of {model}" if model else ""
        if hard:
            said = ", ".join(f"{count} at {keep}" for keep, count in hard.items())
            parts.append(f"Hard questions{of}: {said}.")
        if smaller:
            parts.append(f"Tokens of a smaller picture{of}: {', '.join(smaller)}.")
    return parts


def _first_tokens(rows: Sequence[Row]) -> list[str]:
    """What fewer bits do to the first token, beside what dropping tokens does."""
    cells: dict[str, list[str]] = {}
    for row in rows:
        if "precision" in row and "first_token_kl" in row:
            place = f"{row['method']} at {row['keep']}"
            cells.setdefault(place, []).append(f"{row['precision']} {row['first_token_kl']:.2g}")
    said = "; ".join(f"{place} {', '.join(values)}" for place, values in cells.items())
    return [f"KL of the first token to that of all tokens in the model's own precision: {said}."] if said else []


# --- what is left -----------------------------------------------------------------------------------------------------


def summary_tables(rows: Sequence[Row]) -> list[str]:
    """Methods down, budgets across: what is left of the full model's score.

    The full model's own row, 100, is not shown; what became of it otherwise is (`versus`). Several models stand side by
    side, without intervals. Where the methods are many, those with several seeds have a table of their own. Whether the
    smaller picture wins is said before anything else.
    """
    pruned = [row for row in rows if row["method"] != "full" or "versus" in row] or list(rows)
    models = dict.fromkeys(row.get("backbone") for row in pruned)
    parts: list[str] = []
    for tasks in dict.fromkeys(row.get("tasks") for row in pruned):
        chosen = [row for row in pruned if row.get("tasks") == tasks]
        parts += [f"tasks {tasks}:\n"] if tasks else []
        control = [" ".join(_leads(chosen)) + "\n"] if any(row.get("versus") == SMALLER for row in chosen) else []
        parts += control
        if len(models) > 1:
            parts.append(by_budget(chosen, lambda row: retention_cell(row, interval=False)))
            parts += about_rows(chosen, leads=not control)
            continue
        parts += [f"{model}:\n" for model in models if model]
        several = {row["method"] for row in chosen if row.get("n_seeds", 1) > 1}
        if len({row["method"] for row in chosen}) <= LONG or not several:
            parts.append(by_budget(chosen, retention_cell))
        else:
            for title, is_in in (("Several seeds", True), ("One run", False)):
                some = [row for row in chosen if (row["method"] in several) == is_in]
                parts += [f"{title}:\n", by_budget(some, retention_cell)]
        parts += about_rows(chosen, leads=not control)
        parts += equal_average_table(chosen)
    return parts


def by_budget(rows: Sequence[Row], cell: Callable[[Row], str], *, trained: bool = True) -> str:
    """A table with a row per method (by rule of positions or precision) and a column per model and budget.

    Args:
        cell: Fills it.
        trained: Say which recipe and choice a row is, where one was trained.
    """
    models = list(dict.fromkeys(row.get("backbone") for row in rows))

    def title(row: Row) -> str:
        return f"{row['backbone']}, {heading('keep', row)}" if len(models) > 1 else heading("keep", row)

    ordered = sorted(rows, key=lambda row: (models.index(row.get("backbone")), budget_order(row["keep"])))
    columns = list(dict.fromkeys(title(row) for row in ordered))
    labels = [key for key in VARIANTS if any(key in row for row in rows)]
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        own = {key: str(row.get(key, DASH)) for key in labels}
        line = lines.setdefault(tuple(own.values()), {**own, TRAINED: trained_by(row)})
        line[title(row)] = cell(row)
    labels += [TRAINED] if trained and any(line[TRAINED] != DASH for line in lines.values()) else []
    filled = [{key: line.get(key, DASH) for key in (*labels, *columns)} for line in lines.values()]
    return markdown_table(filled, [*labels, *columns])


def retention_cell(row: Row, interval: bool = True) -> str:
    """The retention, its deviation over seeds, its interval and the mean over layers, as far as they are there."""
    mark = {1: "**", 2: "_"}.get(row.get("rank", 0), "")
    spread = f" ± {row['retention_std']:.1f}" if row.get("n_seeds", 1) > 1 and "retention_std" in row else ""
    around = " ({:.1f} to {:.1f})".format(*row["ci95"]) if interval and "ci95" in row else ""
    return f"{mark}{row['retention']:.1f}{mark}{spread}{around}{average_of(row)}"


def average_of(row: Row) -> str:
    """Visual tokens a decoder layer holds, in square brackets, where a method drops them inside the language model."""
    return f" [{row['average']:.1f}]" if "average" in row else ""


def equal_average_table(rows: Sequence[Row]) -> list[str]:
    """Methods inside the language model beside the method of comparison with no more tokens in a layer than they hold.

    K of such a method is what stays after its last cut, so at equal K its layers hold more. Here each stands beside the
    largest budget of the other one that is at most its mean over layers: who is behind here is so with more tokens.
    (`fastv[budget=average]` and its like make K the mean over layers, where the model is deep enough for that.)
    """
    reference = next((str(row["versus"]) for row in rows if "versus" in row), OURS)
    other = {row["keep"]: row for row in rows if row["method"] == reference and isinstance(row["keep"], int)}
    inside = [row for row in rows if "average" in row and any(keep <= row["average"] for keep in other)]
    if not inside:
        return []

    def cell(row: Row) -> str:
        best = other[max(keep for keep in other if keep <= row["average"])]
        return f"{row['retention']:.1f} with {row['average']:.1f}, {best['retention']:.1f} with {best['keep']}"

    title = (
        f"At equal average, what is left with how many tokens in a layer: methods inside the language model, and "
        f"{reference} at the largest budget measured that is no larger:\n"
    )
    return [title, by_budget(inside, cell, trained=False)]


# --- scores by task ---------------------------------------------------------------------------------------------------


def quality_tables(rows: Sequence[Row]) -> list[str]:
    """Methods and budgets down, tasks across; what a guess without the picture gets at the end."""
    ordered = sorted(rows, key=lambda row: budget_order(row["keep"]))
    tasks = dict.fromkeys(heading("task", row) for row in rows)
    methods = list(dict.fromkeys(row["method"] for row in rows))
    ordered.sort(key=lambda row: methods.index(row["method"]))
    by_task = pivot(ordered, ["method", "keep"], [heading("task", row) for row in ordered], "score")
    by_task = [{**row, "keep": str(row["keep"])} for row in by_task]  # 1.0 is everything, 1 is one token
    return noted_table(by_task + _chance_rows(rows), ["method", "keep", *tasks], ["method", "keep"])


def _chance_rows(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """By task the score of the best guess without the picture, as one last row; none where no row has it."""
    by_task: dict[str, list[float]] = {}
    for row in rows:
        if row.get("chance") is not None:
            by_task.setdefault(heading("task", row), []).append(row["chance"])
    means = {task: fmean(values) for task, values in by_task.items()}
    return [{"method": "chance", "keep": DASH} | means] if means else []
