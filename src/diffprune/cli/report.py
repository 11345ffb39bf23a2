"""`diffprune report`: tables and figures from a folder of results files, such as docs/results.md."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from diffprune.atomic import write_text

DEFAULTS = {"md": "docs/results.md", "csv": "tables", "latex": "results.tex"}


def command(
    results: Annotated[Path, typer.Option(help="Folder with results files, of the project or your own.")] = Path(
        "results"
    ),
    out: Annotated[
        Path | None,
        typer.Option(
            help="The page to write, or for csv the folder; default: docs/results.md, tables/ or results.tex."
        ),
    ] = None,
    kind: Annotated[
        str,
        typer.Option(
            "--format", help="md: one page; csv: a file of rows for each results file; latex: one file of tables."
        ),
    ] = "md",
    figures: Annotated[
        Path | None,
        typer.Option(help="Folder for figures, PNG and SVG: retention by budget, and against measured time."),
    ] = None,
    readme: Annotated[Path | None, typer.Option(help="A file whose table blocks are refreshed too.")] = None,
) -> None:
    """Make tables and figures from results files; no number is typed by hand.

    A README's tables stand between the lines `<!-- results: NAME -->` and `<!-- end of results -->`;
    `<!-- results: NAME, short -->` gives one small table: retention, or times to the first token;
    `<!-- results: NAME, short, full diffprune -->` shows these methods alone. Where benchmarks and budgets of your own
    results are those of the paper's tables, its printed rows stand beside yours.

    \b
    Examples:
      diffprune report --results results --out docs/results.md --readme README.md
      diffprune report --results my-results --out report.md --figures report
      diffprune report --results my-results --format latex --out tables.tex
    """
    from diffprune.report import read_folder, refresh_tables, render_page
    from diffprune.report.figures import draw_figures
    from diffprune.report.formats import FORMATS, to_csv, to_latex

    if kind not in FORMATS:
        raise ValueError(f"--format {kind!r} is none of {', '.join(FORMATS)}")
    others: list[Path] = []
    found = read_folder(results, others=others)
    for path in others:
        print(f"passed over {path}: no results file", file=sys.stderr)
    if not found:
        raise ValueError(f"{results} holds no results file; give one that `diffprune eval` or `profile` wrote into")
    target = out or Path(DEFAULTS[kind])
    base = target if kind == "csv" else target.parent
    drawn = draw_figures(found, figures) if figures is not None else {}
    linked = {name: [os.path.relpath(path, base) for path in paths] for name, paths in drawn.items()}
    if kind == "csv":
        pages = {target / f"{name}.csv": to_csv(one) for name, one in found.items() if one.rows}
    else:
        page = render_page(found, os.path.relpath(results, base), linked)
        pages = {target: to_latex(page) if kind == "latex" else page}
    if readme is not None:
        pages[readme] = refresh_tables(readme.read_text(encoding="utf-8"), found)
    for path, text in pages.items():
        write_text(path, text)
        print(f"wrote {path} from {len(found) if kind != 'csv' else 1} results files")
    for path in [path for paths in drawn.values() for path in paths]:
        print(f"drew {path}, and an SVG beside it")
