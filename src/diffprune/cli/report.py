"""`diffprune report`: docs/results.md and the README's tables, made from results/*.json."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from diffprune.atomic import write_text


def command(
    results: Annotated[Path, typer.Option(help="Folder with results files.")] = Path("results"),
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("docs/results.md"),
    readme: Annotated[Path | None, typer.Option(help="A file whose table blocks are refreshed too.")] = None,
) -> None:
    """Make the tables from the results files; no number is typed by hand.

    A README's tables stand between the lines `<!-- results: NAME -->` and `<!-- end of results -->`;
    `<!-- results: NAME, short -->` gives one small table: retention, or times to the first token;
    `<!-- results: NAME, short, full diffprune -->` shows these methods alone.

    \b
    Examples:
      diffprune report --results results --out docs/results.md
      diffprune report --results results --out docs/results.md --readme README.md
    """
    from diffprune.report import read_folder, refresh_tables, render_page

    found = read_folder(results)
    pages = {out: render_page(found, os.path.relpath(results, out.parent))}
    if readme is not None:
        pages[readme] = refresh_tables(readme.read_text(encoding="utf-8"), found)
    for path, text in pages.items():
        write_text(path, text)
        print(f"wrote {path} from {len(found)} results files")
