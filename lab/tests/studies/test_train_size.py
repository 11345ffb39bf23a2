"""The training measurement on small models: every row is there, a failing model costs no other, FLOPs are counted."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from diffprune.model import PrunedVLM
from diffprune.results import read_results
from diffprune.shapes import SHAPES
from diffprune.train.trainer import Part
from diffprune.train.watch import peak_memory_gb
from diffprune_lab.studies import train_size
from tests import tiny


def main(monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: str) -> list[dict[str, Any]]:
    monkeypatch.setattr("sys.argv", ["train_size", "--size", "tiny", "--device", "cpu", "--out", str(out), *arguments])
    train_size.main()
    return read_results(out).rows


def test_a_model_gives_a_row_for_each_variant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda call, **_: call)  # what it makes is another test's
    rows = main(monkeypatch, tmp_path / "train.json", "--models", "qwen2.5-vl-32b", "--kernels", "3")
    assert [(row["backbone"], row["batch"], row["variant"]) for row in rows] == [
        ("qwen2.5-vl-32b", 1, variant) for variant in ("plain", "compiled", "cached", "checkpointing")
    ]
    for row in rows:
        assert row["checkpointing"] == (row["variant"] == "checkpointing") and "missing" not in row
        assert len(row["kernels"]) == 3 and row["waits"] == [] and row["prepare_s"] >= 0
        assert row["samples_s"] == pytest.approx(1e3 * row["batch"] / row["step_ms"]) and 0 < row["mfu"] < 1
        assert 0 <= row["wait_ms"] < row["step_ms"] and row["median_ms"] > 0
        assert 0 < row["peak_gb"] <= peak_memory_gb()
        assert row["num_text"] > 60 and row["num_visual"] == 6
    assert [row["first_loss"] for row in rows] == pytest.approx([rows[0]["first_loss"]] * 4, rel=1e-5)


def test_a_model_that_fails_costs_no_other_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(small: bool) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setitem(SHAPES, "llava-1.5-7b", fail)
    models = ("--models", "llava-1.5-7b,qwen2.5-vl-32b", "--variants", "plain,checkpointing")
    rows = main(monkeypatch, tmp_path / "train.json", *models)
    assert rows[0] == {"backbone": "llava-1.5-7b", "error": "RuntimeError: out of memory"}
    assert [row["backbone"] for row in rows[1:]] == ["qwen2.5-vl-32b"] * 2


def test_time_that_is_over_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = main(monkeypatch, tmp_path / "train.json", "--models", "llava-1.5-7b", "--seconds", "-1")
    assert rows == [{"backbone": "llava-1.5-7b", "error": "not begun: -1 seconds were over"}]


def test_a_real_size_is_refused_on_a_cpu_before_it_is_built(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["train_size", "--device", "cpu", "--models", "llava-1.5-7b"])
    with pytest.raises(SystemExit):
        train_size.main()
    assert "there is no GPU to run it on: training needs one with 26 GiB" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["train_size", "--device", "cpu", "--models", "mystery"])
    with pytest.raises(SystemExit):
        train_size.main()
    assert "--models 'mystery' is not measured here; choose from llava-1.5-7b" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["llava-1.5-7b", "qwen2.5-vl-7b"])
def test_the_operations_counted_are_those_that_run(name: str) -> None:
    """Against torch's own counter, which counts causal attention whole, and nothing for a fused attention kernel."""
    config, processor = SHAPES[name](True)
    model = train_size.build(config, "cpu", torch.float32)
    vlm = PrunedVLM(model, processor, method="diffprune", keep=2)
    pictures = [tiny.picture(0, (336, 336)), tiny.picture(1, (336, 336))]
    batch = vlm.prepare(pictures, ["What is it?"] * 2, ["a small one", "a large one"])
    assert batch.labels is not None
    part = Part([], [], batch, num_targets=int((batch.labels != -100).sum()))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        vlm.loss(batch).backward()
    counted = train_size.step_flops(vlm, [part])
    text = config.text_config
    lengths = batch.features["attention_mask"].sum(-1)
    causal_half = 3 * text.num_hidden_layers * 2 * int((lengths**2).sum()) * text.hidden_size
    assert counted + causal_half == pytest.approx(counter.get_total_flops(), rel=0.05)
