"""Pages of tables from results files: one section per file, one summary table per question, no number typed by hand.

`render_page` makes docs/results.md. `refresh_tables` fills the blocks of another page, which end with the line
`<!-- end of results -->` and open with one of

    <!-- results: NAME -->                       the section of results/NAME.json, as in docs/results.md
    <!-- results: NAME, short -->                one small table of it: retention, or times to the first token
    <!-- results: NAME, short, METHOD ... -->    the small table with these methods alone (both paths of each)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from diffprune.report.printed import printed_block
from diffprune.report.quality import name_rows
from diffprune.report.tables import render_short, render_tables
from diffprune.results import Results, holds_results, read_results

HEAD = """# Results

Made by `diffprune report` from the files in `{folder}`; do not edit by hand. Here is a summary of each; rows by task
and seed are in the files, their keys in diffprune's `docs/api.md`.

Times in ms are medians. A cell `96.8 ± 0.4 (96.4 to 97.1) [213.3]` is a retention: percent of the full model's
score, deviation over seeds, 95 % interval (over seeds and questions together where a method has several seeds,
unless the text below the table says otherwise). Methods inside the language model keep K tokens after their last
cut; in square brackets is the number of visual tokens in a decoder layer, mean over layers (for all other methods
it is K). The best method of a column is bold where the interval of its lead over every other one leaves 0 out, the
second italic where the same holds of it and the rest, and none where Holm's correction does not hold it; `full`,
`oracle` and rows in which nothing is dropped take no part. `recipe, choice` says how a trained row came about: the
recipe of our own scorers and how their scores are used, "own" for other trained methods.
"""
ABOUT = {  # methods, as tables name them, of which a reader must know one more thing
    "p_mod": "K of p_mod is its mean over layers.",
    "fastervlm": "`fastervlm` is also known as `cls_attention`.",
    "holov-paper": "`holov-paper` is HoloV as its paper has it, `holov` as its release works.",
}
WORDS = {"taught": "supervised upper bound"}  # what recorded notes call otherwise
SCREENFUL = 8  # files whose sections are found without a table of contents
ANSWERS = ".answers.json"  # what `diffprune eval` keeps beside its results: every answer, not committed
_BLOCK = re.compile(
    r"(<!-- results: (?P<name>[\w-]+)(?P<short>, short(?:, (?P<methods>[^>]+?))?)? -->\n)"
    r".*?(?P<end><!-- end of results -->)",
    re.DOTALL,
)


def read_folder(folder: str | Path, *, others: list[Path] | None = None) -> dict[str, Results]:
    """Every results file of a folder by its name, in alphabetical order.

    Args:
        others: JSON files that hold something else are added here; by default they are an error.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: give the one that holds the results files with --results")
    files = [path for path in sorted(folder.glob("*.json")) if not path.name.endswith(ANSWERS)]
    if others is not None:
        others += [path for path in files if not holds_results(path)]
        files = [path for path in files if path not in others]
    return {path.stem: read_results(path) for path in files}


def _origin(results: Results, link: str) -> str:
    """Where the numbers come from, under every table."""
    seeds = f", seeds {', '.join(map(str, results.seeds))}" if results.seeds else ""
    file = f"[All {len(results.rows):,} rows]({link}/{results.name}.json): " if link else ""
    return (
        f"{file}`{results.command}` on {results.device}, {results.date[:10]}, commit `{results.commit[:12]}`{seeds}.\n"
    )


def render_section(results: Results, link: str = "", figures: Sequence[str] = ()) -> str:
    """One results file as Markdown: notes, origin, tables, the paper's rows where columns match, figures.

    Args:
        link: Leads from the page to the folder of the file.
        figures: Of the file, as the page links them.
    """
    notes = f"{results.notes.removesuffix('.')}. " if results.notes else ""
    for recorded, word in WORDS.items():
        notes = re.sub(rf"\b{recorded}\b", word, notes)
    tables = [render_tables(results.rows), *printed_block(results.rows, results.notes)]
    pictures = [f"![{results.name}]({figure})\n" for figure in figures]
    return "\n".join([f"{notes}{_origin(results, link)}", *tables, *pictures])


def render_page(
    found: Mapping[str, Results], link: str = "../results", figures: Mapping[str, Sequence[str]] | None = None
) -> str:
    """The whole page `docs/results.md`: a summary of each file, which is linked.

    Methods that a section above has with equal numbers are not shown again where they are nearly all of a file.

    Args:
        figures: By file those to show, as the page links them.
    """
    figures = figures or {}
    head = HEAD.format(folder=Path(link).name or link)
    if not found:
        return head + "\nThere are no results files yet.\n"
    shown = {row.get("method") for results in found.values() for row in name_rows(results.rows)}
    if more := [words for method, words in ABOUT.items() if method in shown]:
        head += "\n".join(more) + "\n"
    head += _contents(found)
    sections: list[str] = []
    for name, results in found.items():
        own = _summary(results)
        above = next((other for other in found if _holds(_summary(found[other]), own)), name)
        if above == name or list(found).index(above) > list(found).index(name):
            sections.append(f"## {name}\n\n{render_section(results, link, figures.get(name, ()))}")
            continue
        more = [method for method, rows in own.items() if _summary(found[above]).get(method) != rows]
        rest = replace(results, rows=[row for row in results.rows if "retention" in row and row["method"] in more])
        note = f"Methods that [{above}](#{above}) has too, with equal numbers, are shown there. "
        text = render_section(rest, link, figures.get(name, ())).replace(
            f"All {len(rest.rows):,} rows", f"All {len(results.rows):,} rows"
        )
        sections.append(f"## {name}\n\n{note}{text}".rstrip("\n") + "\n")
    return "\n".join([head, *sections])


def _contents(found: Mapping[str, Results]) -> str:
    """Links to the sections of a page too long to leaf through, by what is measured."""
    if len(found) <= SCREENFUL:
        return ""
    kinds: dict[str, list[str]] = {"answers": [], "time and memory": [], "everything else": []}
    for name, results in found.items():
        keys = {key for row in results.rows for key in row}
        timed = any(key.endswith(("_ms", "_s", "_gb")) for key in keys)
        kind = "answers" if "retention" in keys else "time and memory" if timed else "everything else"
        kinds[kind].append(f"[{name}](#{name})")
    return "\n" + "".join(f"- {kind}: {', '.join(links)}\n" for kind, links in kinds.items() if links)


def _summary(results: Results) -> dict[str, list[tuple[Any, ...]]]:
    """Of every method the budgets and retentions of its summary rows."""
    found: dict[str, list[tuple[Any, ...]]] = {}
    for row in results.rows:
        if "retention" in row:
            key = (row.get("backbone"), row.get("tasks"), row["keep"], row["retention"])
            found.setdefault(row["method"], []).append(key)
    return found


def _holds(larger: Mapping[str, object], smaller: Mapping[str, object]) -> bool:
    """Whether nine of ten methods of the smaller one are in the larger one too, with equal rows."""
    equal = sum(larger.get(method) == rows for method, rows in smaller.items())
    return len(smaller) > 0 and equal >= 0.9 * len(smaller)


def refresh_tables(text: str, found: Mapping[str, Results]) -> str:
    """`text` with every block between its two marker lines made anew from the results file it names."""

    def replace_block(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in found:
            raise ValueError(
                f"a table block names the results file {name!r}, which is not there: run its command first"
            )
        methods = (match["methods"] or "").split()
        table = render_short(found[name], methods) if match["short"] else render_section(found[name])
        return f"{match[1]}\n{table}\n{match['end']}"

    return _BLOCK.sub(replace_block, text)
