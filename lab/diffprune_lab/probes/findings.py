"""The tables of docs/evidence.md, each made from the rows of a results file."""

import statistics
from collections.abc import Callable, Sequence

from diffprune.evaluate.answers import THROTTLED
from diffprune.evaluate.leads import NO_RIVALS
from diffprune.results import markdown_table
from diffprune_lab.probes import coherence, relevance, scaling
from diffprune_lab.probes.bench import DIVERSE, LEARNED, PLAIN, SUPERVISED
from diffprune_lab.probes.figures import backbones_of, label
from diffprune_lab.probes.run import BACKBONES_FILE
from diffprune_lab.probes.store import Row

BUDGETS = (0.0556, 0.1111)  # of the relevance target
PAPER_QWEN = {66.7: "98.3", 77.8: "95.9", 88.9: "93.1"}  # the paper's average on Qwen2.5-VL-7B, by percent pruned
INSIDE = r"\* drops inside the language model: its first layers see more than K tokens (`average` in the file)."


def columns_of(*names: str) -> Callable[[Sequence[Row]], str]:
    """A table of these columns, with a line for every row."""
    return lambda rows: markdown_table(rows, names)


def about_coherence(rows: Sequence[Row]) -> str:
    """Cosines at the start by budget, cosines along training, and top-1 by budget."""
    cosines = [row for row in rows if "moment" in row]
    main = coherence.main_keep(cosines)
    theirs = {coherence.place_of(row): row["cosine"] for row in cosines if row["method"] == "gumbel_ste"}
    table = [
        {
            "backbone": label(row["backbone"]),
            "kept": f"{100 * row['keep']:g} %",
            "training": f"{row['moment']:.0%}{', no bridge' if row['method'] == PLAIN else ''}",
            "DiffPrune": row["cosine"],
            "Gumbel-STE": theirs.get(coherence.place_of(row)),
            "ratio": row.get("ratio"),
            "ratio at least": row.get("ratio_at_least"),
            "seeds": row.get("n_seeds"),
        }
        for backbone in backbones_of(rows)
        for row in cosines
        if row["backbone"] == backbone and row["method"] != "gumbel_ste" and (row["keep"] == main or not row["moment"])
    ]
    accuracy = []
    for backbone in backbones_of(rows):
        for name in ("diffprune", DIVERSE, "gumbel_ste", "random", "box", "full"):
            line = {
                f"{100 * row['keep']:g} %": f"{row['top1']:.1f} ± {row['top1_std']:.1f}"
                for row in sorted(rows, key=lambda row: row["keep"])
                if row["backbone"] == backbone and row["method"] == name and "top1" in row
            }
            if line:
                accuracy.append({"backbone": label(backbone), "top-1": label(name), **line})
    return f"{markdown_table(table)}\n{markdown_table(accuracy)}"


def about_relevance(rows: Sequence[Row]) -> str:
    """DiffPrune by both choices, the centre square, the nearest other method, and the supervised upper bound."""
    table = []
    for backbone in backbones_of(rows):
        for keep in BUDGETS:
            chosen = {row["method"]: row for row in rows if row["backbone"] == backbone and row["keep"] == keep}
            others = [row for name, row in chosen.items() if name not in (*LEARNED, DIVERSE, SUPERVISED)]
            nearest = min(others, key=lambda row: row["lead"], default={"method": "centre"})["method"]
            table += [
                chosen[name]
                for name in dict.fromkeys(("diffprune", DIVERSE, "centre", nearest, SUPERVISED))
                if name in chosen
            ]
    columns = ["backbone", "method", "keep", "cut", "inside", "chance", "lift", "ci95", "lead", "lead_ci95", "n_seeds"]
    return markdown_table(table, [*columns, *relevance.MOMENTS])


def about_scaling(rows: Sequence[Row]) -> str:
    """Retention by model and rate: of every scorer, of random choice, of the best method without training."""
    table: dict[tuple[str, float], dict[str, str]] = {}
    best: dict[tuple[str, float], float] = {}
    for row in rows:
        if "retention" not in row or row["method"] == "full":
            continue
        place, name, kept = (row["backbone"], row["pruned"]), row["method"], f"{row['retention']:.1f}"
        line = table.setdefault(place, {"model": row["backbone"], "pruned %": f"{row['pruned']:g}"})
        if scaling.is_learned(name):
            change = label(name) if name in (scaling.LEARNED, scaling.DIVERSE) else name.removeprefix(scaling.LEARNED)
            line[change.strip("[]")] = kept + _spread(row)
        elif name in ("random", "oracle"):
            line[name] = kept
        elif row["retention"] > best.get(place, 0.0):
            best[place] = row["retention"]
            line["best without training"] = f"{kept} ({_marked(row)})"
        line["paper, Qwen2.5-VL-7B"] = PAPER_QWEN.get(row["pruned"], "")
    ordered = [table[place] for place in sorted(table, key=lambda place: (scaling.BACKBONES.index(place[0]), place[1]))]
    return f"{markdown_table(ordered)}\n{INSIDE}\n"


def _spread(row: Row) -> str:
    """The interval over seeds and questions of what several seeds gave; else, of older files, the seeds' deviation."""
    if row["n_seeds"] == 1:
        return ""
    if "seeds" not in row.get("ci_over", ""):
        return f" ± {row['retention_std']:.1f}"
    low, high = row["ci95"]
    return f" ({low:.1f} to {high:.1f})"


def _marked(row: Row) -> str:
    """The method's name, with a mark where its layers do not all see K tokens."""
    return f"{label(row['method'])}{'*' if 'average' in row else ''}"


def about_temperature(rows: Sequence[Row]) -> str:
    """The slope of the loss and its agreement with the hard loss, by temperature."""
    slopes: dict[tuple[str, ...], dict[str, str]] = {}
    trusted: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        key = {"model": row["run"], "throttler": row["throttler"], "kept %": f"{100 * row['keep']:g}"}
        half = (row["ci95"][1] - row["ci95"][0]) / 2
        slopes.setdefault(tuple(key.values()), dict(key))[f"{row['tau']:g}"] = f"{row['slope']:.3f} ± {half:.3f}"
        trusted.setdefault(tuple(key.values()), dict(key))[f"{row['tau']:g}"] = f"{row['agreement']:.2f}"
    return (
        "Loss with things at the bottom minus loss with things on top, by temperature:\n\n"
        f"{markdown_table(list(slopes.values()))}\nCorrelation of throttled and hard loss over random rankings:\n\n"
        f"{markdown_table(list(trusted.values()))}"
    )


def about_scenes_next(rows: Sequence[Row]) -> str:
    """Retention by method and budget."""
    table: dict[str, dict[str, str]] = {}
    for row in rows:
        if "retention" in row and row["method"] != "full":
            line = table.setdefault(row["method"], {"method": _marked(row)})
            line[f"K = {row['keep']}"] = f"{row['retention']:.1f}{_spread(row)}"
    return f"{markdown_table(list(table.values()))}\n{INSIDE}\n"


def about_faithfulness(rows: Sequence[Row]) -> str:
    """A line for each budget: how far two orders of the methods agree, by retention and by distance of first tokens."""
    said = []
    for keep in dict.fromkeys(row["keep"] for row in rows if "retention" in row and row["method"] not in NO_RIVALS):
        some = [
            row
            for row in rows
            if "retention" in row
            and "first_token_kl" in row
            and row["keep"] == keep
            and row["method"] not in NO_RIVALS
            and not row["method"].endswith(THROTTLED)
            and row.get("tasks", "all") == "all"
        ]
        orders = [-row["retention"] for row in some], [row["first_token_kl"] for row in some]
        if len(some) < 3 or any(len(set(order)) == 1 for order in orders):
            continue  # nothing that could be put in order
        first = [some[order.index(min(order))]["method"] for order in orders]
        agree = rank_correlation(*orders)
        said.append(
            f"- {keep} tokens, {len(some)} methods: the order by retention and that by `first_token_kl` have a rank "
            f"correlation of {agree:.2f}; first by retention is {first[0]}, by `first_token_kl` {first[1]}.\n"
        )
    return "".join(said) or "No row of this file has a `first_token_kl` yet: it was made before that was measured.\n"


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's; equal values share the mean of their ranks."""

    def ranks(values: Sequence[float]) -> list[float]:
        return [sum(other < one for other in values) + sum(other == one for other in values) / 2 for one in values]

    return statistics.correlation(ranks(first), ranks(second))


FINDINGS: dict[str, Callable[[Sequence[Row]], str]] = {
    BACKBONES_FILE: columns_of("backbone", "parameters", "num_visual", "epochs", "seconds", "top1", "top5"),
    "coherence": about_coherence,
    "landscape": columns_of("backbone", "method", "tau", "variation", "variation_std", "ratio", "ci95", "n_seeds"),
    "bias": columns_of(
        *("estimator", "tau", "relative_bias", "relative_bias_std", "cosine", "errors_away_min", "errors_away_max"),
        "finite_difference_error",
    ),
    "alignment": columns_of(
        *("backbone", "keep", "throttled_top1", "hard_top1", "gap_top1", "gap_top1_ci95"),
        *("throttled_top5", "hard_top5", "gap_top5", "weight", "n_seeds"),
    ),
    "relevance": about_relevance,
    "qualitative": markdown_table,
    "scaling": about_scaling,
    "temperature": about_temperature,
    "scenes_next": about_scenes_next,
    "scenes_main": about_faithfulness,
}
