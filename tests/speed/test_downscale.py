"""`downscale` in speed rows: the full model on a smaller picture, which the tower has less work with too."""

from dataclasses import replace

import pytest
import torch

from diffprune.evaluate.downscale import shrink
from diffprune.model import PrunedVLM
from diffprune.results import Results, check_rows
from diffprune.shapes import SHAPES
from diffprune.speed import profile, throughput
from diffprune.speed.calibrate import even_rows
from diffprune.speed.flops import encoder_flops, prefill_flops
from diffprune.speed.subject import deployed
from tests import tiny
from tests.speed.sample import OPTIONS

SIZES = {  # of a picture that the tiny model of the family can take with half its tokens
    "qwen2_vl": (112, 112), "qwen2_5_vl": (112, 112), "qwen3_vl": (128, 128), "llava_next": (64, 64),
    "llava_onevision": (64, 64), "internvl": (64, 32), "idefics3": (64, 64), "smolvlm": (64, 64),
}  # fmt: skip
UNCOMPILED = {"qwen3_vl": ["NotCompiled: qwen3_vl adds features between decoder layers"] * 2}
SETTINGS = profile.ProfileSettings(**{**OPTIONS, "image": (112, 112), "keeps": [4]}, methods=["full", "downscale"])


@pytest.fixture(scope="module")
def rows():
    return profile.profile(SETTINGS)


def test_a_smaller_picture_is_a_row_on_both_paths(rows) -> None:
    check_rows(rows)
    full, smaller = ({row["path"]: row for row in rows if row.get("method") == name} for name in SETTINGS.methods)
    assert full.keys() == smaller.keys() == {"eager", "fast"}
    assert not any("error" in row for row in rows), rows
    text = SHAPES["qwen2.5-vl-7b"](True)[0].text_config
    for path, row in smaller.items():
        assert (row["keep"], row["num_visual"], row["num_kept"], row["num_text"]) == (4, 4, 4, 40)
        assert full[path]["num_visual"] == 16 and row["num_columns"] == full[path]["num_columns"] - 12
        assert row["tflops"] * 1e12 == pytest.approx(prefill_flops(text, 44))
        assert row["pruner_ms"] == 0.0 and row["kv_bytes"] == row["kv_bytes_predicted"] < full[path]["kv_bytes"]
        assert row["ttft_ms"] > 0 and row["decode_tok_s"] > 0
    assert "compile_s" in smaller["fast"]


def test_plans_are_fitted_to_such_rows_too(rows) -> None:
    saved = Results(name="x", command="", commit="", date="", device="CPU", versions={}, seeds=[], rows=rows, notes="")
    assert [row["method"] for row in even_rows(saved, "fast")] == ["full", "downscale"]


@pytest.mark.parametrize("family", SIZES)
def test_every_family_that_takes_a_smaller_picture_is_measured_with_one(family: str, monkeypatch) -> None:
    """In the form that an evaluation chooses, with as many text tokens as any other row's, on the paths that it has."""
    subject, size = PrunedVLM(*tiny.build(family)), SIZES[family]
    monkeypatch.setattr(profile, "load_subject", lambda *_, **__: subject)
    forms = [form.num_visual for form in subject.backbone.forms(size)]
    keep = max(min(forms), forms[0] // 2)
    form = shrink(subject, size, keep)
    assert form is not None and form.num_visual <= keep < forms[0]
    found = profile.profile(replace(SETTINGS, image=size, keeps=[keep], texts=[64]))[1:]
    rows = {(row["method"], row["path"]): row for row in found if "error" not in row}
    assert [row["error"] for row in found if "error" in row] == UNCOMPILED.get(family, [])
    for path in {path for _, path in rows}:
        full, smaller = rows["full", path], rows["downscale", path]
        assert smaller["num_visual"] == smaller["num_kept"] == form.num_visual and full["num_visual"] == forms[0]
        assert smaller["num_text"] == 64 and smaller["tflops"] < full["tflops"]
    vlm, smaller_size = deployed(subject, "downscale", keep=keep, dtype=torch.float32, size=size)
    encoded = [
        one.backbone.num_encoded(one.base.config, of, count)
        for one, of, count in ((vlm, smaller_size, form.num_visual), (subject, size, forms[0]))
    ]
    assert encoder_flops(vlm.base.config, encoded[0]) < encoder_flops(vlm.base.config, encoded[1])


@pytest.mark.parametrize("family", ["llava", "paligemma"])
def test_a_family_of_one_size_is_told_so_before_anything_is_measured(family: str, monkeypatch) -> None:
    monkeypatch.setattr(profile, "load_subject", lambda *_, **__: PrunedVLM(*tiny.build(family)))
    for run in (profile.profile, throughput.throughput):
        with pytest.raises(ValueError, match=rf"the {family} family scales every picture to one size.*leave downscale"):
            run(SETTINGS)


def test_a_budget_below_the_smallest_form_says_so_in_its_row(monkeypatch) -> None:
    monkeypatch.setattr(profile, "load_subject", lambda *_, **__: PrunedVLM(*tiny.build("llava_next")))
    full, smaller = profile.profile(replace(SETTINGS, image=(64, 64), keeps=[1], paths=["eager"], decode=False))[1:]
    assert "ttft_ms" in full
    assert "downscale has no row at keep=1: a picture of 64 x 64 pixels has at least 32 tokens" in smaller["error"]


def test_a_closed_loop_has_a_smaller_picture_too() -> None:
    full, smaller = throughput.throughput(replace(SETTINGS, paths=["fast"]))
    assert smaller["num_visual"] == smaller["num_kept"] == 4 < full["num_visual"] and smaller["speedup"] > 0
