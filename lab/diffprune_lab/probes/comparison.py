"""The paper's statements beside ours in both worlds: blocks of docs/evidence.md that are made from several files."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from diffprune.report.cells import DASH
from diffprune.results import markdown_table
from diffprune_lab.probes.bench import PLAIN
from diffprune_lab.probes.figures import label
from diffprune_lab.probes.measured import Found, difference, next_best, results_of, rows_of, summaries
from diffprune_lab.probes.store import Row

WORLDS = {"first world": "scenes", "scarce world": "scarce"}
RETENTION = {128: 97.6, 64: 96.5, 32: 94.0}  # the paper's Table 1
AHEAD = {128: 0.4, 64: 1.4, 32: 2.0}  # of the next best method there
ABLATIONS = {  # its Table 5: what each loses, by budget
    "Gumbel-STE": {64: 8.1, 128: 6.0},
    "scale gate": {64: 2.3, 128: 2.5},
    "global attention": {64: 2.8, 128: 2.3},
}
ABLATED = {"Gumbel-STE": "gumbel_ste", "scale gate": "diffprune-scale", "global attention": "diffprune-global"}
RULES = {  # how the scores came about and are used; the first that a file has is taken
    "paper's recipe, top-K": ("diffprune-paper",),
    "ours": ("diffprune-diverse", "diffprune"),
}
COHERENCE, VARIATION = 28.4, 24.0  # most times as coherent, about so many times as rough
EFFICIENCY = {  # its Table 4, A6000: encode, pruner, prefill, ttft in ms
    "full": (29.71, 0.00, 118.66, 149.51),
    "prunesid": (31.80, 43.39, 39.74, 115.84),
    "pyramiddrop": (29.54, 5.02, 70.08, 105.90),
    "holov": (31.96, 2.77, 41.48, 77.39),
    "diffprune": (30.41, 0.69, 41.61, 73.73),
}
LEAKS = {  # what it says of each
    "diagonal attention": "not read",
    "scale gate": "weaker restriction than noise",
    "global attention": "read",
}
NUM_TEXT = 100  # words of the prompt; about so many make the paper's FLOPs
TIMES = ("encode_ms", "pruner_ms", "prefill_ms", "ttft_ms")
MISSING = "not measured"  # a cell whose rows are still to come
NO_RATIO, NO_TOKEN = "no ratio, 0 is inside", "no such token"  # cells of rows that are there and have no number
PROBED = "runs/scarce_probes.sh OUT COMMIT out/study-{world}"
COMMANDS = {  # what makes the rows of a world's file, by the file's name without the world; of all others the study
    "coherence": PROBED,
    "landscape": PROBED,
    "leak": PROBED,
    "rivals": "WORLD={world} FREE=nothing runs/study.sh all OUT COMMIT",
}
STUDY = "WORLD={world} runs/study.sh all OUT COMMIT"
COLUMNS = ("statement", "paper", *WORLDS, "agrees (first / scarce)")
RULE = (
    "A lead or a loss *agrees* where its 95 % interval lies above 0 and reaches the paper's number, has the *same "
    "sign* where it stays below it, is *opposite* where it lies below 0, and *not shown* where 0 is inside. A "
    "retention agrees where its interval holds the paper's number; else it is *more* or *less*. Where two rows have no "
    "paired interval of their difference, one is made of both of theirs, which is wider. An interval over questions "
    "alone, of before seeds were resampled, says nothing of other seeds: *not shown*. \\* 0 is outside the interval, "
    "but Holm's correction over its file does not hold it, so it is not claimed; what is made of two intervals has no "
    "correction.\n"
)


# --- what is read -----------------------------------------------------------------------------------------------------


def retention(rows: Sequence[Row], keep: int, rule: str) -> Found | None:
    found = summaries(rows, keep)
    for name in RULES[rule]:
        if name in found:
            return Found(found[name]["retention"], *found[name]["ci95"], name=name)
    return None


def ahead(rows: Sequence[Row], keep: int, rule: str) -> Found | None:
    found = summaries(rows, keep)
    rival = next_best(found)
    for name in RULES[rule]:
        lead = difference(found, name, rival) if rival else None
        if lead is not None:
            return lead._replace(name=rival or "")
    return None


def loss_without(rows: Sequence[Row], keep: int, part: str, rule: str) -> Found | None:
    """What a part is worth: the method minus the method without it, both by one recipe and by top-K."""
    found, other = summaries(rows, keep), ABLATED[part]
    if rule == "ours":
        return difference(found, "diffprune", other)
    return difference(found, "diffprune-paper", other if part == "Gumbel-STE" else f"{other}-paper")


def ratio(rows: Sequence[Row], *values: str) -> Found | str | None:
    """Of DiffPrune without our additions at the start of training: how many times as coherent, or as smooth.

    Of budgets the most, as the paper has it; of temperatures the one that a training starts from.

    Args:
        values: What the rows call it; the first that any has is taken.
    """
    start = [row for row in rows if row["method"] == PLAIN and row.get("moment", 0) == 0]
    value = next((value for value in values if any(value in row for row in start)), None)
    if value is None:
        return NO_RATIO if start else None
    chosen = [row for row in start if value in row]
    row = max(chosen, key=lambda row: (row.get("tau", 0.0), row[value]))
    low, high = row["ci95"] if value == "ratio" and "cosine" not in row else (row["ratio_at_least"], math.inf)
    return Found(row[value], low, high)


# --- what is said -----------------------------------------------------------------------------------------------------


def verdict(found: Found, printed: float, than: float = 0.0) -> str:
    """In a word, from the interval: on which side of `than` it lies, and whether it reaches what is printed."""
    if found.is_averaged or found.low <= than <= found.high:
        return "not shown"
    said = "opposite" if found.high < than else "agrees" if found.high >= printed else "same sign"
    return said if found.is_held else f"{said}\\*"


def reaches(found: Found, printed: float) -> str:
    """Whether the interval holds what is printed."""
    return "more" if found.low > printed else "less" if found.high < printed else "agrees"


def file_of(world: str, table: str) -> str:
    """The name of a world's results file; the scarce world's main table is called by what it holds, all methods."""
    return "scarce_methods" if (world, table) == ("scarce", "main") else f"{world}_{table}"


def command_of(world: str, table: str) -> str:
    """The command that makes the rows of a world's file."""
    return COMMANDS.get(table, STUDY).format(world=world)


def not_measured(world: str, prefix: str, table: str) -> str:
    """What stands in the place of a world's table of which nothing was measured."""
    said = f"not measured yet; `{command_of(prefix, table)}` makes `results/{file_of(prefix, table)}.json`"
    return f"The {world}: {said}.\n"


def still_to_come(missing: Sequence[tuple[str, str]]) -> str:
    """Which commands make what is not measured yet; nothing where nothing is missing.

    Args:
        missing: Command and results file of each number that has no rows.
    """
    files: dict[str, dict[str, None]] = {}
    for command, file in missing:
        files.setdefault(command, {})[f"`results/{file}.json`"] = None
    made = [f"`{command}` makes the rows of {', '.join(names)}" for command, names in files.items()]
    return f"Not measured yet: {'; '.join(made)}.\n" if made else ""


def table_of(statements: Sequence[Row]) -> str:
    """Lines of `line` as a table with its rule, and the commands for what is missing; these alone where all is."""
    missing = [
        (command_of(prefix, row["file"]), file_of(prefix, row["file"]))
        for world, prefix in WORLDS.items()
        for row in statements
        if row[world] == MISSING
    ]
    todo = still_to_come(missing)
    if len(missing) == len(WORLDS) * len(statements):
        return todo
    return "\n".join([markdown_table(statements, COLUMNS), *([todo] if todo else []), RULE])


Ask = Callable[[Sequence[Row]], Found | str | None]  # a number, why there is none, or nothing that was measured


def line(results: Path, statement: str, printed: str, file: str, ask: Ask, judge: Callable[[Found], str]) -> Row:
    """A statement of the paper with what both worlds say of it; a world that has no rows for it says so."""
    said: Row = {"statement": statement, "paper": printed, "file": file}
    verdicts = []
    for world, prefix in WORLDS.items():
        rows = rows_of(results, file_of(prefix, file))
        found = None if rows is None else ask(rows)
        said[world] = MISSING if found is None else str(found)
        verdicts.append("-" if found is None else "not shown" if isinstance(found, str) else judge(found))
    return {**said, "agrees (first / scarce)": " / ".join(verdicts)}


def retentions(results: Path) -> list[Row]:
    """Table 1: retention, and the lead over the next best method, by both rules."""
    statements = (("keeps", RETENTION, retention, reaches), ("ahead of the next best", AHEAD, ahead, verdict))
    return [
        line(
            results,
            f"{statement} at {keep} ({rule})",
            f"{printed}",
            "main",
            partial(ask, keep=keep, rule=rule),
            partial(judge, printed=printed),
        )
        for rule in RULES
        for statement, table, ask, judge in statements
        for keep, printed in table.items()
    ]


def ablations(results: Path) -> list[Row]:
    """Table 5: what is lost without each part, by the paper's recipe and by ours."""
    return [
        line(
            results,
            f"{part} loses at {keep} ({rule})",
            f"{printed}",
            "ablation",
            partial(loss_without, keep=keep, part=part, rule=rule),
            partial(verdict, printed=printed),
        )
        for rule in RULES
        for part, by_budget in ABLATIONS.items()
        for keep, printed in by_budget.items()
    ]


def gradients(results: Path) -> list[Row]:
    """Figures 2 and 3, on the scorers of the worlds' own models."""
    coherent = "gradients of batches agree, times Gumbel-STE's, at the start"
    smooth = "loss varies along a line, Gumbel-STE's times ours, at the start"
    return [
        line(
            results,
            coherent,
            f"up to {COHERENCE}",
            "coherence",
            lambda rows: ratio(rows, "ratio", "ratio_at_least"),
            partial(verdict, printed=COHERENCE, than=1.0),
        ),
        line(
            results,
            smooth,
            f"about {VARIATION:g}",
            "landscape",
            lambda rows: ratio(rows, "ratio"),
            partial(verdict, printed=VARIATION, than=1.0),
        ),
    ]


def leaks(results: Path) -> list[Row]:
    """What can be read behind the block from tokens of little weight."""
    statement = "another thing's color behind the block, percent over chance"
    return [
        line(
            results,
            f"{statement}: {throttler} ({recipe} recipe)",
            said,
            "leak",
            partial(over_chance, recipe=recipe, throttler=throttler),
            lambda found: "read" if found.low > 0 else "not read",
        )
        for recipe in ("paper", "bridge")
        for throttler, said in LEAKS.items()
    ]


def over_chance(rows: Sequence[Row], recipe: str, throttler: str) -> Found | str | None:
    """How far above chance a probe reads tokens of the ground behind the block."""
    for row in rows:
        place = (row["recipe"], row["throttler"], row["place"], row["reads"], row["stage"])
        if place == (recipe, throttler, "ground", "other", "block"):
            if "accuracy" not in row:
                return NO_TOKEN
            return Found(*(value - row["chance"] for value in (row["accuracy"], *row["ci95"])))
    return None


def about_paper(results: Path) -> str:
    """One table for the whole paper."""
    return table_of([*retentions(results), *ablations(results), *gradients(results), *leaks(results)])


def about_table1(results: Path) -> str:
    """The best methods of each world beside the paper's numbers, by budget."""
    parts = []
    for world, prefix in WORLDS.items():
        file = file_of(prefix, "main")
        rows = rows_of(results, file)
        if rows is None:
            parts.append(not_measured(world, prefix, "main"))
            continue
        by_budget: dict[int | float, dict[str, Row]] = {keep: summaries(rows, keep) for keep in RETENTION}
        names = [name for rule in RULES.values() for name in rule] + ["gumbel_ste", "random", "oracle"]
        for found in by_budget.values():
            if (rival := next_best(found)) is not None:
                names.append(rival)
        table: list[Row] = [
            {"method": "DiffPrune (paper, LLaVA-1.5-7B)", **{f"K = {k}": f"{v}" for k, v in RETENTION.items()}}
        ]
        for name in dict.fromkeys(names):
            if any(name in found for found in by_budget.values()):
                table.append({"method": label(name), **cells_of(name, by_budget)})
        parts.append(f"The {world} (`results/{file}.json`):\n\n{markdown_table(table)}")
    return "\n".join(parts)


def cells_of(name: str, by_budget: Mapping[int | float, Mapping[str, Row]]) -> dict[str, str]:
    """A method's retention with its interval at every budget."""
    return {
        f"K = {keep}": str(Found(found[name]["retention"], *found[name]["ci95"])) if name in found else DASH
        for keep, found in by_budget.items()
    }


def about_table4(results: Path) -> str:
    """The paper's milliseconds beside ours, of one picture at K = 64."""
    measured = results_of(results, "ttft")
    if measured is None:
        return "Not measured yet; `runs/measure_gpu.sh OUT COMMIT ttft` makes `results/ttft.json`.\n"
    table = []
    for method, printed in EFFICIENCY.items():
        named = zip(TIMES, printed, strict=True)
        table.append({"method": label(method), "path": "paper, A6000", **{name: f"{ms:.2f}" for name, ms in named}})
        for row in measured.rows:
            is_it = row.get("method") == method and row.get("backbone") == "llava-1.5-7b" and "ttft_ms" in row
            if is_it and (row["batch"], row["num_text"]) == (1, NUM_TEXT) and row["num_kept"] in (64, 576):
                own = {name: f"{row[name]:.2f}" if name in row else MISSING for name in TIMES}
                table.append({"method": label(method), "path": f"ours, {row['path']}", **own})
    what = f"LLaVA-1.5-7B's shape, one picture, {NUM_TEXT} text tokens, K = 64 (`results/ttft.json`)"
    return f"{markdown_table(table)}\nOurs on {measured.device}, {what}.\n"


def about_table5(results: Path) -> str:
    """What each part is worth, in both worlds and by both recipes."""
    return table_of(ablations(results))


def about_leak(results: Path) -> str:
    """Of every throttler what is read from tokens of little weight: in the features, behind the gate and the block."""
    parts = []
    for world, prefix in WORLDS.items():
        found = results_of(results, f"{prefix}_leak")
        if found is None:
            parts.append(not_measured(world, prefix, "leak"))
            continue
        table: dict[tuple[str, ...], Row] = {}
        for row in found.rows:
            key = {name: row[name] for name in ("recipe", "throttler", "place", "reads")}
            one = table.setdefault(tuple(key.values()), dict(key))
            if "accuracy" not in row:
                one[row["stage"]] = NO_TOKEN
                continue
            one[row["stage"]] = str(Found(row["accuracy"], *row["ci95"]))
            one["chance"] = f"{row['chance']:.1f}"
            if "added" in row:
                one["the block adds"] = str(Found(row["added"], *row["added_ci95"]))
        columns = ["recipe", "throttler", "place", "reads", "chance", "features", "gate", "block", "the block adds"]
        parts.append(f"The {world} (`results/{prefix}_leak.json`):\n\n{markdown_table(list(table.values()), columns)}")
        parts.append(f"{found.notes[:1].upper()}{found.notes[1:]}.\n")
    return "\n".join(parts)


PAGES: dict[str, Callable[[Path], str]] = {
    "paper": about_paper,
    "table1": about_table1,
    "table4": about_table4,
    "table5": about_table5,
    "leak": about_leak,
}
