"""One config on several models: each is asked about its own world at 11.1 %, and rows say which model they are of."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from diffprune_lab.studies import recipe


def test_each_model_answers_the_tasks_of_its_own_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def session(one):
        asked.append(one)
        row = {"method": "diffprune", "keep": 0.1111, "seed": 42, "task": "x", "score": 50.0, "full_score": 100.0}
        return SimpleNamespace(run=lambda: SimpleNamespace(rows=[row], sentences=["hm"]))

    monkeypatch.setattr(recipe, "Session", session)
    out = tmp_path / "recipe.json"
    recipe.main([
        *("--model", "scenes-nano=scenes-nano", "--model", "scarce-llava=elsewhere", "--pruner", "scarce-llava=a,b"),
        *("--device", "cpu", "--out", str(out), "--commit", "abc1234"),
    ])  # fmt: skip
    assert [(one.model, one.tasks, one.pruner) for one in asked] == [
        ("scenes-nano", "scenes", "none"),
        ("elsewhere", "scarce", "a,b"),
    ]
    assert all(one.keep == "0.1111" for one in asked)
    written = json.loads(out.read_text())
    assert [row["backbone"] for row in written["rows"]] == ["scenes-nano", "scarce-llava"]
    assert "scarce-llava: hm" in written["notes"] and written["seeds"] == [42]
