"""The check that runs on models of the real size, on a small one: it must see a right cut and a wrong one."""

from pathlib import Path

import torch

from diffprune.results import read_results
from diffprune_lab.studies import real_size


def test_a_model_in_the_hubs_layout_is_loaded_and_pruned_exactly(tmp_path: Path) -> None:
    row = real_size.measure("llava-1.5-7b", device="cpu", dtype=torch.bfloat16, tiny=True, folder=tmp_path)
    assert row["num_visual"] == 576 and row["num_kept"] == 64 and row["new_tokens"] == 32
    assert row["masked_rms_float32"] < 1e-5 < row["packed_rms_float32"]
    assert row["masked_rms"] < 2 * row["rounding_rms"]


def test_weights_take_the_hubs_names() -> None:
    named = {
        "model.language_model.layers.0.mlp.up_proj.weight": "language_model.model.layers.0.mlp.up_proj.weight",
        "model.vision_tower.embeddings.class_embedding": "vision_tower.vision_model.embeddings.class_embedding",
        "model.multi_modal_projector.linear_1.bias": "multi_modal_projector.linear_1.bias",
        "lm_head.weight": "language_model.lm_head.weight",
    }
    assert {key: real_size.hub_name(key, "llava") for key in named} == named
    assert real_size.hub_name("model.visual.merger.ln_q.weight", "qwen2_5_vl") == "visual.merger.ln_q.weight"
    assert real_size.hub_name("model.language_model.norm.weight", "qwen2_5_vl") == "model.norm.weight"


def test_rows_are_written_as_they_come(tmp_path: Path, monkeypatch) -> None:
    out = tmp_path / "backbones.json"
    monkeypatch.setattr(
        "sys.argv", ["real_size", "--size", "tiny", "--models", "llava-1.5-7b", "--device", "cpu", "--out", str(out)]
    )
    real_size.main()
    assert [row["backbone"] for row in read_results(out).rows] == ["llava-1.5-7b"]
