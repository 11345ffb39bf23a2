"""Writes what was found into docs/evidence.md: the block of each probe is made from its results file.

python -m diffprune_lab.probes.evidence

Text around the blocks is written by hand. A block without a results file says that the probe was not run.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from diffprune.results import markdown_table, read_results, write_text
from diffprune_lab.probes import coherence, relevance, scaling
from diffprune_lab.probes.bench import LEARNED, PLAIN, TAUGHT
from diffprune_lab.probes.figures import ORDER, backbones_of, label
from diffprune_lab.probes.run import BACKBONES_FILE
from diffprune_lab.probes.store import Row

_BLOCK = re.compile(r"(<!-- probe: (?P<name>[\w-]+) -->\n).*?(<!-- end of probe -->)", re.DOTALL)
BUDGETS = (0.0556, 0.1111)  # of the relevance target
WITHOUT_FIGURE = (BACKBONES_FILE, "scenes_next")


def refresh(text: str, results: Path) -> str:
    """`text` with every block made anew."""

    def replace(match: re.Match[str]) -> str:
        return f"{match[1]}{block(match['name'], results)}{match[3]}"

    return _BLOCK.sub(replace, text)


def block(name: str, results: Path) -> str:
    """What a probe found, with its figure, its table and where it comes from."""
    path = results / f"{name}.json"
    if name not in FINDINGS:
        raise ValueError(f"a block names the probe {name!r}; there are {', '.join(FINDINGS)}")
    if not path.exists():
        return f"Not yet run: there is no `results/{name}.json`.\n"
    found = read_results(path)
    picture = "" if name in WITHOUT_FIGURE else f"![{name}](img/{name}.png)\n\n"
    seeds = f", seeds {', '.join(map(str, found.seeds))}" if found.seeds else ""
    origin = f"`{found.command}` on {found.device}, {found.date[:10]}{seeds}."
    origin += seed_counts(found.rows)
    return f"{picture}{FINDINGS[name](found.rows)}\n{origin}\n\n{_capital(found.notes)}.\n"


def seed_counts(rows: Sequence[Row]) -> str:
    """How many seeds each backbone's numbers have, in a sentence; nothing where rows do not say."""
    counts: dict[str, list[int]] = {}
    for row in rows:
        if "n_seeds" in row and row.get("backbone") in ORDER:
            counts.setdefault(row["backbone"], []).append(row["n_seeds"])
    said = [
        f"{label(name)} {min(counts[name])}"
        + (f" to {max(counts[name])}" if max(counts[name]) > min(counts[name]) else "")
        for name in ORDER
        if name in counts
    ]
    return f" Seeds behind a number: {', '.join(said)}." if said else ""


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _backbones(rows: Sequence[Row]) -> str:
    columns = ["backbone", "parameters", "num_visual", "epochs", "seconds", "top1", "top5"]
    return markdown_table(rows, columns)


def _coherence(rows: Sequence[Row]) -> str:
    cosines = [row for row in rows if "moment" in row]
    main = coherence.main_keep(cosines)
    theirs = {coherence.place_of(row): row["cosine"] for row in cosines if row["method"] == "gumbel_ste"}
    table = [
        {
            "backbone": label(row["backbone"]),
            "training": f"{row['moment']:.0%}{', no bridge' if row['method'] == PLAIN else ''}",
            "DiffPrune": row["cosine"],
            "Gumbel-STE": theirs.get(coherence.place_of(row)),
            "ratio": row.get("ratio"),
            "ratio at least": row.get("ratio_at_least"),
            "seeds": row.get("n_seeds"),
        }
        for backbone in backbones_of(rows)
        for row in cosines
        if row["backbone"] == backbone and row["keep"] == main and row["method"] != "gumbel_ste"
    ]
    return f"{_starts(cosines)}\n\nAlong training, {100 * main:g} % kept:\n\n{markdown_table(table)}\n{_accuracy(rows)}"


def _papers_own(rows: Sequence[Row]) -> str:
    """The name of DiffPrune as the paper has it, without the bridge, where that was measured."""
    return PLAIN if any(row["method"] == PLAIN for row in rows) else "diffprune"


def _starts(cosines: Sequence[Row]) -> str:
    """Ratios at the start by backbone and budget, of DiffPrune as the paper has it, and whether they agree with its."""
    ours = _papers_own(cosines)
    starts = [row for row in cosines if row["method"] == ours and row["moment"] == 0]
    keeps = sorted({row["keep"] for row in starts})
    said = "; ".join(
        f"{100 * keep:g} % kept: "
        + ", ".join(
            f"{label(row['backbone'])} {_ratio(row)}"
            for name in backbones_of(starts)
            for row in starts
            if (row["backbone"], row["keep"]) == (name, keep)
        )
        for keep in keeps
    )
    recipe = " without the bridge, as in the paper" if ours == PLAIN else ""
    return (
        f'Ratio of cosines at the start{recipe} (the paper\'s: 4.4 to 28.4, growing with size; "at least" where '
        f"Gumbel-STE's may be 0, which then counts at its most). {said}. {_verdict(starts, keeps)}"
    )


def _verdict(starts: Sequence[Row], keeps: Sequence[float]) -> str:
    """Whether a budget has the paper's range and growth, over all sizes."""
    agreeing, is_known = [], False
    for keep in keeps:
        by_size = [row.get("ratio") for name in ORDER for row in starts if coherence.place_of(row)[:2] == (name, keep)]
        ratios = [ratio for ratio in by_size if ratio is not None]
        if len(ratios) == len(ORDER):
            is_known = True
            if ratios == sorted(ratios) and ratios[0] >= 4.4 and ratios[-1] <= 28.4:
                agreeing.append(f"{100 * keep:g} %")
    if agreeing:
        return f"With {' and '.join(agreeing)} kept this agrees with the paper's."
    if is_known:
        return "This does not agree with the paper's."
    return "No budget has a ratio for every size, so whether it grows as the paper's does is not known."


def _ratio(row: Row) -> str:
    if "ratio" in row:
        return f"{row['ratio']:.1f}"
    return f"at least {row['ratio_at_least']:.1f}" if "ratio_at_least" in row else "none"


def _accuracy(rows: Sequence[Row]) -> str:
    """Top-1 by budget of both methods and of random choice."""
    table = []
    for backbone in backbones_of(rows):
        for name in (*LEARNED, "random", "box", "full"):
            line = {
                f"{100 * row['keep']:g} %": f"{row['top1']:.1f} ± {row['top1_std']:.1f}"
                for row in sorted(rows, key=lambda row: row["keep"])
                if row["backbone"] == backbone and row["method"] == name and "top1" in row
            }
            if line:
                table.append({"backbone": label(backbone), "top-1": label(name), **line})
    return markdown_table(table) if table else ""


def _landscape(rows: Sequence[Row]) -> str:
    start = max(row["tau"] for row in rows)
    starts = [row for row in rows if row["tau"] == start and "ratio" in row]
    ours = _papers_own(starts)
    ratios = {row["backbone"]: row["ratio"] for row in starts if row["method"] == ours}
    said = ", ".join(f"{label(name)} {ratios[name]:.1f}" for name in backbones_of(rows) if name in ratios)
    is_rougher = bool(ratios) and all(ratio > 1 for ratio in ratios.values())
    verdict = "The direction agrees with the paper" if is_rougher else "The direction does not agree with the paper"
    columns = ["backbone", "method", "tau", "variation", "variation_std", "ratio", "ci95", "n_seeds"]
    return (
        f"Gumbel-STE's loss varies so many times as much per step at the starting temperature"
        f"{', DiffPrune without the bridge' if ours == PLAIN else ''}: {said}. {verdict}; "
        f"its factor is about 24.\n\n{markdown_table(rows, columns)}"
    )


def _bias(rows: Sequence[Row]) -> str:
    surrogate = [row for row in rows if row["estimator"] == "straight_through"]
    control = next(row for row in rows if row["estimator"] == "score_function")
    own = max(row["finite_difference_error"] for row in rows if row["estimator"] == "diffprune")
    biases = [100 * row["relative_bias"] for row in surrogate]
    cosines = [row["cosine"] for row in surrogate]
    least = min(row["errors_away_min"] for row in surrogate)
    columns = ["estimator", "tau", "relative_bias", "relative_bias_std", "cosine", "errors_away_min"]
    columns += ["errors_away_max", "finite_difference_error"]
    is_biased = least > 5 and control["errors_away_max"] < 5
    verdict = "This agrees with the paper's Eq. 2." if is_biased else "This does not settle the paper's Eq. 2."
    return (
        f"The mean straight-through gradient differs from the exact one by {min(biases):.0f} to {max(biases):.0f} % of "
        f"its length (mean over problems), in every problem by at least {least:.0f} standard errors in one component. "
        f"It is not a matter of scale alone: the mean cosine with the exact one is {min(cosines):.2f} to "
        f"{max(cosines):.2f}. The control, which is unbiased, is at most {control['errors_away_max']:.1f} standard "
        f"errors away. DiffPrune's gradient equals central differences of its executed loss within {own:.0e}; "
        f"Gumbel-STE's executed loss is flat. {verdict}\n\n"
        f"{markdown_table(rows, columns)}"
    )


def _alignment(rows: Sequence[Row]) -> str:
    widest = max(rows, key=lambda row: abs(row["gap_top1"]))
    columns = ["backbone", "keep", "throttled_top1", "hard_top1", "gap_top1", "gap_top1_ci95", "throttled_top5"]
    columns += ["hard_top5", "gap_top5", "weight", "n_seeds"]
    is_small = abs(widest["gap_top1"]) <= 3
    verdict = "The gaps are small, as in the paper." if is_small else "Not every gap is small, as the paper's are."
    return (
        f"The widest top-1 gap is {widest['gap_top1']:+.1f} points ({label(widest['backbone'])}, "
        f"{100 * widest['keep']:g} % kept). {verdict}\n\n{markdown_table(rows, columns)}"
    )


def _relevance(rows: Sequence[Row]) -> str:
    sentences, table = [], []
    for backbone in backbones_of(rows):
        for keep in BUDGETS:
            chosen = [row for row in rows if row["backbone"] == backbone and row["keep"] == keep]
            ours = next((row for row in chosen if row["method"] == "diffprune"), None)
            others = [row for row in chosen if row["method"] not in (*LEARNED, TAUGHT)]
            if ours is None or not others:
                continue
            best = min(others, key=lambda row: row["lead"])
            centre = next(row for row in others if row["method"] == "centre")
            ahead = sum(row["lead_ci95"][0] > 0 for row in others)
            side = "ahead of" if centre["lead"] > 0 else "behind"
            sentences.append(
                f"{label(backbone)} at {100 * keep:g} %: ahead of {ahead} of {len(others)} methods without training "
                f"with its whole interval, and {abs(centre['lead']):.1f} points {side} the centre square."
            )
            table += [ours, centre] if best is centre else [ours, centre, best]
            table += [row for row in chosen if row["method"] == TAUGHT]
    columns = ["backbone", "method", "keep", "cut", "inside", "chance", "lift", "ci95", "lead", "lead_ci95", "n_seeds"]
    columns += [name for name in relevance.MOMENTS if any(name in row for row in table)]
    return (
        "\n".join(sentences)
        + "\n\nDiffPrune, the centre square, the nearest of the others, and a scorer shown the boxes if there is one:"
        + "\n\n"
        + markdown_table(table, columns)
    )


# The paper's average on Qwen2.5-VL-7B, by percent pruned.
PAPER_QWEN: dict[float, Row] = {66.7: {"retention": 98.3}, 77.8: {"retention": 95.9}, 88.9: {"retention": 93.1}}
STEEP = 10.0  # points of retention lost from one rate to the next that would be a collapse and no decline


def _scaling(rows: Sequence[Row]) -> str:
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


def _temperature(rows: Sequence[Row]) -> str:
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


def _scenes_next(rows: Sequence[Row]) -> str:
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


def _qualitative(rows: Sequence[Row]) -> str:
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


FINDINGS: dict[str, Callable[[Sequence[Row]], str]] = {
    BACKBONES_FILE: _backbones,
    "coherence": _coherence,
    "landscape": _landscape,
    "bias": _bias,
    "alignment": _alignment,
    "relevance": _relevance,
    "qualitative": _qualitative,
    "scaling": _scaling,
    "temperature": _temperature,
    "scenes_next": _scenes_next,
}


def main() -> None:
    root = Path(__file__).resolve().parents[3]
    page = root / "docs" / "evidence.md"
    write_text(page, refresh(page.read_text(encoding="utf-8"), root / "results"))
    print("wrote docs/evidence.md")


if __name__ == "__main__":
    main()
