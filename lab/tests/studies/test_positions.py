"""Original against packed positions: both rules over the same questions, and what the table says of them."""

import json
from pathlib import Path

import pytest

from diffprune_lab.studies import positions


@pytest.mark.slow
def test_both_rules_answer_the_same_questions_and_are_compared(tmp_path: Path) -> None:
    out = tmp_path / "scenes_positions.json"
    told = ["--methods", "random", "--keep", "8", "--seeds", "0,1", "--questions", "2", "--device", "cpu"]
    positions.main(["--model", "small=scenes-nano", *told, "--out", str(out)])
    written = json.loads(out.read_text())
    rows = written["rows"]
    assert written["seeds"] == [0, 1] and {row["backbone"] for row in rows} == {"small"}
    tasks = [row for row in rows if "task" in row]
    assert {(row["method"], row["positions"]) for row in tasks} == {
        (method, rule) for method in ("full", "random") for rule in ("original", "packed")
    }
    # Where a position is one number, nothing was dropped and nothing moved: the full model is the same by both rules.
    full = {
        rule: [row["score"] for row in tasks if row["method"] == "full" and row["positions"] == rule]
        for rule in ("original", "packed")
    }
    assert full["original"] == full["packed"] and all(row["score"] <= 100 for row in tasks)
    summary = {(row["method"], row["positions"]): row for row in rows if "retention" in row}
    assert summary["random", "original"]["n_seeds"] == 2
    packed = summary["random", "packed"]
    assert packed["versus"] == "original"
    assert packed["lead"] == pytest.approx(summary["random", "original"]["retention"] - packed["retention"])
