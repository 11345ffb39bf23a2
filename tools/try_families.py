"""Runs the tests behind the table of families in docs/backbones.md and writes what each showed to docs/families.json.

    python tools/try_families.py

`make docs` makes the table of it. A family without a test in a column has none there ("-").
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "docs" / "families.json"
# Column of the table, and the test that shows it; each has a parameter `family`.
COLUMNS = {
    "stock folder": "tests/test_stock_folders.py::test_every_family_loads_from_its_hub_layout_without_torchvision",
    "batch": "tests/contracts/test_backbones.py::test_a_batch_answers_as_its_rows_do_one_by_one",
    "chat of three turns": "tests/talking/test_chat.py::test_three_turns_answer_as_asked_anew",
    "streaming": "tests/talking/test_streaming.py::test_the_pieces_are_the_answer",
    "processor's output": "tests/talking/test_inputs.py::test_a_processor_s_output_answers_as_its_pictures_do",
    "fast path": "tests/fast/test_path.py::test_first_logits_are_those_of_the_reference_path",
}


class Collector:
    """A pytest plugin: for every family and column whether all of its tests passed."""

    def __init__(self) -> None:
        self.places: dict[str, tuple[str, str]] = {}
        self.shown: dict[str, dict[str, bool]] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        for item in items:
            column = next(name for name, test in COLUMNS.items() if item.nodeid.startswith(test))
            self.places[item.nodeid] = (item.callspec.params["family"], column)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            family, column = self.places[report.nodeid]
            row = self.shown.setdefault(family, {})
            row[column] = row.get(column, True) and report.outcome == "passed"


def main() -> int:
    import pytest

    collector = Collector()
    code = pytest.main(["-q", *(str(ROOT / test) for test in COLUMNS.values())], plugins=[collector])
    OUT.write_text(json.dumps({name: collector.shown[name] for name in sorted(collector.shown)}, indent=2) + "\n")
    return int(code)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
