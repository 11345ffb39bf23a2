"""`diffprune profile` at tiny size on a CPU: every row, both paths, and what happens when something fails."""

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from diffprune.backbones.base import Batch
from diffprune.cli.profile import read_settings
from diffprune.model import PrunedVLM
from diffprune.results import check_rows, read_results
from diffprune.speed import probes, profile, throughput
from diffprune.speed.flops import prefill_flops
from diffprune.speed.probes import EagerProbe, FastProbe, TimedCuts, load_subject, make_batch, with_method
from tests.contracts.vlm import splice_all

OPTIONS: dict[str, Any] = dict(
    backbone="qwen2.5-vl-7b",
    random_weights=True,
    tiny=True,
    image=(112, 84),
    keeps=[3],
    texts=[40],
    batches=[2],
    device="cpu",
    dtype=torch.float32,
    runs=1,
)
METHODS = ["full", "diffprune", "holov", "visionzip", "pyramiddrop"]


@pytest.fixture(scope="module", autouse=True)
def short_measurements():
    """Two decoded tokens and two pictures are enough to see that rows are right."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile, "DECODE_STEPS", 2)
        patch.setattr(profile, "WARM_UP", 1)
        patch.setattr(throughput, "POOL", 2)
        patch.setattr(throughput, "LOOP_SECONDS", 0.0)
        patch.setattr(throughput, "FEWEST_ROUNDS", 3)
        yield


@pytest.fixture(scope="module")
def subject() -> PrunedVLM:
    return load_subject("qwen2.5-vl-7b", random_weights=True, tiny=True, device="cpu", dtype=torch.float32)


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return profile.profile(profile.Settings(**OPTIONS, methods=METHODS, paths=["eager"]))


def batch_of(subject: PrunedVLM, num_text: int = 40, batch: int = 2) -> Any:
    return make_batch(subject, size=(112, 84), num_text=num_text, batch=batch)


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
    text = probes.SHAPES["qwen2.5-vl-7b"](True)[0].text_config
    assert found["full"] * 1e12 == pytest.approx(prefill_flops(text, 52))
    assert found["diffprune"] * 1e12 == pytest.approx(prefill_flops(text, 43))
    assert found["diffprune"] < found["pyramiddrop"] < found["full"]


def test_a_prompt_has_exactly_the_text_tokens_asked_for(subject):
    batch = batch_of(subject, num_text=37)
    ids = batch.features["input_ids"]
    assert ids.shape == (2, 12 + 37)
    assert int((ids == subject.backbone.image_token_id).sum()) == 2 * 12
    assert not torch.equal(*batch.features["pixel_values"].chunk(2))
    with pytest.raises(ValueError, match="5 text tokens are fewer than the prompt's own"):
        batch_of(subject, num_text=5)


def test_a_scorer_without_weights_is_given_some_that_rank(subject):
    vlm = with_method(subject, "diffprune", keep=3, dtype=torch.float32)
    tokens = vlm.encode(batch_of(subject))
    assert tokens is not None
    assert len(vlm.method.score(tokens)[0].unique()) == 12  # type: ignore[operator]


@pytest.mark.parametrize("method", ["diffprune", "visionzip", "pyramiddrop"])
def test_the_eager_probe_answers_as_generate_does(subject, method):
    vlm = with_method(subject, method, keep=3, dtype=torch.float32)
    batch = batch_of(subject)
    probe = EagerProbe(vlm, batch)
    first = probe.ttft()
    probe.start()
    probe.step()
    if method == "pyramiddrop":
        lm = splice_all(vlm, batch, probe.tokens)
        answer = vlm.decoder.generate(lm, probe.counts, max_new_tokens=2)
    else:
        lm = vlm.lm_inputs(batch, vlm.encode(batch))
        answer = vlm.backbone.generate(lm, max_new_tokens=2, min_new_tokens=2, do_sample=False)
    assert first == answer[:, 0].tolist()
    assert probe.token.tolist() == answer[:, 1].tolist()


@pytest.mark.parametrize("backbone", ["llava-1.5-7b", "qwen2.5-vl-7b"])
def test_the_steps_of_the_full_model_are_those_of_the_stock_model_s_generate(backbone):
    full = load_subject(backbone, random_weights=True, tiny=True, device="cpu", dtype=torch.float32)
    batch = batch_of(full, batch=1)
    probe, answer = EagerProbe(full, batch), []
    probe.start()
    for _ in range(4):
        answer.append(probe.token.tolist())
        probe.step()
    settings: dict[str, Any] = dict(max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)
    stock = full.base.generate(**batch.features, **settings, eos_token_id=None)
    assert torch.tensor(answer).T.tolist() == stock[:, -4:].tolist()


def test_every_length_that_is_timed_was_seen_before():
    lengths: list[int] = []

    class Growing(probes.Probe):
        length = 0

        def start(self) -> None:
            self.length = 0

        def step(self) -> None:
            if self.length not in lengths:
                time.sleep(0.02)  # what a kernel prepares for a new shape
            lengths.append(self.length)
            self.length += 1

    first, again = profile.decode_ms(Growing(), "cpu")
    assert first >= 20.0 > again
    assert lengths == 2 * list(range(profile.DECODE_WARM_UP + profile.DECODE_STEPS))


def test_the_stock_model_s_first_token_is_its_own(subject):
    batch = batch_of(subject)
    probe = EagerProbe(subject, batch)
    stock = subject.base.generate(**batch.features, max_new_tokens=1, min_new_tokens=1, do_sample=False, pad_token_id=0)
    assert probe.ttft() == stock[:, -1].tolist()
    assert probe._prefill()[0].tolist() == stock[:, -1].tolist()


def test_both_paths_give_the_same_first_token(subject):
    batch = batch_of(subject)
    vlm = with_method(subject, "diffprune", keep=3, dtype=torch.float32)
    profile.FastWeights(profile.Settings(**OPTIONS)).compile(vlm, batches=[2], texts=[40], decode=True)
    fast, eager = FastProbe(vlm, batch), EagerProbe(vlm, batch)
    assert fast.ttft() == eager.ttft()
    assert fast.num_kept == eager.num_kept == 3 and fast.num_columns > eager.num_columns
    fast.start()
    eager.start()
    fast.step()
    eager.step()
    assert fast.run.token.tolist() == eager.token.tolist()


def test_a_fast_row_says_what_its_bucket_holds(subject):
    settings = profile.Settings(**OPTIONS, methods=["full", "diffprune"], paths=["fast"])
    measured = profile.profile(settings)[1:]
    assert all("error" not in row for row in measured), measured
    for row in measured:
        assert row["num_columns"] == row["num_kept"] + 64  # the smallest bucket for 40 text tokens
        assert row["kv_bytes"] == row["kv_bytes_predicted"] > 0
        assert row["compile_s"] > 0 and row["graphs"] == "none"


def test_timed_cuts_choose_what_the_method_chooses_and_keep_the_time(subject):
    vlm = with_method(subject, "pyramiddrop", keep=3, dtype=torch.float32)
    probe = EagerProbe(vlm, batch_of(subject))
    assert isinstance(probe.cuts, TimedCuts)
    probe._prefill()
    assert probe.cuts.take_ms() > 0
    assert probe.cuts.take_ms() == 0


def test_a_method_that_fails_is_a_row_and_the_run_goes_on(monkeypatch):
    real = profile.with_method

    def broken(subject: PrunedVLM, name: str, **options: Any) -> PrunedVLM:
        if name == "holov":
            raise RuntimeError("out of luck\nand a long trace")
        return real(subject, name, **options)

    monkeypatch.setattr(profile, "with_method", broken)
    seen: list[int] = []
    settings = profile.Settings(**OPTIONS, methods=["full", "holov", "random"], paths=["eager"])
    measured = profile.profile(settings, lambda rows: seen.append(len(rows)))
    assert [row.get("error") for row in measured[1:]] == [None, "RuntimeError: out of luck", None]
    assert seen == [2, 3, 4]  # told after each row


def test_what_there_was_no_time_for_is_no_row_but_has_a_name():
    settings = profile.Settings(**{**OPTIONS, "seconds": 1e-6}, methods=["full"], paths=["eager"])
    rows = profile.profile(settings)
    assert len(rows) == 1 and "path" not in rows[0]
    assert profile.not_run(settings, rows) == ["qwen2.5-vl-7b, full, 1.0, eager, batch 2, text 40"]


def test_nothing_is_compiled_before_the_last_eager_row():
    settings = profile.Settings(
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
    settings = profile.Settings(
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
    now = [0.0]

    def measured(settings: Any, subject: Any, head: Any, *_: Any) -> dict[str, Any]:
        now[0] += 10.0
        return {"ttft_ms": 1.0}

    monkeypatch.setattr(profile, "measure_method", measured)
    monkeypatch.setattr(profile.time, "monotonic", lambda: now[0])
    methods = ["full", "diffprune", "holov", "random"]
    settings = profile.Settings(**{**OPTIONS, "seconds": 50.0}, methods=methods)
    monkeypatch.setattr(profile, "EAGER_SHARE", 0.5)
    rows = [(row["path"], row["method"]) for row in profile.profile(settings)[1:]]
    assert rows == [("eager", name) for name in methods[:3]] + [("fast", name) for name in methods[:3]]
    now[0] = 0.0
    alone = profile.Settings(**{**OPTIONS, "seconds": 50.0}, methods=methods, paths=["eager"])
    assert len(profile.profile(alone)[1:]) == 4


def test_a_method_leaves_only_the_shared_weights_to_the_next(subject):
    weights = profile.FastWeights(profile.Settings(**OPTIONS))
    first, second = (with_method(subject, "diffprune", keep=3, dtype=torch.float32) for _ in range(2))
    weights.compile(first, batches=[2], texts=[40], decode=False)
    assert first.fast.buckets and first.fast.scorer is not None
    weights.compile(second, batches=[2], texts=[40], decode=False)
    assert not first.fast.buckets and not first.fast.store.flat and first.fast.scorer is None
    assert second.fast.buckets and second.fast.scorer is not None and second.fast.decoder is first.fast.decoder


def test_kernels_are_listed_after_every_row_was_timed():
    seen: list[list[bool]] = []
    settings = profile.Settings(**OPTIONS, methods=["full", "random"], decode=False, kernels=2)
    rows = profile.profile(settings, lambda rows: seen.append(["kernels" in row for row in rows[1:]]))
    assert [len(row["kernels"]) for row in rows[1:]] == [2] * 4
    assert all(" ms, " in line for row in rows[1:] for line in row["kernels"])
    assert not any(map(any, seen[:4])) and seen[-1] == [True] * 4


def test_without_decoding_the_fast_path_still_gives_first_tokens(subject):
    settings = profile.Settings(**OPTIONS, methods=["diffprune"], paths=["fast"], decode=False)
    (row,) = profile.profile(settings)[1:]
    assert row["ttft_ms"] > 0 and "decode_tok_s" not in row and row["kv_bytes"] == row["kv_bytes_predicted"]


def test_each_text_is_compiled_for_its_bucket_alone():
    assert [profile.text_bucket(size, (64, 128)) for size in (40, 64, 65, 300)] == [64, 64, 128, 128]


def test_notes_name_what_is_missing_until_it_is_measured(tmp_path: Path):
    out = tmp_path / "ttft.json"
    first, second = (
        {"backbone": "x", "method": "full", "keep": 1.0, "path": "fast", "batch": 1, "num_text": text}
        for text in (40, 100)
    )
    third = {**second, "method": "holov"}
    missing = [profile.in_words(second), profile.in_words(third)]
    profile.save(out, [{**first, "ttft_ms": 1.0}], device="cpu", commit="c", missing=missing)
    earlier = read_results(out)
    assert earlier.notes.endswith(f"{profile.NOT_RUN}{missing[0]}; {missing[1]}.")
    profile.save(out, [{**second, "ttft_ms": 1.0}], device="cpu", commit="c", earlier=earlier)
    assert read_results(out).notes.endswith(f"{profile.NOT_RUN}{missing[1]}.")


def test_kernels_of_a_prefill_are_listed(subject):
    probe = EagerProbe(subject, batch_of(subject))
    listed = profile.slowest_kernels(probe.stages["prefill"], 3, "cpu")
    assert len(listed) == 3 and " ms, " in listed[0]


def test_bars_add_up_to_the_time_to_first_token(tmp_path: Path):
    row = {"method": "full", "path": "eager", "batch": 1, "num_text": 40, "encode_ms": 2.0, "prefill_ms": 5.0}
    parts = profile.bar_parts({**row, "ttft_ms": 8.0})
    assert sum(parts.values()) == 8.0 and parts["rest_ms"] == 1.0
    profile.draw_bars([{**row, "ttft_ms": 8.0}, {**row, "error": "none"}], tmp_path / "bars.png")
    assert (tmp_path / "bars.png").stat().st_size > 1000
    profile.draw_bars([{**row, "error": "none"}], tmp_path / "nothing.png")
    assert not (tmp_path / "nothing.png").exists()


def test_the_floor_is_the_longer_of_reading_and_computing():
    hardware = profile.Hardware(bandwidth=1e12, rate=1e14)
    assert hardware.floor_ms(2e9, 1e10) == pytest.approx(2.0)
    assert hardware.floor_ms(2e9, 1e12) == pytest.approx(10.0)


def test_new_rows_join_those_of_the_same_code_and_device(tmp_path: Path):
    out = tmp_path / "ttft.json"
    row = {"backbone": "x", "method": "full", "keep": 1.0, "path": "eager", "batch": 1, "num_text": 40}
    assert profile.read_earlier(out, device="cpu", commit="c1") is None
    profile.save(out, [{**row, "ttft_ms": 1.0}, {**row, "batch": 2, "ttft_ms": 2.0}], device="cpu", commit="c1")
    earlier = profile.read_earlier(out, device="cpu", commit="c1")
    profile.save(out, [{**row, "ttft_ms": 3.0}], device="cpu", commit="c1", earlier=earlier)
    assert [item["ttft_ms"] for item in read_results(out).rows] == [2.0, 3.0]  # measured again, so replaced
    device = {"name": "device and weights", "backbone": "x", "copy_gb_s": 1.0}
    earlier = profile.read_earlier(out, device="cpu", commit="c1")
    for _ in range(2):  # a run saves after every row
        profile.save(out, [device, {**row, "ttft_ms": 4.0}], device="cpu", commit="c1", earlier=earlier)
    earlier = profile.read_earlier(out, device="cpu", commit="c1")
    profile.save(out, [device, {**row, "ttft_ms": 5.0}], device="cpu", commit="c1", earlier=earlier)
    assert [item.get("ttft_ms") for item in read_results(out).rows] == [2.0, None, None, 5.0]  # one device row a run
    with pytest.raises(ValueError, match="is of commit c1, not c2: leave --append out"):
        profile.read_earlier(out, device="cpu", commit="c2")


# --- the closed loop --------------------------------------------------------------------------------------------------


def test_the_loop_compares_with_the_full_model():
    settings = profile.Settings(**{**OPTIONS, "batches": [1, 2]}, methods=["full", "diffprune"], paths=["fast"])
    measured = throughput.throughput(settings)
    check_rows(measured)
    assert len(measured) == 4 and not any("error" in row for row in measured), measured
    for row in measured:
        assert row["requests"] == row["batch"] * throughput.FEWEST_ROUNDS
        assert row["ttft_ms"] <= row["ttft_p99_ms"]
        assert row["requests_s"] > 0 and ("speedup" in row)


def test_the_page_has_the_command_that_measured_the_loop():
    root = Path(__file__).parents[2]
    recorded = re.sub(r"--commit \S+|--out \S+", "", read_results(root / "results" / "throughput.json").command)
    (told,) = (line for line in (root / "docs" / "profile.md").read_text().splitlines() if " --throughput " in line)
    assert sorted(re.sub(r"--out \S+", "", told).split()) == sorted(recorded.split())


def test_a_percentile_is_a_measured_value():
    assert throughput.percentile([1.0, 2.0, 3.0], 0.99) == 3.0
    assert throughput.percentile([float(i) for i in range(1, 201)], 0.99) == 198.0
    assert throughput.percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.0 and throughput.percentile([1.0, 2.0], 0.0) == 1.0


def test_every_round_of_the_loop_waits_for_its_answer(monkeypatch):
    monkeypatch.setattr(throughput, "ROUNDS", 5)
    monkeypatch.setattr(throughput, "FEWEST_ROUNDS", 5)
    rounds = throughput.closed_loop(lambda batch: time.sleep(0.002), [Batch(features={})] * 2, "cpu")
    assert len(rounds) == 5 and min(rounds) >= 2.0


# --- the command ------------------------------------------------------------------------------------------------------


def settings_of(**changed: Any) -> profile.Settings:
    options: dict[str, Any] = dict(
        backbone="llava-1.5-7b", random_weights=True, size="tiny", methods="full", keep="64", text="40,100",
        batch="1,32", paths="eager,fast", image="336x336", dtype="", device="cpu", runs=30, text_buckets="",
        seconds=60.0, decode=True, decode_methods="", eager_methods="", kernels=0,
    )  # fmt: skip
    return read_settings(**{**options, **changed})


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


def test_random_weights_are_there_for_known_sizes_alone():
    options: dict[str, Any] = dict(random_weights=True, tiny=True, device="cpu", dtype=torch.float32)
    with pytest.raises(ValueError, match="'mystery' is not known; random weights are there for llava"):
        load_subject("mystery", **options)
    with pytest.raises(
        ValueError, match=r"'qwen3-vl-2b' is known, but its size cannot be built .* leave --random-weights"
    ):
        load_subject("qwen3-vl-2b", **options)
    with pytest.raises(ValueError, match=r"7.1 billion parameters and there is no GPU .* 26 GiB .* --size tiny"):
        load_subject("llava-1.5-7b", **{**options, "tiny": False})


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
