"""Intervals of probes' results files anew, from what their own rows hold of every seed: with Student's t.

Files up to 2026-11-19 took 1.96 deviations of the mean however few the seeds were: of three that holds the mean in 81
of 100 cases, of five in 88. What was measured stays as it is; intervals, ratios and the words about both change, and
the figures are drawn again.

    python runs/intervals_again.py results docs/img
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

from diffprune.results import Results, read_results, write_results
from diffprune_lab.probes import alignment, bias, coherence, landscape, relevance, temperature
from diffprune_lab.probes.scorers import PROBES
from diffprune_lab.probes.store import SEEDS, rounded, student
from diffprune_lab.studies import leak

DRAWN = {module.NAME: module.draw for module in (alignment, bias, coherence, landscape, relevance, temperature)}
PLAIN = {module.NAME: (module.KEY, module.summarise) for module in (alignment, bias, coherence, landscape, relevance)}
OF_SCORERS = {f"scarce_{name}": (key, summarise) for name, (_, key, summarise, _) in PROBES.items()}
BY_SEED = {**PLAIN, **OF_SCORERS, "scarce_leak": (leak.KEY, leak.summarise)}
BATCHES = 8  # of four captions, over which `temperature` has its slopes, and no row holds them
WORDS = {
    "only where the latter exceeds two standard errors;": "only where the intervals of both lie above 0, and at least "
    "the lower end of the former over the upper end of the latter;",
    "with 1.96 standard errors;": "with its 95 % interval;",
    "temperature, mean over seeds;": "temperature, geometric mean over seeds;",
}


def summed_up(found: Results) -> list[dict[str, Any]]:
    """The rows with what follows from all of their seeds."""
    key, summarise = BY_SEED[found.name]
    others = [{name: value for name, value in row.items() if name == "digest"} for row in found.rows]
    rows = summarise([{name: row[name] for name in (*key, SEEDS) if name in row} for row in found.rows])
    assert len(rows) == len(found.rows)
    return [{**row, **other, SEEDS: row.pop(SEEDS)} for row, other in zip(rows, others, strict=True)]


def widened(found: Results) -> list[dict[str, Any]]:
    """The rows of slopes, whose intervals are as wide as Student's t makes them."""
    rows = []
    for row in found.rows:
        half = student(BATCHES - 1) / 1.96 * (row["ci95"][1] - row["ci95"][0]) / 2
        rows.append({**row, "ci95": rounded([row["slope"] - half, row["slope"] + half])})
    return rows


def main(folder: Path, figures: Path) -> None:
    for name in (*BY_SEED, "temperature"):
        path = folder / f"{name}.json"
        found = read_results(path)
        notes = found.notes
        for old, new in WORDS.items():
            notes = notes.replace(old, new)
        if name == "temperature" and notes == found.notes:
            continue  # done before: twice would be too wide
        rows = widened(found) if name == "temperature" else summed_up(found)
        write_results(path, **{**dataclasses.asdict(found), "rows": rows, "notes": notes})
        if name in DRAWN:
            DRAWN[name](rows, figures / f"{name}.png")
        print(path)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
