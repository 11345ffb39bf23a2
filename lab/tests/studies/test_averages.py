"""Averages over layers, written into results of before."""

from pathlib import Path

import pytest

from diffprune.evaluate.answers import Answers, Entry, Sheet, answers_file, read_sheet, write_sheet
from diffprune.results import read_results, write_results
from diffprune_lab.studies.averages import add_averages, average_of


def test_rows_without_the_number_get_it_and_nothing_else_changes(tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    rows = [
        {"method": "fastv", "keep": 8, "seed": 0, "task": "gqa", "score": 50.0},
        {"method": "random", "keep": 8, "retention": 60.0},
        {"method": "fastv", "keep": 8, "retention": 70.0},
        {"method": "fastv", "keep": 16, "retention": 80.0, "average": 99.0},
    ]
    before = write_results(
        path, name="old", rows=rows, command="x", commit="a" * 40, device="CPU", seeds=[3], notes="n"
    )
    one = Answers(Entry("fastv", 8, 0), ["yes"], {"gqa": 50.0}, {"gqa": 50.0}, {"gqa": [0.5]})
    write_sheet(answers_file(path), Sheet([], {"gqa": 1.0}, [one]))

    def rule(method: str, keep: int | float) -> float | None:
        return 70.0 + keep if method == "fastv" else None

    assert add_averages(path, rule) == 2 and add_averages(path, rule) == 0
    after = read_results(path)
    assert [row.get("average") for row in after.rows] == [78.0, None, 78.0, 99.0]
    assert [{key: row[key] for key in row if key != "average"} for row in after.rows] == [
        {key: row[key] for key in row if key != "average"} for row in before.rows
    ]
    for key in ("name", "command", "commit", "date", "device", "versions", "seeds", "notes"):
        assert getattr(after, key) == getattr(before, key)
    assert read_sheet(answers_file(path)).answers[0].average == 78.0


def test_the_rule_is_the_method_s_own_on_the_model_s_layers_and_tokens() -> None:
    rule = average_of("scenes-nano")  # 4 layers, 144 tokens
    assert rule("fastv", 8) == (2 * 144 + 2 * 8) / 4 and rule("fastv[layer=1]", 8) == (144 + 3 * 8) / 4
    assert rule("p_mod", 32) == 32.0, "K is the mean over layers itself"
    assert rule("random", 8) is None and rule("oracle", 8) is None and rule("diffprune-throttled", 8) is None
    with pytest.raises(ValueError, match="has no option 'layr'"):
        rule("fastv[layr=1]", 8)
