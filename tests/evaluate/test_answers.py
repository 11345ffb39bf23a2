"""Answers files: the format they have always had."""

import json
from pathlib import Path

from diffprune.evaluate.answers import Entry, read_sheet, write_sheet

FILE = {
    "questions": [{"id": "pope-test-0-0", "task": "pope", "prompt": "Is there a red ring?", "answer": "yes"}],
    "chance": {"pope": 66.7},
    "runs": [
        {
            "method": method, "keep": keep, "seed": 0, "said": ["yes"],
            "score": {"pope": 100.0}, "raw": {"pope": 100.0},
            "units": {"pope": [100.0]}, "seconds": 0.5, **average,
        }
        for method, keep, average in (("full", 1.0, {}), ("fastv", 64, {"average": 120.5}))
    ],
}  # fmt: skip


def test_a_file_written_before_is_read_and_written_again_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "old.answers.json").write_text(json.dumps(FILE))
    sheet = read_sheet(tmp_path / "old.answers.json")
    assert [one.entry for one in sheet.answers] == [Entry("full", 1.0, 0), Entry("fastv", 64, 0)]
    assert [one.average for one in sheet.answers] == [None, 120.5]
    write_sheet(tmp_path / "new.answers.json", sheet)
    assert json.loads((tmp_path / "new.answers.json").read_text()) == FILE
