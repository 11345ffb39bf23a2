"""The same tables for other readers: CSV for a spreadsheet, LaTeX for a paper."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

from diffprune.report.quality import name_rows
from diffprune.results import ROW_KEYS, Results, Row

FORMATS = ("md", "csv", "latex")
PAIRS = ("ci95", "lead_ci95")  # intervals: a column for each end


def to_csv(results: Results) -> str:
    """The rows of a results file that its tables sum up, numbers as they are in the file, a column for each key.

    Of quality those are the summary rows where there are any. Lists and nested values are left out, but for intervals,
    which have two columns.
    """
    rows = name_rows(results.rows)
    summary = [row for row in rows if "retention" in row]
    flat = [_flat(row) for row in summary or rows]
    present = dict.fromkeys(key for row in flat for key in row)
    order = [end for key in ROW_KEYS for end in ((f"{key}_low", f"{key}_high") if key in PAIRS else (key,))]
    columns = [key for key in order if key in present] + [key for key in present if key not in order]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def _flat(row: Row) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in row.items():
        if key in PAIRS:
            found[f"{key}_low"], found[f"{key}_high"] = value
        elif not isinstance(value, list | tuple | Mapping):
            found[key] = value
    return found


# --- LaTeX ------------------------------------------------------------------------------------------------------------

_SPECIAL = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}",
}  # fmt: skip
LATEX_HEAD = "% Made by `diffprune report --format latex`; needs \\usepackage{booktabs,graphicx}.\n"


def to_latex(page: str) -> str:
    """A page of this package's Markdown as LaTeX to be taken in with `\\input`: sections, sentences, booktabs tables.

    Best and second, bold and italic in Markdown, are bold and underlined.
    """
    parts: list[str] = [LATEX_HEAD]
    table: list[str] = []
    for line in [*page.splitlines(), ""]:
        if line.startswith("|"):
            table.append(line)
            continue
        if table:
            parts.append(_latex_table(table))
            table = []
        if line.startswith("#"):
            parts.append(f"\\subsection*{{{_latex(line.lstrip('# '))}}}\n")
        elif picture := re.fullmatch(r"!\[[^]]*\]\(([^)]*)\)", line):
            parts.append(f"\\includegraphics[width=\\linewidth]{{{picture[1]}}}\n")
        elif line and not line.startswith("<!--"):
            parts.append(_latex(line) + "\n")
        elif parts[-1] != "\n":
            parts.append("\n")
    return "".join(parts)


def _latex_table(lines: Sequence[str]) -> str:
    """A tabular of a Markdown table's lines: head, alignment, rows."""
    head, marks, *rows = ([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines)
    aligned = "".join("r" if mark.endswith(":") else "l" for mark in marks)
    body = "".join(" & ".join(map(_latex, cells)) + " \\\\\n" for cells in rows)
    titles = " & ".join(map(_latex, head))
    return (
        f"\\begin{{tabular}}{{{aligned}}}\n\\toprule\n{titles} \\\\\n\\midrule\n{body}\\bottomrule\n\\end{{tabular}}\n"
    )


def _latex(text: str) -> str:
    """A Markdown line in LaTeX: marks, code and links turned, the rest escaped."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text).replace("\\|", "|")
    parts = re.split(r"(`[^`]*`|\*\*[^*]+\*\*|(?<!\w)_[^_ ]+_(?!\w))", text)
    found = []
    for part in parts:
        for mark, command in (("`", "texttt"), ("**", "textbf"), ("_", "underline")):
            if len(part) > 2 * len(mark) and part.startswith(mark) and part.endswith(mark):
                found.append(f"\\{command}{{{_escaped(part[len(mark) : -len(mark)])}}}")
                break
        else:
            found.append(_escaped(part))
    return "".join(found)


def _escaped(text: str) -> str:
    return "".join(_SPECIAL.get(letter, letter) for letter in text)
