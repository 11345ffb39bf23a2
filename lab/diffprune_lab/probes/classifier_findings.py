"""What the probes on image classifiers found, in sentences and tables made from their rows."""

from collections.abc import Sequence

from diffprune.results import markdown_table
from diffprune_lab.probes import coherence, relevance
from diffprune_lab.probes.bench import LEARNED, PLAIN, SUPERVISED
from diffprune_lab.probes.figures import ORDER, backbones_of, label
from diffprune_lab.probes.store import Row

BUDGETS = (0.0556, 0.1111)  # of the relevance target


def about_backbones(rows: Sequence[Row]) -> str:
    columns = ["backbone", "parameters", "num_visual", "epochs", "seconds", "top1", "top5"]
    return markdown_table(rows, columns)


def about_coherence(rows: Sequence[Row]) -> str:
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


def _starts(cosines: Sequence[Row]) -> str:
    """Ratios at the start by backbone and budget, of DiffPrune as the paper has it, and whether they agree with its."""
    starts = [row for row in cosines if row["method"] == PLAIN and row["moment"] == 0]
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
    return (
        "Ratio of cosines at the start without the bridge, as in the paper (the paper's: 4.4 to 28.4, growing with "
        f'size; "at least" where Gumbel-STE\'s may be 0, which then counts at its most). {said}. '
        f"{_verdict(starts, keeps)}"
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


def about_landscape(rows: Sequence[Row]) -> str:
    start = max(row["tau"] for row in rows)
    starts = [row for row in rows if row["tau"] == start and "ratio" in row]
    ratios = {row["backbone"]: row["ratio"] for row in starts if row["method"] == PLAIN}
    said = ", ".join(f"{label(name)} {ratios[name]:.1f}" for name in backbones_of(rows) if name in ratios)
    is_rougher = bool(ratios) and all(ratio > 1 for ratio in ratios.values())
    verdict = "The direction agrees with the paper" if is_rougher else "The direction does not agree with the paper"
    columns = ["backbone", "method", "tau", "variation", "variation_std", "ratio", "ci95", "n_seeds"]
    return (
        f"Gumbel-STE's loss varies so many times as much per step at the starting temperature, DiffPrune without the "
        f"bridge: {said}. {verdict}; "
        f"its factor is about 24.\n\n{markdown_table(rows, columns)}"
    )


def about_bias(rows: Sequence[Row]) -> str:
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


def about_alignment(rows: Sequence[Row]) -> str:
    widest = max(rows, key=lambda row: abs(row["gap_top1"]))
    columns = ["backbone", "keep", "throttled_top1", "hard_top1", "gap_top1", "gap_top1_ci95", "throttled_top5"]
    columns += ["hard_top5", "gap_top5", "weight", "n_seeds"]
    is_small = abs(widest["gap_top1"]) <= 3
    verdict = "The gaps are small, as in the paper." if is_small else "Not every gap is small, as the paper's are."
    return (
        f"The widest top-1 gap is {widest['gap_top1']:+.1f} points ({label(widest['backbone'])}, "
        f"{100 * widest['keep']:g} % kept). {verdict}\n\n{markdown_table(rows, columns)}"
    )


def about_relevance(rows: Sequence[Row]) -> str:
    sentences, table = [], []
    for backbone in backbones_of(rows):
        for keep in BUDGETS:
            chosen = [row for row in rows if row["backbone"] == backbone and row["keep"] == keep]
            ours = next((row for row in chosen if row["method"] == "diffprune"), None)
            others = [row for row in chosen if row["method"] not in (*LEARNED, SUPERVISED)]
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
            table += [row for row in chosen if row["method"] == SUPERVISED]
    columns = ["backbone", "method", "keep", "cut", "inside", "chance", "lift", "ci95", "lead", "lead_ci95", "n_seeds"]
    columns += [name for name in relevance.MOMENTS if any(name in row for row in table)]
    return (
        "\n".join(sentences)
        + "\n\nDiffPrune, the centre square, the nearest of the others, and the supervised upper bound:"
        + "\n\n"
        + markdown_table(table, columns)
    )
