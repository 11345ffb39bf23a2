"""Blocks of docs/evidence.md about our own scorers: other trained methods, budgets, throttled and hard, one config."""

from collections.abc import Callable, Sequence
from pathlib import Path

from diffprune.evaluate.answers import THROTTLED
from diffprune.evaluate.retention import retention
from diffprune.report.cells import DASH
from diffprune.results import markdown_table
from diffprune_lab.probes.bench import DIVERSE
from diffprune_lab.probes.comparison import MISSING, WORLDS, cells_of, not_measured, still_to_come
from diffprune_lab.probes.figures import label
from diffprune_lab.probes.measured import Found, difference, is_averaged, results_of, rows_of, summaries
from diffprune_lab.probes.store import Row

OURS = "diffprune"
OTHER_START = f"{OURS}[tau.drawn=false;tau.start="  # trained from another temperature than the config's
MODELS = {  # the models that the one config is for: the file that has them, and 11.1 % of their tokens
    "scenes-nano": ("recipe", 0.1111),
    "scenes-llava": ("recipe", 0.1111),
    "scarce-llava": ("recipe", 0.1111),
    "scenes-qwen-s": ("scaling", 0.1111),
    "scenes-qwen-m": ("scaling", 0.1111),
    "scenes-qwen-l": ("scaling", 0.1111),
    "scenes-llava-next": ("scenes_next", 320),
}
MADE_BY = {  # by file
    "recipe": "runs/recipe.sh OUT COMMIT",
    "scaling": "runs/qwen_tables.sh all OUT COMMIT",
    "scenes_next": "runs/scenes_next.sh all MINUTES OUT COMMIT",
}
RECIPE_COLUMNS = ("seeds", "mean", "worst training", "best known start", "within a point", "diverse choice")
RECIPE_RULE = "*Worst training*: the seed that keeps least. *Within a point*: of the best known start, every seed.\n"
MOST_BEHIND = 1.0  # points by which a training may be behind the best known start


def interval_of(row: Row) -> str:
    """A summary's retention with its interval."""
    return str(Found(row["retention"], *row["ci95"]))


def about_rivals(results: Path) -> str:
    """Trained methods by budget."""

    def table(rows: Sequence[Row]) -> list[Row]:
        trained = {row["method"]: row["n_seeds"] for row in rows if "retention" in row and "recipe" in row}
        trained = {name: count for name, count in trained.items() if not name.endswith(THROTTLED)}
        named = {name: {"method": label(name), "seeds": count} for name, count in trained.items()}
        return by_budget([row for row in rows if row["method"] in named], named)

    return of_worlds(results, ("rivals",), table)


def about_any_budget(results: Path) -> str:
    """One scorer for every budget beside one for each."""

    def table(rows: Sequence[Row]) -> list[Row]:
        names = (DIVERSE, OURS, f"{OURS}-dedicated", "random")
        return by_budget(rows, {name: {"method": label(name)} for name in names})

    return of_worlds(results, ("any_budget",), table)


def about_throttled(results: Path) -> str:
    """Ours and its ablations with tokens throttled and with tokens dropped, by budget, and the difference."""

    def table(rows: Sequence[Row]) -> list[Row]:
        throttled = dict.fromkeys(row["method"] for row in rows if row["method"].endswith(THROTTLED))
        lines = []
        for keep in budgets(rows):
            found = summaries(rows, keep)
            for name in (name.removesuffix(THROTTLED) for name in throttled):
                gap = difference(found, name + THROTTLED, name)
                if gap is not None:
                    lines.append({
                        "scorer": label(name),
                        "K": keep,
                        "seeds": found[name]["n_seeds"],
                        "throttled": interval_of(found[name + THROTTLED]),
                        "hard": interval_of(found[name]),
                        "throttled minus hard": str(gap),
                    })  # fmt: skip
        return lines

    return of_worlds(results, ("throttled", "rivals"), table)


def budgets(rows: Sequence[Row]) -> list[int | float]:
    """All budgets of some rows, the largest first."""
    found = {row["keep"] for row in rows if "retention" in row and row["method"] != "full"}
    return sorted(found, reverse=True)


def by_budget(rows: Sequence[Row], named: dict[str, Row]) -> list[Row]:
    """A line for each of these methods that is there, with its retention at every budget."""
    found = {keep: summaries(rows, keep) for keep in budgets(rows)}
    return [
        line | cells_of(name, found) for name, line in named.items() if any(name in there for there in found.values())
    ]


def of_worlds(results: Path, files: Sequence[str], table: Callable[[Sequence[Row]], list[Row]]) -> str:
    """A table for each world, from the first of its files that has one."""
    parts = []
    for world, prefix in WORLDS.items():
        for file in files:
            found = results_of(results, f"{prefix}_{file}")
            lines = [] if found is None else table(found.rows)
            if found is not None and lines:
                origin = f"`results/{prefix}_{file}.json`, {found.notes.partition(';')[0]}"
                if any(map(is_averaged, found.rows)):
                    origin += "; intervals over questions alone, seeds averaged"
                parts.append(f"The {world} ({origin}):\n\n{markdown_table(lines)}")
                if any(DASH in line.values() for line in lines):
                    parts.append("A dash: not asked in the runs of this file.\n")
                break
        else:
            parts.append(not_measured(world, prefix, files[0]))
    return "\n".join(parts)


def about_recipe(results: Path) -> str:
    """Of every model what trainings by the one config keep at 11.1 %, beside the best known start."""
    table = []
    missing = []
    for model, (file, keep) in MODELS.items():
        line: Row = {"model": model, **dict.fromkeys(RECIPE_COLUMNS, MISSING)}
        table.append(line)
        rows = rows_of(results, file) or []
        own = [row for row in rows if row.get("backbone", model) == model and row["keep"] == keep]
        found = summaries([row for row in own if row["method"] != OURS or row.get("recipe") == "bridge"], keep)
        if OURS not in found:
            missing.append((MADE_BY[file], file))
            continue
        each = by_seed([row for row in own if row["method"] == OURS])
        line |= {"seeds": len(each), "mean": interval_of(found[OURS]), "worst training": f"{min(each):.1f}"}
        if DIVERSE in found:
            line["diverse choice"] = interval_of(found[DIVERSE])
        starts = {name: row["retention"] for name, row in found.items() if name.startswith(OTHER_START)}
        if starts:
            best = max(starts, key=lambda name: starts[name])
            line["best known start"] = f"{starts[best]:.1f} (from {best.removeprefix(OTHER_START).rstrip(']')})"
            line["within a point"] = "yes" if min(each) >= starts[best] - MOST_BEHIND else "no"
    todo = still_to_come(missing)
    if len(missing) == len(table):
        return todo
    return "\n".join([markdown_table(table, ["model", *RECIPE_COLUMNS]), *([todo] if todo else []), RECIPE_RULE])


def by_seed(rows: Sequence[Row]) -> list[float]:
    """Retention of each seed's training."""
    asked = [row for row in rows if "task" in row and row["full_score"] > 0]
    full = {row["task"]: row["full_score"] for row in asked}
    seeds = dict.fromkeys(row["seed"] for row in asked)
    return [retention({row["task"]: row["score"] for row in asked if row["seed"] == seed}, full) for seed in seeds]


PAGES: dict[str, Callable[[Path], str]] = {
    "rivals": about_rivals,
    "any_budget": about_any_budget,
    "throttled": about_throttled,
    "recipe": about_recipe,
}
