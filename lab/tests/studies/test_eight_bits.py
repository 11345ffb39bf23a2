"""A language model in 8 bits beside its own numbers: as the fast path computes it, and the study's table."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from diffprune.fast import build
from diffprune_lab.studies import eight_bits
from tests import tiny
from tests.contracts.vlm import pruned
from tests.fast.compiled import compiled


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_logits_are_those_of_the_compiled_model_in_8_bits(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "why_not_eight_bits", lambda device: "")
    vlm = compiled(family, "feature_norm", precision="fp8")
    batch = vlm.prepare([[tiny.picture(1)], [tiny.picture(2)]], ["what?", "is it red?"])
    plain = vlm.logits(batch)[0][:, -1]
    fast = vlm.fast.start(batch).logits
    stock = eight_bits.in_eight_bits(vlm).logits(batch)[0][:, -1]
    # Numbers that rounding puts on the other side of one of the few steps of 8 bits differ, and no others.
    assert (stock - fast).norm() < 0.3 * (stock - plain).norm() and (stock - plain).norm() > 1e-3 * plain.norm()


def test_only_maps_of_the_copy_s_decoder_layers_change() -> None:
    vlm = pruned("llava")
    other = eight_bits.in_eight_bits(vlm)
    layers = len(vlm.backbone.language_model.layers)
    assert sum(isinstance(part, eight_bits.EightBitLinear) for part in other.base.modules()) == 7 * layers
    assert not any(isinstance(part, eight_bits.EightBitLinear) for part in vlm.base.modules())
    assert isinstance(other.base.lm_head, nn.Linear)
    own, copied = vlm.base.model.vision_tower.state_dict(), other.base.model.vision_tower.state_dict()
    assert all(torch.equal(own[name], copied[name]) for name in own)


def test_both_precisions_answer_the_same_questions_and_are_compared(tmp_path: Path) -> None:
    out = tmp_path / "scenes_fp8.json"
    told = ["--methods", "divprune", "--keep", "16", "--questions", "1", "--device", "cpu"]
    eight_bits.main(["--model", "small=scenes-nano", *told, "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    asked = {(row["method"], row["precision"]): row for row in rows if row.get("task") == "scenes/gqa"}
    assert set(asked) == {(method, precision) for method in ("full", "divprune") for precision in ("model", "fp8")}
    summary = {(row["method"], row["precision"]): row for row in rows if "retention" in row}
    assert summary["full", "model"]["first_token_kl"] == 0 < summary["full", "fp8"]["first_token_kl"] < 0.01
    own, other = summary["divprune", "model"], summary["divprune", "fp8"]
    assert other["versus"] == "model" and other["lead"] == pytest.approx(own["retention"] - other["retention"])
    assert own["first_token_kl"] != other["first_token_kl"]
    before = out.read_text()
    eight_bits.main(["--model", "small=scenes-nano", *told, "--out", str(out)])  # nothing is asked twice
    assert json.loads(out.read_text())["rows"] == json.loads(before)["rows"]


def test_a_gpu_without_such_products_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eight_bits, "why_not_eight_bits", lambda device: f"{device} has none")
    told = ["--model", "small=scenes-nano", "--device", "cuda:0", "--out", str(tmp_path / "x.json")]
    with pytest.raises(ValueError, match="nothing to compare: cuda:0 has none; --device cpu has them, slowly"):
        eight_bits.main(told)
    assert not any(tmp_path.iterdir())
