"""The study that is run on a GPU runs here too."""

import json
from pathlib import Path

import pytest

from diffprune.results import read_results
from diffprune_lab.studies import fast_same as study


def test_every_part_of_the_study_runs_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "fast.json"
    results = tmp_path / "fast_same.json"
    arguments = ["study", "--size", "tiny", "--device", "cpu", "--models", "llava", "--out", str(out)]
    arguments += ["--results", str(results), "--commit", "abc1234"]
    monkeypatch.setattr("sys.argv", arguments)
    monkeypatch.setattr(study, "median_ms", lambda function, *_, **__: (function(), 1.0)[1])
    monkeypatch.setattr(study, "wall_ms", lambda function, *_, **__: (function(), 1.0)[1])
    study.main()
    found = json.loads(out.read_text())
    assert not [part for part, value in found.items() if str(value).startswith("failed")]
    for of in ("pruned", "full"):
        assert found[f"agreement_{of}"]["same_tokens"] == 1.0 and found[f"agreement_{of}"]["logits_rms"] < 1e-5
        assert found[f"exactness_{of}"].keys() == {"fast_rms", "reference_rms"}
        assert max(found[f"exactness_{of}"].values()) < 1e-5  # the model is in float32 itself here
    written = read_results(results)
    assert written.commit == "abc1234"
    parts = ["agreement_pruned", "exactness_pruned", "agreement_full", "exactness_full"]
    assert [row["name"] for row in written.rows] == parts


def test_a_part_that_fails_does_not_stop_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    log = study.Log(None, limit=60.0)
    assert log.part("broken", lambda: 1 / 0) is None
    assert log.part("whole", lambda: {"x": 1.0}) == {"x": 1.0}
    late = study.Log(None, limit=-1.0)
    assert late.part("late", lambda: 1.0) is None
    said = capsys.readouterr().out
    assert "broken: FAILED" in said and "late: left out" in said
    assert log.found["broken"].startswith("failed: ZeroDivisionError")


def test_what_failed_or_was_left_out_is_a_row_of_the_results(tmp_path: Path) -> None:
    def broken() -> None:
        raise RuntimeError("no such kernel\nand a long trace")

    results = tmp_path / "fast_same.json"
    log = study.Log(None, limit=60.0, results=results, commit="abc1234")
    log.part("scenes_full", lambda: {"same": 50})
    log.part("scenes_divprune", broken)
    log.part("bandwidth", broken)  # compares no answers
    log.limit = -1.0
    log.part("agreement_full", broken)
    assert read_results(results).rows == [
        {"name": "scenes_full", "same": 50},
        {"name": "scenes_divprune", "error": "RuntimeError: no such kernel"},
        {"name": "agreement_full", "skipped": "left out, the time is over"},
    ]


def test_a_comparison_whose_model_is_not_there_is_a_row_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object, **__: object) -> None:
        raise ValueError("no room")

    results = tmp_path / "fast_same.json"
    log = study.Log(None, limit=60.0, results=results, commit="abc1234")
    monkeypatch.setattr(study, "build", no_room)
    study.check_llava(log, tiny=True, device="cpu")
    monkeypatch.setattr("diffprune.loading.load_base", no_room)
    study.check_scenes(log, tiny=False, device="cpu")
    parts = [f"{part}_{of}" for of in ("pruned", "full") for part in ("agreement", "exactness")]
    parts += [f"scenes_{method}" for method in ("full", "cls_attention", "divprune", "pyramiddrop", "diffprune")]
    assert [(row["name"], row["error"]) for row in read_results(results).rows] == [
        (part, "RuntimeError: there is no model") for part in parts
    ]
