"""The report's other formats, its figures, the paper's rows, and a folder of a user's own results."""

import csv
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from diffprune.cli import main as cli
from diffprune.report import read_folder, render_page
from diffprune.report.figures import choose_methods, match_times
from diffprune.report.formats import to_latex
from diffprune.report.printed import printed_block
from diffprune.results import write_results


def task_rows(method: str, keep: int | float, scores: dict[str, float]) -> list[dict[str, Any]]:
    row = {"method": method, "keep": keep, "seed": 0, "full_score": 60.0}
    return [{**row, "task": task, "score": min(score, 100.0), "score_raw": score} for task, score in scores.items()]


SUMMARY = [
    {"method": method, "keep": keep, "retention": left, "ci95": [left - 1.0, left + 1.0], "ci_over": "questions"}
    for method, lefts in (("diffprune", (99.0, 97.0)), ("random", (80.0, 60.5)), ("gots", (98.0, 96.0)))
    for keep, left in zip((64, 32), lefts, strict=True)
]
SPEED = [
    {
        "method": method, "path": path, "batch": 1, "num_kept": 64, "num_visual": 576, "num_text": 40, "ttft_ms": ms,
        "backbone": "llava-1.5-7b",
    }
    for method, path, ms in (("diffprune", "eager", 30.0), ("diffprune", "fast", 7.0), ("gots", "fast", 9.0))
]  # fmt: skip


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder of somebody's own results, with files of other kinds in it."""
    folder = tmp_path / "own"
    more = {"command": "mine", "commit": "c", "device": "card"}
    write_results(folder / "quality.json", name="quality", rows=SUMMARY, notes="100 % of & <it>", **more)
    write_results(folder / "speed.json", name="speed", rows=SPEED, **more)
    (folder / "quality.answers.json").write_text("{}")
    (folder / "other.json").write_text('{"step": 3}')
    return folder


def run(*arguments: object) -> int:
    return cli._run(["report", *map(str, arguments)])


def test_a_folder_of_one_s_own_becomes_a_page_with_figures(own: Path, tmp_path: Path, capsys) -> None:
    assert run("--results", own, "--out", tmp_path / "r.md", "--figures", tmp_path / "f") == 0
    page = (tmp_path / "r.md").read_text()
    assert "| diffprune | bridge, top-k | 99.0 (98.0 to 100.0) | 97.0 (96.0 to 98.0) |" in page
    assert "![quality](f/quality-retention.png)" in page and "![quality](f/quality-time.png)" in page
    assert "passed over" in capsys.readouterr().err
    assert f"files in `{own.name}`" in page and "holov-paper" not in page  # no word of methods that it has no row of
    for name in ("quality-retention", "quality-time"):
        with Image.open(tmp_path / "f" / f"{name}.png") as picture:
            assert picture.width > 1000
        assert ElementTree.parse(tmp_path / "f" / f"{name}.svg").getroot().tag.endswith("svg")


def test_csv_has_the_numbers_of_the_file(own: Path, tmp_path: Path) -> None:
    run("--results", own, "--format", "csv", "--out", tmp_path / "csv")
    with (tmp_path / "csv/quality.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(one["method"], one["keep"], one["retention"], one["ci95_low"]) for one in rows][:2] == [
        ("diffprune", "64", "99.0", "98.0"),
        ("diffprune", "32", "97.0", "96.0"),
    ]
    assert {path.name for path in (tmp_path / "csv").iterdir()} == {"quality.csv", "speed.csv"}


def test_latex_is_escaped_and_has_the_tables(own: Path, tmp_path: Path) -> None:
    run("--results", own, "--format", "latex", "--out", tmp_path / "r.tex")
    text = (tmp_path / "r.tex").read_text()
    assert "\\begin{tabular}{llll}\n\\toprule\nmethod & recipe, choice & keep 64 & keep 32 \\\\" in text
    assert "100 \\% of \\& \\textless{}it\\textgreater{}" in text and "gots & - & 98.0 (97.0 to 99.0)" in text
    marked = to_latex("| a_b | c |\n|---|---:|\n| **9.5** ± 1 | _8.0_ (1) |\n")
    assert "a\\_b & c \\\\" in marked and "\\textbf{9.5} $\\pm$ 1 & \\underline{8.0} (1) \\\\" in marked


def test_a_format_that_is_not_there_is_refused_before_anything_is_written(own: Path, tmp_path: Path, capsys) -> None:
    assert run("--results", own, "--format", "pdf", "--out", tmp_path / "r") != 0
    assert "'pdf' is none of md, csv, latex" in capsys.readouterr().err and not (tmp_path / "r").exists()


def test_a_damaged_results_file_is_an_error(own: Path) -> None:
    (own / "quality.json").write_text((own / "quality.json").read_text()[:-20])
    with pytest.raises(ValueError, match="is not JSON"):
        read_folder(own, others=[])


def test_times_are_of_the_same_method_and_budget_fast_before_eager() -> None:
    found = match_times(SUMMARY, SPEED)
    assert [(one["method"], one["keep"], one["ms"]) for one in found] == [("diffprune", 64, 7.0), ("gots", 64, 9.0)]
    assert match_times(SUMMARY, SPEED[:2]) == []  # one method alone is no comparison


def test_times_beside_each_other_are_of_one_model_text_and_device() -> None:
    """Two methods on one card, and two files in which one of them is quicker by something else."""
    for odd in ({"backbone": "small"}, {"num_text": 9}, {"device": "another card"}, {"path": "eager"}):
        quick = {**SPEED[2], "ttft_ms": 0.5, **odd}
        assert [one["ms"] for one in match_times(SUMMARY, [quick, *SPEED])] == [7.0, 9.0]
        assert match_times(SUMMARY, [quick, SPEED[1]]) == []  # nothing that could stand side by side
    served = {"method": "gots", "path": "server", "clients": 1, "requests_s": 9.0, "ttft_ms": 1.0, "keep": 64}
    assert [one["ms"] for one in match_times(SUMMARY, [served, *SPEED])] == [7.0, 9.0]
    slow = [{**one, "path": "eager"} for one in SPEED[1:]]
    (where,) = {one["where"] for one in match_times(SUMMARY, slow)}
    assert where == "llava-1.5-7b, 40 text tokens, eager path"


def test_a_figure_shows_ours_random_and_the_best_of_many() -> None:
    rows = [{"method": f"m{n}", "keep": 8, "retention": float(n)} for n in range(20)]
    named = [{"method": name, "keep": 8, "retention": 1.0} for name in ("random", "diffprune")]
    assert choose_methods([*rows, *named], 5) == ["diffprune", "random", "m19", "m18", "m17"]


FULL = {"gqa": 61.0, "textvqa_val": 58.0, "mme": 1800.0}


def test_the_papers_rows_stand_below_one_s_own_where_benchmarks_and_budgets_match() -> None:
    rows = [*task_rows("full", 1.0, FULL), *task_rows("mine", 64, {"gqa": 55.0, "textvqa_val": 50.0, "mme": 1700.0})]
    title, table = printed_block(rows)
    assert "LLaVA-1.5-7B" in title and "printed there, not measured here" in title
    lines = table.splitlines()
    assert lines[0] == "| method | keep | GQA | MME | TextVQA | Avg. |"
    assert "| mine | 64 | 55.00 | 1,700 | 50.00 | - |" in lines
    assert any(line.startswith("| DiffPrune (paper) | 64 |") for line in lines)
    assert not any("| 128 |" in line for line in lines)  # a budget nobody measured here
    assert "Beside the paper's table" in render_page({"x": write(rows)}, "")


def write(rows: list[dict[str, Any]], notes: str = "") -> Any:
    from diffprune.results import Results

    return Results(
        name="x",
        command="",
        commit="c",
        date="2026-01-01",
        device="card",
        versions={},
        seeds=[],
        rows=rows,
        notes=notes,
    )


@pytest.mark.parametrize(
    ("rows", "notes"),
    [
        (task_rows("mine", 64, {"scenes/gqa": 55.0, "scenes/mme": 1700.0}), ""),  # stand-ins by name
        (task_rows("mine", 64, {"gqa": 55.0, "mme": 1700.0}), "the scenes tasks are stand-ins"),  # of before
        (task_rows("mine", 48, {"gqa": 55.0, "mme": 1700.0}), ""),  # no budget of the paper's
        (task_rows("mine", 64, {"gqa": 55.0}), ""),  # one column is no table
        (SUMMARY, ""),
    ],
)
def test_no_row_of_the_paper_stands_where_columns_do_not_match(rows: list[dict[str, Any]], notes: str) -> None:
    assert printed_block(rows, notes) == []


def test_shares_match_the_papers_percentages() -> None:
    rows = task_rows("mine", 0.1111, {"mme": 2000.0, "pope": 80.0})
    title, table = printed_block(rows)
    assert "Qwen2.5-VL-7B" in title and "| HoloV (paper) | 11.1 % |" in table and "22.2 %" not in table
