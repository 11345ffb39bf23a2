"""What the probes on vision-language models found, in sentences and tables made from their rows."""

from collections.abc import Sequence

from diffprune.results import markdown_table
from diffprune_lab.probes import scaling
from diffprune_lab.probes.figures import label
from diffprune_lab.probes.store import Row

# The paper's average on Qwen2.5-VL-7B, by percent pruned.
PAPER_QWEN: dict[float, Row] = {66.7: {"retention": 98.3}, 77.8: {"retention": 95.9}, 88.9: {"retention": 93.1}}
STEEP = 10.0  # points of retention lost from one rate to the next that would be a collapse and no decline


def about_scaling(rows: Sequence[Row]) -> str:
    summed = [row for row in rows if "retention" in row and row["method"] != "full"]
    sizes = list(dict.fromkeys(row["backbone"] for row in rows))
    table = []
    drops: dict[str, list[tuple[float, str, float]]] = {}
    for size in sizes:
        before: dict[str, float] = {}
        for rate in sorted({row["pruned"] for row in summed}):
            here = {row["method"]: row for row in summed if (row["backbone"], row["pruned"]) == (size, rate)}
            learned = {_change(name): here.pop(name) for name in list(here) if scaling.is_learned(name)}
            plain = [row for name, row in here.items() if name not in ("random", "oracle")]
            best = max(plain, key=lambda row: row["retention"], default=None)
            table.append(
                {
                    "model": size,
                    "pruned %": f"{rate:g}",
                    **{name: _kept_by_seeds(row) for name, row in learned.items()},
                    "random": _kept(here.get("random")),
                    "best without training": best and f"{_kept(best)} ({_marked(best)})",
                    "oracle": _kept(here.get("oracle")),
                    "paper, Qwen2.5-VL-7B": _kept(PAPER_QWEN.get(rate)),
                }
            )
            for name, row in learned.items():
                drops.setdefault(name, []).append((before.get(name, 100.0) - row["retention"], size, rate))
                before[name] = row["retention"]
    said = "\n".join(_steepest(name, drops[name]) for name in drops) or "No scorer was measured."
    return f"{said}\n\n{markdown_table(table)}\n{_INSIDE}\n\n{_scores(rows, sizes)}"


def _change(method: str) -> str:
    """DiffPrune, or what was changed of it."""
    return method.removeprefix(scaling.LEARNED).strip("[]") or label(scaling.LEARNED)


_INSIDE = r"\* drops inside the language model: its first layers see more than K tokens (`average` in the file)."


def _marked(row: Row) -> str:
    """The method's name, with a mark where its layers do not all see K tokens."""
    return f"{label(row['method'])}{'*' if 'average' in row else ''}"


def _kept(row: Row | None) -> str | None:
    return None if row is None else f"{row['retention']:.1f}"


def _kept_by_seeds(row: Row | None) -> str | None:
    return None if row is None else f"{row['retention']:.1f} ± {row['retention_std']:.1f}"


def _steepest(name: str, drops: Sequence[tuple[float, str, float]]) -> str:
    drop, size, rate = max(drops)
    verdict = (
        "As in the paper, all sizes decline without a collapse."
        if drop <= STEEP
        else f"That is more than {STEEP:g}, so a collapse, which the paper's sizes do not have."
    )
    where = f"{drop:.1f} points ({size} at {rate:g} %)"
    return f"{name}: the largest loss from one rate to the next is {where}. {verdict}"


def _scores(rows: Sequence[Row], sizes: Sequence[str]) -> str:
    """Scores of the full model and of DiffPrune by size, rate and task."""
    table = []
    for size in sizes:
        scores: dict[float, dict[str, list[float]]] = {}
        for row in rows:
            if row["backbone"] == size and row["method"] in ("full", "diffprune") and "task" in row:
                scores.setdefault(row["pruned"], {}).setdefault(row["task"], []).append(row["score"])
        for rate, tasks in sorted(scores.items()):
            means = {task: f"{sum(values) / len(values):.1f}" for task, values in tasks.items()}
            table.append({"model": size, "pruned %": f"{rate:g}", **means})
    return f"Scores (0 to 100) of the full model and of DiffPrune:\n\n{markdown_table(table)}"


def about_temperature(rows: Sequence[Row]) -> str:
    said, table, trusted = [], [], []
    for run in dict.fromkeys(row["run"] for row in rows):
        here = [row for row in rows if row["run"] == run]
        wrong: dict[float, list[str]] = {}
        for row in here:
            if row["throttler"] == "trained" and row["ci95"][1] < 0:
                wrong.setdefault(row["keep"], []).append(f"{row['tau']:g}")
        where = ", and ".join(
            f"with {100 * keep:g} % kept at a temperature of {', '.join(wrong[keep])}" for keep in wrong
        )
        said.append(
            f"{run}: with its throttler the loss asks for the wrong ranking {where}."
            if wrong
            else f"{run}: nowhere does it clearly ask for the wrong one."
        )
        for throttler in dict.fromkeys(row["throttler"] for row in here):
            for keep in dict.fromkeys(row["keep"] for row in here):
                line = {"model": run, "throttler": throttler, "kept %": f"{100 * keep:g}"}
                other = dict(line)
                for row in here:
                    if (row["throttler"], row["keep"]) == (throttler, keep):
                        half = (row["ci95"][1] - row["ci95"][0]) / 2
                        line[f"{row['tau']:g}"] = f"{row['slope']:.3f} ± {half:.3f}"
                        other[f"{row['tau']:g}"] = f"{row['agreement']:.2f}"
                table.append(line)
                trusted.append(other)
    return (
        f"{' '.join(said)}\n\nLoss with things at the bottom minus loss with things on top, by temperature:\n\n"
        f"{markdown_table(table)}\nCorrelation of throttled and hard loss over random rankings:\n\n"
        f"{markdown_table(trusted)}"
    )


PAPER_NEXT = (320, 96.1, 95.7)  # budget, the paper's retention on LLaVA-NeXT-7B, and that of its best other method
BOUNDS = ("full", "oracle")  # what no pruner is compared with


def about_scenes_next(rows: Sequence[Row]) -> str:
    summed = [row for row in rows if "retention" in row and row["method"] not in BOUNDS]
    keep, paper, others = PAPER_NEXT
    here = {row["method"]: row for row in summed if row["keep"] == keep}
    ours = here.pop("diffprune", None)
    said = f"No scorer was measured at K = {keep}."
    if ours is not None:
        lead = f"The paper has {paper} %, {paper - others:.1f} points ahead of its next method."
        compared = [row for row in here.values() if "lead" in row]
        if compared:
            nearest = min(compared, key=lambda row: row["lead"])
            low, high = nearest["lead_ci95"]
            verdict = (
                "ahead of all others, as in the paper" if low > 0 else "not ahead of all others, as the paper's is"
            )
            side = "ahead of" if nearest["lead"] > 0 else "behind"
            lead += (
                f" Here it is {verdict}: {abs(nearest['lead']):.1f} points {side} the best, {_marked(nearest)} "
                f"(its lead lies between {low:.1f} and {high:.1f})."
            )
        said = (
            f"At K = {keep} of 2,880 tokens DiffPrune keeps {ours['retention']:.1f} ± {ours['retention_std']:.1f} % "
            f"({ours['n_seeds']} seeds). {lead}"
        )
    table: dict[str, dict[str, str]] = {}
    for row in rows:
        if "retention" in row and row["method"] != "full":
            line = table.setdefault(row["method"], {"method": _marked(row)})
            spread = f" ± {row['retention_std']:.1f}" if row["n_seeds"] > 1 else ""
            line[f"K = {row['keep']}"] = f"{row['retention']:.1f}{spread}"
    return f"{said}\n\n{markdown_table(list(table.values()))}\n{_INSIDE}\n"


def about_qualitative(rows: Sequence[Row]) -> str:
    learned = rows[0]
    said = (
        f"Over {learned['pictures']} pictures the tokens at the top are alike by {learned['top_similarity']:.2f}, "
        f"those at the bottom by {learned['bottom_similarity']:.2f}; the top is the less alike one in "
        f"{learned['lower_top']:.0f} % of the pictures."
    )
    agrees = "This agrees with the paper." if learned["ci95"][0] > 0 else "This does not agree with the paper."
    shares = all(row["ci95"][0] > 0 for row in rows[1:])
    others = " It is no mark of a learned ranking: those without training show it too." if shares else ""
    return f"{said} {agrees}{others}\n\n{markdown_table(rows)}"
