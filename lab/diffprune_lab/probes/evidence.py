"""Writes what was found into docs/evidence.md: the block of each probe is made from its results file.

python -m diffprune_lab.probes.evidence

Text around the blocks is written by hand. A block without rows says by which command there will be some.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from diffprune.atomic import write_text
from diffprune_lab.probes import comparison, tables
from diffprune_lab.probes.figures import ORDER, label
from diffprune_lab.probes.findings import FINDINGS
from diffprune_lab.probes.measured import results_of
from diffprune_lab.probes.run import BACKBONES_FILE
from diffprune_lab.probes.store import Row

_BLOCK = re.compile(r"(<!-- probe: (?P<name>[\w-]+) -->\n).*?(<!-- end of probe -->)", re.DOTALL)
PAGES = {**comparison.PAGES, **tables.PAGES}
MADE_BY = {
    **tables.MADE_BY,
    BACKBONES_FILE: "diffprune probe all",
    "scenes_main": comparison.command_of("scenes", "main"),
}
WITHOUT_FIGURE = (BACKBONES_FILE, "scenes_next", "scenes_main")


def refresh(text: str, results: Path) -> str:
    """`text` with every block made anew."""

    def replace(match: re.Match[str]) -> str:
        return f"{match[1]}{block(match['name'], results)}{match[3]}"

    return _BLOCK.sub(replace, text)


def block(name: str, results: Path) -> str:
    """What a probe found, with its figure, its table and where it comes from."""
    if name in PAGES:
        return PAGES[name](results)
    if name not in FINDINGS:
        raise ValueError(f"a block names the probe {name!r}; there are {', '.join([*FINDINGS, *PAGES])}")
    found = results_of(results, name)
    if found is None:
        return f"Not measured yet; `{MADE_BY.get(name, f'diffprune probe {name}')}` makes `results/{name}.json`.\n"
    picture = "" if name in WITHOUT_FIGURE else f"![{name}](img/{name}.png)\n\n"
    seeds = f", seeds {', '.join(map(str, found.seeds))}" if found.seeds else ""
    origin = f"`{found.command}` on {found.device}, {found.date[:10]}{seeds}."
    origin += seed_counts(found.rows)
    notes = found.notes[:1].upper() + found.notes[1:]
    return f"{picture}{FINDINGS[name](found.rows)}\n{origin}\n\n{notes}.\n"


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


def main() -> None:
    root = Path(__file__).resolve().parents[3]
    page = root / "docs" / "evidence.md"
    write_text(page, refresh(page.read_text(encoding="utf-8"), root / "results"))
    print("wrote docs/evidence.md")


if __name__ == "__main__":
    main()
