import pytest
import torch

from diffprune.methods.base import LayerPruner
from diffprune.registry import METHODS
from diffprune.report import render_tables
from diffprune.results import read_results
from diffprune_lab.studies import selection

TINY = selection.SIZES["tiny"]


@pytest.mark.slow
def test_every_method_before_the_language_model_has_a_row_for_every_shape(tmp_path, capsys):
    out = tmp_path / "selection_time.json"
    selection.main(["--size", "tiny", "--out", str(out), "--commit", "abc"])
    results = read_results(out)
    assert results.name == "selection_time" and results.commit == "abc" and results.seeds == [0]
    before = {name for name in METHODS.names() if not issubclass(METHODS.get(name), LayerPruner)} - {"full"}
    measured = {METHODS.get(row["method"]) for row in results.rows}
    assert measured == {METHODS.get(name) for name in before}
    assert {row["method"] for row in results.rows if "skipped" in row} == set()
    assert results.rows[0]["method"] == "diffprune" and results.rows[0]["num_kept"] == 8
    assert len(results.rows) == len(measured) * len(TINY.shapes)
    assert all(row["pruner_ms"] > 0 and 1 <= row["calls"] <= selection.CALLS for row in results.rows)
    assert "diffprune" in capsys.readouterr().out


def test_fast_methods_have_all_shapes_before_a_slow_one_has_any():
    rows = selection.Run(TINY, "cpu", 0.0, lambda rows: None).run()
    fast = [row["method"] in selection.FAST for row in rows]
    assert fast == sorted(fast, reverse=True) and 0 < sum(fast) < len(fast)
    for method in {row["method"] for row in rows}:
        assert [row["num_visual"] for row in rows if row["method"] == method] == [24, 48]


def test_a_method_has_about_a_second_at_a_shape(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(selection.time, "monotonic", lambda: 0.3 * next(clock))
    monkeypatch.setattr(selection, "time_ms", lambda call, device: 300.0)
    assert selection.measure(lambda: None, "cpu", seconds=1.0) == {"pruner_ms": 300.0, "calls": 4}


def test_what_there_is_no_time_for_is_a_row_that_says_so(tmp_path):
    out = tmp_path / "selection_time.json"
    selection.main(["--size", "tiny", "--out", str(out), "--seconds", "0", "--commit", "abc"])
    rows = read_results(out).rows
    assert {row["skipped"] for row in rows} == {"no time was left"}
    assert all("pruner_ms" not in row and row["calls"] == 0 for row in rows)


def run_with(call, monkeypatch):
    monkeypatch.setattr(selection, "make_methods", lambda *_: [METHODS.get("feature_norm")()])
    monkeypatch.setattr(selection, "selection_of", lambda *_: call)
    shapes = (selection.Shape(1, (2, 3), 2), selection.Shape(4, (2, 3), 2))
    size = selection.Size(shapes, TINY.block, TINY.language_width)
    return selection.Run(size, "cpu", 60.0, lambda rows: None).run()


def test_a_call_that_takes_long_is_made_once(monkeypatch):
    calls = []
    monkeypatch.setattr(selection, "time_ms", lambda call, device: calls.append(call) or 7_100.0)
    single, batch = run_with(lambda: None, monkeypatch)
    assert (single["pruner_ms"], single["calls"]) == (batch["pruner_ms"], batch["calls"]) == (7_100.0, 1)
    assert len(calls) == 2


def test_a_batch_that_would_take_minutes_is_not_tried(monkeypatch):
    monkeypatch.setattr(selection, "time_ms", lambda call, device: 71_000.0)
    single, batch = run_with(lambda: None, monkeypatch)
    assert single["pruner_ms"] == 71_000.0
    assert batch["skipped"] == "one image alone takes 71.0 s" and "pruner_ms" not in batch


def test_what_does_not_fit_at_once_is_measured_in_parts_that_do(monkeypatch):
    class Hungry(METHODS.get("feature_norm")):
        def select(self, tokens, k):
            if len(tokens) > 2:
                raise torch.OutOfMemoryError("large")
            return super().select(tokens, k)

    monkeypatch.setattr(selection, "make_methods", lambda *_: [Hungry()])
    shapes = (selection.Shape(1, (2, 3), 2), selection.Shape(5, (2, 3), 2))
    size = selection.Size(shapes, TINY.block, TINY.language_width)
    single, batch = selection.Run(size, "cpu", 60.0, lambda rows: None).run()
    assert "at_once" not in single and batch["at_once"] == 2 and batch["pruner_ms"] > 0
    tokens = selection.make_tokens(shapes[1], size, "cpu", torch.float32)
    parts = selection.selection_of(METHODS.get("feature_norm")(), selection.split_images(tokens, 2), 2)()
    assert [len(part) for part in parts] == [2, 2, 1]
    assert torch.equal(torch.cat(parts), METHODS.get("feature_norm")().select(tokens, 2))


def test_what_does_not_fit_is_a_row_that_says_so(monkeypatch):
    def too_large() -> None:
        raise torch.OutOfMemoryError("large")

    def unsupported() -> None:
        raise RuntimeError("no such size\nat line 3")

    assert run_with(too_large, monkeypatch)[0]["skipped"] == "the GPU's memory is too small"
    assert run_with(unsupported, monkeypatch)[0]["skipped"] == "no such size"


def test_the_report_has_methods_down_and_shapes_across():
    shape = {"num_visual": 576, "num_kept": 64}
    rows = [
        {"method": "holov", **shape, "batch": 1, "calls": 30, "pruner_ms": 0.4, "graph_ms": 0.1},
        {"method": "prunesid", **shape, "batch": 1, "calls": 30, "pruner_ms": 2.5, "graph_ms": None},
        {"method": "prunesid", **shape, "batch": 32, "calls": 0, "skipped": "no time was left"},
    ]
    page = render_tables(rows)
    assert (
        "| method | 64 of 576, batch 1 |" in page
        and "| holov | 0.4 / 0.1 |" in page
        and "| prunesid | 2.5 / - |" in page
    )
    assert "Not in the table: 64 of 576, batch 32 (no time was left)." in page
    assert "replayed" not in render_tables([rows[0] | {"graph_ms": None}])


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_missing_gpu_is_one_sentence(tmp_path, capsys):
    with pytest.raises(SystemExit):
        selection.main(["--device", "cuda", "--out", str(tmp_path / "selection_time.json")])
    assert "torch sees no GPU here" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("default")  # of torch's profiler
def test_on_a_gpu_choices_are_captured_and_launches_counted(tmp_path):
    out = tmp_path / "selection_time.json"
    selection.main(["--size", "tiny", "--device", "cuda", "--out", str(out), "--commit", "abc"])
    rows = {row["method"]: row for row in reversed(read_results(out).rows)}  # of the first shape
    assert rows["holov"]["graph_ms"] is not None and rows["divprune"]["graph_ms"] is not None
    assert rows["prunesid"]["graph_ms"] is not None and rows["agilepruner"]["graph_ms"] is None
    assert rows["feature_norm"]["launches"] >= 2
