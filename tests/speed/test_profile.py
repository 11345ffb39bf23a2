"""`diffprune profile` at tiny size on a CPU: every row, both paths, and what happens when something fails."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diffprune.cli.profile import read_settings
from diffprune.fast import build
from diffprune.model import PrunedVLM
from diffprune.results import Results, check_rows, read_results
from diffprune.shapes import SHAPES
from diffprune.speed import measure, profile
from diffprune.speed.calibrate import measured_rows
from diffprune.speed.flops import prefill_flops
from diffprune.speed.subject import with_method
from tests.clock import FakeClock
from tests.speed.sample import OPTIONS

METHODS = ["full", "diffprune", "holov", "visionzip", "pyramiddrop"]


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return profile.profile(profile.ProfileSettings(**OPTIONS, methods=METHODS, paths=["eager"]))


def test_every_method_is_a_row_with_every_number(rows):
    check_rows(rows)
    head, *measured = rows
    assert head["copy_gb_s"] > 0 and head["weights_read_gb"] > 0
    assert [row["method"] for row in measured] == METHODS
    for row in measured:
        assert "error" not in row
        assert {"encode_ms", "pruner_ms", "prefill_ms", "ttft_ms", "decode_tok_s", "tflops", "kv_bytes"} <= set(row)
        assert row["kv_bytes"] == row["kv_bytes_predicted"]
        assert row["num_visual"] == 12 and row["num_kept"] == (12 if row["method"] == "full" else 3)
        assert row["ratio_to_floor"] == pytest.approx(row["prefill_ms"] / row["floor_ms"])


def test_operations_are_those_of_the_tokens_each_layer_holds(rows):
    found = {row["method"]: row["tflops"] for row in rows[1:]}
    text = SHAPES["qwen2.5-vl-7b"](True)[0].text_config
    assert found["full"] * 1e12 == pytest.approx(prefill_flops(text, 52))
    assert found["diffprune"] * 1e12 == pytest.approx(prefill_flops(text, 43))
    assert found["diffprune"] < found["pyramiddrop"] < found["full"]


def test_a_fast_row_says_what_its_bucket_holds(subject):
    settings = profile.ProfileSettings(**OPTIONS, methods=["full", "diffprune"], paths=["fast"])
    measured = profile.profile(settings)[1:]
    assert all("error" not in row for row in measured), measured
    for row in measured:
        assert row["num_columns"] == row["num_kept"] + 64  # the smallest bucket for 40 text tokens
        assert row["kv_bytes"] == row["kv_bytes_predicted"] > 0
        assert row["compile_s"] > 0 and row["graphs"] == "none"


def test_a_method_that_fails_is_a_row_and_the_run_goes_on(monkeypatch):
    real = profile.deployed

    def broken(subject: PrunedVLM, name: str, **options: Any) -> tuple[PrunedVLM, tuple[int, int]]:
        if name == "holov":
            raise RuntimeError("out of luck\nand a long trace")
        return real(subject, name, **options)

    monkeypatch.setattr(profile, "deployed", broken)
    seen: list[int] = []
    settings = profile.ProfileSettings(**OPTIONS, methods=["full", "holov", "random"], paths=["eager"])
    measured = profile.profile(settings, lambda rows: seen.append(len(rows)))
    assert [row.get("error") for row in measured[1:]] == [None, "RuntimeError: out of luck", None]
    assert seen == [2, 3, 4]  # reported after each row


def test_what_there_was_no_time_for_is_no_row_but_has_a_name():
    settings = profile.ProfileSettings(**{**OPTIONS, "seconds": -1.0}, methods=["full"], paths=["eager"])
    rows = profile.profile(settings)
    assert len(rows) == 1 and "path" not in rows[0]
    assert profile.not_run(settings, rows) == ["qwen2.5-vl-7b, full, 1.0, eager, batch 2, text 40"]


def test_nothing_is_compiled_before_the_last_eager_row():
    settings = profile.ProfileSettings(
        **{**OPTIONS, "texts": [40, 100]}, methods=["full", "diffprune", "holov"], paths=["fast", "eager"]
    )
    order = [(head["path"], head["num_text"], head["method"]) for head in profile.planned(settings)]
    assert order == [
        (path, text, method)
        for path in ("eager", "fast")
        for text in (40, 100)
        for method in ("full", "diffprune", "holov")
    ]


def test_some_methods_alone_decode_and_run_on_the_eager_path():
    settings = profile.ProfileSettings(
        **OPTIONS, methods=["full", "diffprune", "random"], eager_methods=["full"], decode_methods=["diffprune"]
    )
    rows = profile.profile(settings)[1:]
    assert [(row["path"], row["method"]) for row in rows] == [
        ("eager", "full"), ("fast", "full"), ("fast", "diffprune"), ("fast", "random"),
    ]  # fmt: skip
    assert ["decode_tok_s" in row for row in rows] == [False, False, True, False] and profile.not_run(
        settings, rows
    ) == []


def test_eager_rows_leave_the_fast_ones_their_share_of_the_time(monkeypatch):
    clock = FakeClock()

    def measured(settings: Any, subject: Any, head: Any, *_: Any) -> dict[str, Any]:
        clock.advance(10.0)
        return {"ttft_ms": 1.0}

    monkeypatch.setattr(profile, "measure_method", measured)
    monkeypatch.setattr(profile, "time", clock)
    methods = ["full", "diffprune", "holov", "random"]
    settings = profile.ProfileSettings(**{**OPTIONS, "seconds": 50.0}, methods=methods)
    monkeypatch.setattr(profile, "EAGER_SHARE", 0.5)
    rows = [(row["path"], row["method"]) for row in profile.profile(settings)[1:]]
    assert rows == [("eager", name) for name in methods[:3]] + [("fast", name) for name in methods[:3]]
    clock.now = 0.0
    alone = profile.ProfileSettings(**{**OPTIONS, "seconds": 50.0}, methods=methods, paths=["eager"])
    assert len(profile.profile(alone)[1:]) == 4


def test_a_method_leaves_only_the_shared_weights_to_the_next(subject):
    weights = profile.FastWeights(profile.ProfileSettings(**OPTIONS))
    first, second = (with_method(subject, "diffprune", keep=3, dtype=torch.float32) for _ in range(2))
    shapes = {"batches": [2], "texts": [40], "size": (112, 84)}
    weights.compile(first, **shapes, decode=False)
    assert first.fast.buckets and first.fast.scorer is not None
    weights.compile(second, **shapes, decode=False)
    assert not first.fast.buckets and not first.fast.store.flat and first.fast.scorer is None
    assert second.fast.buckets and second.fast.scorer is not None and second.fast.decoder is first.fast.decoder


def test_kernels_are_listed_after_every_row_was_timed():
    seen: list[list[bool]] = []
    settings = profile.ProfileSettings(**OPTIONS, methods=["full", "random"], decode=False, kernels=2)
    rows = profile.profile(settings, lambda rows: seen.append(["kernels" in row for row in rows[1:]]))
    assert [len(row["kernels"]) for row in rows[1:]] == [len(row["encode_kernels"]) for row in rows[1:]] == [2] * 4
    assert ["pruner_kernels" in row for row in rows[1:]] == [row["method"] == "random" for row in rows[1:]]
    assert all(" ms, " in line for row in rows[1:] for line in row["kernels"])
    assert not any(map(any, seen[:4])) and seen[-1] == [True] * 4


def test_without_decoding_the_fast_path_still_gives_first_tokens(subject):
    settings = profile.ProfileSettings(**OPTIONS, methods=["diffprune"], paths=["fast"], decode=False)
    (row,) = profile.profile(settings)[1:]
    assert row["ttft_ms"] > 0 and "decode_tok_s" not in row and row["kv_bytes"] == row["kv_bytes_predicted"]


def test_each_text_is_compiled_for_its_bucket_alone():
    assert [profile.text_bucket(size, (64, 128)) for size in (40, 64, 65, 300)] == [64, 64, 128, 128]


def test_rows_in_8_bits_say_so_and_where_the_device_has_none_they_are_errors(monkeypatch):
    settings = settings_of(methods="full,feature_norm", text="40", batch="1", paths="fast", keep="64", precision="fp8")
    settings = replace(settings, decode=False, runs=2)
    for row in profile.profile(settings)[1:]:
        assert row["precision"] == "fp8" and "precision 'fp8' was left out, on this device" in row["error"]
    monkeypatch.setattr(build, "why_not_eight_bits", lambda device: "")
    rows = profile.profile(settings)[1:]
    assert [row["precision"] for row in rows] == ["fp8"] * 2 and profile.not_run(settings, rows) == []
    assert all(0.001 < row["logit_error"] < 0.2 and row["graphs"] == "none" for row in rows)
    saved = Results(name="x", command="", commit="", date="", device="CPU", versions={}, seeds=[], rows=rows, notes="")
    assert measured_rows(saved, "fast") == []  # a plan is about the model's own precision
    plain = {key: value for key, value in rows[0].items() if key != "precision"}
    assert len(measured_rows(replace(saved, rows=[plain]), "fast")) == 1


def test_8_bits_leave_fewer_bytes_to_read(subject, monkeypatch):
    monkeypatch.setattr(build, "why_not_eight_bits", lambda device: "")
    vlm = with_method(subject, "feature_norm", keep=3, dtype=torch.float32)
    before = measure.read_bytes(vlm)
    vlm.compile(precision="fp8", text_buckets=(40,), max_new_tokens=1, image_sizes=[(112, 84)])
    text = vlm.base.config.text_config
    assert before - measure.read_bytes(vlm) == 3 * (before // 4 - text.hidden_size * text.vocab_size)


def test_an_unknown_precision_is_refused():
    with pytest.raises(ValueError, match="precision 'int3' is not known; give model or fp8"):
        settings_of(precision="int3")


def settings_of(**changed: Any) -> profile.ProfileSettings:
    options: dict[str, Any] = dict(
        backbone="llava-1.5-7b", random_weights=True, size="tiny", methods="full", keep="64", text="40,100",
        batch="1,32", paths="eager,fast", image="336x336", dtype="", device="cpu", runs=30, text_buckets="",
        seconds=60.0, decode=True, decode_methods="", eager_methods="", kernels=0, precision="model",
    )  # fmt: skip
    return read_settings({**options, **changed})


def test_options_become_settings():
    settings = settings_of(keep="64,0.5", image="1344x896")
    assert settings.texts == [40, 100] and settings.batches == [1, 32] and settings.keeps == [64, 0.5]
    assert settings.image == (1344, 896) and settings.dtype == torch.float32


def test_a_method_is_measured_with_the_options_behind_its_name(subject):
    methods = "full,pyramiddrop[layers=1;ratios=0.5],fastv[layer=1;budget=average]"
    settings = settings_of(methods=methods, eager_methods="pyramiddrop[layers=1;ratios=0.5]")
    assert list(settings.methods) == methods.split(",") and list(settings.eager_methods) == settings.methods[1:2]
    built = with_method(subject, settings.methods[2], keep=0.9, dtype=torch.float32).method
    assert (built.name, built.options.layer, built.options.budget) == ("fastv", 1, "average")


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"methods": "ful"}, "unknown method 'ful'"),
        ({"methods": " , "}, "no method was named"),
        ({"methods": "full,fastv[layr=1]"}, "method 'fastv' has no option 'layr'; did you mean layer"),
        ({"image": "336"}, "image '336' is no size"),
        ({"batch": "0"}, "--batch '0' is no list"),
        ({"text": "x"}, "--text 'x' is no list"),
        ({"paths": "slow"}, "paths 'slow' are not known"),
        ({"size": "huge"}, "size 'huge' is not known"),
        ({"dtype": "int8"}, "dtype 'int8' is not known"),
        ({"keep": "0"}, "keep=0 keeps nothing"),
        ({"keep": "1.0,1"}, "keep=1 is one token and keep=1.0 is all of them"),
        ({"device": "warp"}, "device 'warp' cannot be used here"),
        ({"decode_methods": "holov"}, "--decode-methods names 'holov', which is not measured; there are full"),
        ({"eager_methods": "full,random"}, "--eager-methods names 'random', which is not measured"),
    ],
)
def test_a_wrong_option_is_one_sentence(changed, sentence):
    with pytest.raises(ValueError, match=sentence):
        settings_of(**changed)


def test_the_command_writes_results_and_a_figure(tmp_path: Path, monkeypatch, capsys):
    from diffprune.cli.main import build_app

    out = tmp_path / "ttft.json"
    arguments = "--backbone qwen2.5-vl-7b --random-weights --size tiny --device cpu --image 112x84 --keep 3 --runs 1"
    build_app()(
        args=["profile", *arguments.split(), "--methods", "full", "--paths", "eager", "--out", str(out)],
        standalone_mode=False,
    )
    results = read_results(out)
    assert results.name == "ttft" and results.rows[1]["method"] == "full"
    assert out.with_suffix(".png").exists()
    assert "full" in capsys.readouterr().out
