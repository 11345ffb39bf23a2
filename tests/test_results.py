import importlib.machinery
import json
import math
import os
import subprocess
import sys

import pytest

from diffprune import results
from diffprune.results import check_rows, format_value, kind_of, markdown_table, read_results, write_results

QUALITY = {"method": "full", "keep": 1.0, "seed": 0, "task": "colour", "score": 98.5}
SUMMARY = {"method": "diffprune", "keep": 64, "retention": 96.5, "ci95": [95.0, 97.0]}
SPEED = {"method": "full", "path": "fast", "batch": 1, "ttft_ms": 12.5}
TRAINING = {"backbone": "llava-1.5-7b", "batch": 16, "samples_s": 40.0}
BENCHMARK = {"name": "soft_topk", "ours_ms": 0.2, "reference_ms": 0.4, "ratio": 2.0}
PROBE = {"depth": 3, "coherence": 0.25}


def test_a_written_file_reads_back_as_it_was(tmp_path):
    path = tmp_path / "made" / "x.json"
    written = write_results(path, name="x", rows=[QUALITY, SPEED], commit="abc", device="CPU", seeds=[1, 2], notes="n")
    assert read_results(path) == written
    assert written.seeds == [1, 2] and written.commit == "abc" and written.device == "CPU"
    assert json.loads(path.read_text())["rows"][0] == QUALITY


def test_whole_and_one_token_stay_different_in_a_file(tmp_path):
    write_results(tmp_path / "x.json", name="x", rows=[{"keep": 1}, {"keep": 1.0}], device="CPU")
    keeps = [row["keep"] for row in read_results(tmp_path / "x.json").rows]
    assert [type(keep) for keep in keeps] == [int, float]


def test_what_was_run_is_filled_in(tmp_path):
    written = write_results(tmp_path / "x.json", name="x", rows=[])
    assert set(written.versions) >= {"python", "torch", "transformers", "numpy"}
    assert written.device and written.date.endswith("Z") and written.command


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        (QUALITY, "quality"),
        (SUMMARY, "summary"),
        (SPEED, "speed"),
        (TRAINING, "training"),
        (BENCHMARK, "benchmark"),
        (PROBE, "other"),
    ],
)
def test_the_kind_of_a_row_follows_from_its_keys(row, kind):
    check_rows([row])
    assert kind_of(row) == kind


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("score", math.nan),
        ("score", 101),
        ("score", "98"),
        ("seed", True),
        ("method", ""),
        ("keep", 0),
        ("keep", 1.5),
        ("keep", math.inf),
        ("task", None),
        ("path", "quick"),
        ("batch", 0),
        ("ttft_ms", -1.0),
        ("ci95", [2.0, 1.0]),
        ("unchanged", 98.0),
        ("own_key", math.inf),
        ("own_key", {"deep": [object()]}),
    ],
)
def test_a_bad_value_is_refused_with_its_key_and_value(tmp_path, key, value):
    with pytest.raises(ValueError, match=f"row 1: {key}"):
        write_results(tmp_path / "x.json", name="x", rows=[QUALITY, {**QUALITY, key: value}], device="CPU")
    assert list(tmp_path.iterdir()) == []


def test_a_row_without_a_required_key_is_refused():
    row = {key: value for key, value in QUALITY.items() if key != "task"}
    with pytest.raises(ValueError, match="quality row, which also needs 'task'"):
        check_rows([row])


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    write_results(path, name="x", rows=[QUALITY], device="CPU")
    before = path.read_bytes()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_results(path, name="x", rows=[SPEED], device="CPU")
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_a_foreign_file_is_refused(tmp_path):
    path = tmp_path / "x.json"
    with pytest.raises(ValueError, match=r"cannot read results file .*x\.json"):
        read_results(path)
    path.write_text("{]")
    with pytest.raises(ValueError, match="is not JSON"):
        read_results(path)
    path.write_text('{"rows": []}')
    with pytest.raises(ValueError, match="is not a results file"):
        read_results(path)


def test_a_row_changed_by_hand_is_found(tmp_path):
    path = tmp_path / "x.json"
    write_results(path, name="x", rows=[QUALITY], device="CPU")
    path.write_text(path.read_text().replace("98.5", "985"))
    with pytest.raises(ValueError, match=r"x\.json: row 0: score is 985"):
        read_results(path)


def test_the_command_holds_no_path_of_the_machine(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    argv = ["/opt/bin/diffprune", "eval", "--out", str(tmp_path / "out/x.json"), "--pruner=/elsewhere/run", "a b"]
    monkeypatch.setattr(sys, "argv", argv)
    assert results.command_line() == "diffprune eval --out out/x.json --pruner=run 'a b'"


def test_a_script_is_named_the_way_it_was_started(monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys, "argv", ["measure.py", "--fast"])
    assert results.command_line() == "python measure.py --fast"


def test_a_module_is_named_the_way_it_was_started(monkeypatch):
    spec = importlib.machinery.ModuleSpec("diffprune.speed.accuracy", None)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    monkeypatch.setattr(sys, "argv", ["accuracy.py", "--out", "x.json"])
    assert results.command_line() == "python -m diffprune.speed.accuracy --out x.json"


def test_a_package_outside_a_checkout_has_no_commit(monkeypatch, tmp_path):
    monkeypatch.setattr(results, "__file__", str(tmp_path / "src" / "diffprune" / "results.py"))
    assert results.source_commit() == "unknown"


def test_a_checkout_with_changed_sources_is_dirty(monkeypatch, tmp_path):
    source = tmp_path / "src" / "diffprune" / "results.py"
    source.parent.mkdir(parents=True)
    source.write_text("a = 1\n")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    for command in (["init", "-q"], ["add", "src"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *command], check=True, capture_output=True)
    monkeypatch.setattr(results, "__file__", str(source))
    clean = results.source_commit()
    assert len(clean) == 40
    source.write_text("a = 2\n")
    assert results.source_commit() == f"{clean}-dirty"


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, ""), (True, "yes"), (2880, "2,880"), (0.1111, "0.1111"), (96.512, "96.51"), (12345.6, "12,346"),
     ([95.0, 97.25], "95.00 to 97.25"), ("a|b", "a\\|b")],
)  # fmt: skip
def test_a_cell_is_short_and_safe_in_a_table(value, text):
    assert format_value(value) == text


def test_a_table_has_fixed_names_first_and_leaves_nested_values_out():
    lines = markdown_table([{"own": "z", "keep": 64, "method": "full", "nested": {"a": 1}}]).splitlines()
    assert lines == ["| method | keep | own |", "|---|---:|---|", "| full | 64 | z |"]
