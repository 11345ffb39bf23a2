"""`diffprune plan`: counts that are exact, predictions that follow the roofline, and what was measured beside them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diffprune.methods.base import LayerPruner
from diffprune.registry import METHODS
from diffprune.results import Results, read_results
from diffprune.speed import accuracy, calibrate, plan, refit
from diffprune.speed.gpus import GPUS, find_gpu, gpu_of_device
from diffprune.speed.roofline import CURVES, Calibration, Curve, Work, fit_curve, read_calibration

TRUE = Curve(most=0.7, half=60.0, bandwidth=0.85, launch_us=30.0)
H200 = GPUS["h200"]


MEASURED = sorted((Path(__file__).parents[2] / "results").glob("ttft*.json"))


def results_of(rows: list[dict[str, Any]], device: str = "NVIDIA H200") -> Results:
    return Results(
        name="ttft", command="", commit="", date="", device=device, versions={}, seeds=[], rows=rows, notes=""
    )


def rows_from(calibration: Calibration) -> list[dict[str, Any]]:
    """What a profile would have measured, were the roofline exact."""
    model = plan.describe("llava-1.5-7b")
    rows = []
    for method, num_kept in (("full", 576), ("diffprune", 128), ("diffprune", 64), ("holov", 32)):
        for batch in (1, 8, 32):
            columns = num_kept + 64
            rows.append(
                {
                    "method": method, "backbone": "llava-1.5-7b", "path": "fast", "batch": batch, "num_text": 40,
                    "num_visual": 576, "num_kept": num_kept, "num_columns": columns, "splice_ms": 0.1,
                    "encode_ms": calibration.vision.ms(plan.vision_work(model, 576, batch), H200),
                    "prefill_ms": calibration.prefill.ms(plan.prefill_work(model, columns, batch), H200),
                }
            )  # fmt: skip
            rows[-1]["ttft_ms"] = 0.5 + rows[-1]["encode_ms"] + rows[-1]["prefill_ms"] + 0.1
    return rows


# --- the roofline -----------------------------------------------------------------------------------------------------


def test_little_work_waits_for_memory_and_much_for_the_multipliers():
    curve = Curve(most=0.5, half=100.0, bandwidth=0.8, launch_us=10.0)
    read = curve.ms(Work(flops=1e9, read=4.8e9 * 0.8, tokens=1, layers=32), H200)
    assert read == pytest.approx(1.0 + 0.32)
    busy = curve.ms(Work(flops=989.5e12 * 0.25, read=1, tokens=100, layers=0), H200)
    assert busy == pytest.approx(1000.0)


def test_efficiency_rises_with_the_tokens_and_levels_off():
    assert TRUE.efficiency(60) == pytest.approx(0.35)
    assert TRUE.efficiency(10) < TRUE.efficiency(100) < TRUE.efficiency(10**6) == pytest.approx(0.7, rel=1e-3)


def test_a_fit_finds_the_times_it_was_given():
    works = [
        Work(flops=tokens * 1.3e10, read=1.3e10, tokens=tokens, layers=32) for tokens in (40, 104, 640, 3000, 20000)
    ]
    fitted = fit_curve([(work, TRUE.ms(work, H200)) for work in works], H200)
    for work in works:
        assert fitted.ms(work, H200) == pytest.approx(TRUE.ms(work, H200), rel=0.05)


def test_too_few_rows_fix_no_curve():
    with pytest.raises(ValueError, match="1 measured rows cannot fix a curve"):
        fit_curve([(Work(flops=1, read=1, tokens=1, layers=1), 1.0)], H200)


# --- cards ------------------------------------------------------------------------------------------------------------


def test_an_unknown_card_is_answered_with_the_known_ones_and_a_way_out():
    with pytest.raises(
        ValueError, match=r"'h300' is not known \(did you mean h200 or .*there are b200, h200.*--tflops, --bandwidth"
    ):
        find_gpu("h300")
    own = find_gpu("h300", tflops=100, bandwidth=1000, memory=48)
    assert (own.tflops, own.bandwidth, own.memory) == (100, 1000, 48)
    with pytest.raises(ValueError, match="no card was named"):
        find_gpu(None, tflops=100)
    with pytest.raises(ValueError, match="numbers are above 0"):
        find_gpu("h200", tflops=-1)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("rtx4090", "rtx-4090"),
        ("4090", "rtx-4090"),
        ("H200 SXM", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("a100_40", "a100-40"),
        ("H100", "h100"),
        ("V100 SXM2 32GB", "v100"),
    ],
)
def test_a_card_may_be_named_loosely_where_that_is_one_card(name: str, key: str):
    assert find_gpu(name) == GPUS[key]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("A100", r"'A100' is more than one \(did you mean a100-80 or a100-40\?\)"),
        ("H200 NVL", r"'H200 NVL' is not known \(did you mean h200"),
        ("RTX 4090 Laptop", r"'RTX 4090 Laptop' is not known \(did you mean rtx-4090"),
        ("l40", r"'l40' is not known \(did you mean l40s"),
        ("", "the card '' is not known; there are"),
    ],
)
def test_a_name_of_several_cards_or_of_none_is_answered_with_the_nearest(name: str, sentence: str):
    with pytest.raises(ValueError, match=sentence):
        find_gpu(name)


def test_a_datasheet_number_can_be_replaced_by_a_measured_one():
    assert find_gpu("H200", bandwidth=4300).bandwidth == 4300
    assert find_gpu("RTX 4090").memory == 24


@pytest.mark.parametrize(
    ("device", "key"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L40", None),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA A100 80GB PCIe", None),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 NVL", None),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("Tesla V100-SXM2-16GB", None),
        ("Tesla T4", "t4"),
        ("CPU some cores", None),
    ],
)
def test_a_results_file_s_device_is_found_among_the_cards(device, key):
    assert gpu_of_device(device) == key


# --- the plan ---------------------------------------------------------------------------------------------------------


def test_counts_of_a_plan_are_the_model_s_own():
    full, pruned, gain = plan.plan("qwen2.5-vl-7b", H200, image=(1344, 896), keep=0.1111, batch=8)
    assert full["num_visual"] == full["num_kept"] == 1344 // 28 * 896 // 28
    assert pruned["num_kept"] == 171
    assert gain["tflops"] == pytest.approx(full["tflops"] / pruned["tflops"])
    assert full["kv_mb"] == pytest.approx(8 * (1536 + 64 + 32) * 28 * 2 * 4 * 128 * 2 / 1e6)


def test_fewer_tokens_are_sooner_and_more_requests_fit():
    full, pruned, _ = plan.plan("llava-1.5-7b", H200, image=(336, 336), keep=64)
    assert pruned["prefill_ms"] < full["prefill_ms"] and pruned["ttft_ms"] < full["ttft_ms"]
    assert pruned["largest_batch"] > full["largest_batch"] > 0 and pruned["requests_s"] > full["requests_s"]
    assert full["pruner_ms"] == 0 < pruned["pruner_ms"]
    keys = ("encode_ms", "pruner_ms", "splice_ms", "prefill_ms")
    assert pruned["ttft_ms"] == pytest.approx(sum(pruned[key] for key in keys) + plan.CALIBRATIONS["fast"].host_ms)


@pytest.mark.parametrize(
    ("size", "tiles", "newlines"), [((672, 672), 5, 48), ((1344, 672), 3, 24), ((600, 400), 5, 32)]
)
def test_tiles_newlines_and_padding_of_a_large_picture_are_counted(
    size: tuple[int, int], tiles: int, newlines: int
) -> None:
    model = plan.describe("llava-next-7b")
    counts = model.count(size)
    assert counts.encoded == tiles * 576 and counts.newlines == newlines
    assert counts.visual == 576 + newlines * (48 if newlines > 24 or size[0] > size[1] else 24)
    full, pruned, _ = plan.plan("llava-next-7b", H200, image=size, keep=320)
    assert pruned["num_kept"] == 320 and full["num_kept"] == counts.visual
    # the newlines of rows that keep a token go on with them
    assert pruned["tflops"] == pytest.approx(plan.prefill_flops(model.text, 320 + newlines + 40) / 1e12)


def test_a_prompt_takes_at_least_the_time_to_read_the_weights():
    model = plan.describe("llava-1.5-7b")
    least = plan.decoder_weights(model.text) * 2 / (H200.bandwidth * 1e9) * 1e3
    counts = plan.Counts(visual=576, newlines=0, encoded=576)
    for path, calibration in plan.CALIBRATIONS.items():
        kept: dict[str, Any] = dict(counts=counts, num_kept=1, num_text=1, batch=1, path=path)
        assert plan.predict(model, H200, calibration, **kept)["prefill_ms"] > least


def test_a_model_too_large_for_a_card_serves_nothing():
    full, pruned, _ = plan.plan("qwen2.5-vl-32b", GPUS["t4"], image=(336, 336), keep=64)
    assert full["largest_batch"] == pruned["largest_batch"] == 0 and full["requests_s"] == 0
    assert "ttft_ms" not in full and "ttft_ms" not in pruned


def test_a_batch_that_does_not_fit_has_counts_and_a_sentence_but_no_times():
    card = GPUS["rtx-4090"]
    largest = [row["largest_batch"] for row in plan.plan("llava-1.5-7b", card, image=(336, 336), keep=64)[:2]]
    assert 1 < largest[0] < largest[1]
    rows = plan.plan("llava-1.5-7b", card, image=(336, 336), keep=64, batch=largest[0] + 1)
    full, pruned, gain = rows
    assert not {"encode_ms", "prefill_ms", "ttft_ms"} & set(full) and full["kv_mb"] > 0 and full["requests_s"] > 0
    assert pruned["ttft_ms"] > 0 and "ttft_ms" not in gain and gain["kv_mb"] > 1
    (said,) = plan.remarks(rows, 64, card)
    assert said.startswith(
        f"A batch of {largest[0] + 1} does not fit into 24 GB with the full model, so it has no times"
    )
    assert said.endswith(f"the largest that fits is {largest[0]}.")
    assert plan.remarks(plan.plan("llava-1.5-7b", card, image=(336, 336), keep=576), 576, card) == []


def test_text_is_padded_to_a_bucket_on_the_fast_path_alone():
    assert [plan.padded_text(n, "fast") for n in (1, 64, 65, 128, 300)] == [64, 64, 128, 128, 300]
    assert plan.padded_text(40, "eager") == 40
    assert [plan.padded_text(n, "fast", (100, 40)) for n in (1, 41, 101)] == [40, 100, 101]


def test_an_unknown_model_is_one_sentence():
    with pytest.raises(ValueError, match="backbone 'mystery' is not known; give one of llava"):
        plan.plan("mystery", H200, image=(336, 336), keep=64)
    with pytest.raises(ValueError, match="'idefics3-8b' is known, but there is no shape for a plan yet; give one of"):
        plan.plan("idefics3-8b", H200, image=(336, 336), keep=64)
    with pytest.raises(ValueError, match="each must be 1 or more"):
        plan.plan("llava-1.5-7b", H200, image=(336, 336), keep=64, batch=0)


def test_layers_that_hold_fewer_tokens_are_less_work():
    model = plan.describe("llava-1.5-7b")
    whole = plan.prefill_work(model, 616, 2)
    head = 2 * 2 * model.text.hidden_size * model.text.vocab_size  # of two prompts
    (even,) = plan.dropping_work(model, [616] * 32, 2)
    assert even.flops == whole.flops - head and (even.tokens, even.layers) == (whole.tokens, whole.layers)
    first, rest = plan.dropping_work(model, [616] * 2 + [104] * 30, 2)
    assert (first.layers, rest.layers) == (2, 30) and (first.tokens, rest.tokens) == (1232, 208)
    assert first.read + rest.read == even.read and first.flops + rest.flops < even.flops / 4


INSIDE = [name for name in METHODS.names() if issubclass(METHODS.get(name), LayerPruner)]


@pytest.mark.parametrize("method", INSIDE)
def test_every_method_inside_the_language_model_has_a_prediction(method: str):
    row = {
        "method": method, "backbone": "llava-1.5-7b", "path": "fast", "batch": 1, "keep": 64, "num_visual": 576,
        "num_columns": 616, "prefill_ms": 6.0,
    }  # fmt: skip
    calibration = plan.CALIBRATIONS["fast"]
    whole = calibration.prefill.ms(plan.prefill_work(plan.describe("llava-1.5-7b"), 616, 1), H200)
    assert 0 < calibrate.predicted_prefill(row, calibration, H200) < whole


# --- measured rows ----------------------------------------------------------------------------------------------------


def test_a_calibration_reproduces_the_rows_it_was_fitted_to(tmp_path):
    true = Calibration(
        prefill=TRUE, vision=Curve(most=0.5, half=300.0, bandwidth=0.8, launch_us=20.0), host_ms=0.5, source="made"
    )
    results = results_of(rows_from(true))
    fitted = calibrate.calibrate([results], "fast")
    compared = calibrate.compare(results, fitted, H200, "fast")
    assert len(compared) == 12
    for row in compared:
        assert row["predicted_over_measured"] == pytest.approx(1.0, abs=0.1)
    assert fitted.host_ms == pytest.approx(0.5)
    assert fitted.source == "fitted to 12 measured rows, NVIDIA H200"
    (path := tmp_path / "curves.json").write_text(calibrate.as_json(fitted))
    again = read_calibration(path)
    assert again.prefill.most == pytest.approx(fitted.prefill.most, rel=1e-2) and again.card == H200
    assert again.towers == {"llava": pytest.approx(1.0, abs=0.05)} and again.scorers == {}


def test_a_family_s_tower_and_scorer_are_told_apart_from_the_curve():
    rows = rows_from(Calibration(prefill=TRUE, vision=TRUE, host_ms=0.0, source="made"))
    model = plan.describe("qwen2.5-vl-7b")
    tower = TRUE.ms(plan.vision_work(model, 1296, 1), H200)
    scorer = TRUE.ms(plan.scorer_work(model, 1296, 1), H200)
    slow = {
        **rows[3],
        "backbone": "qwen2.5-vl-7b",
        "num_visual": 1296,
        "encode_ms": 1.5 * tower,
        "pruner_ms": 2 * scorer,
    }
    fitted = calibrate.calibrate([results_of([*rows, slow])], "fast")
    assert fitted.towers == {"llava": pytest.approx(1.0, abs=0.1), "qwen2_5_vl": pytest.approx(1.5, abs=0.2)}
    assert fitted.scorers == {"qwen2_5_vl": pytest.approx(2.0, abs=0.4)}
    assert fitted.tower_ms("qwen2_5_vl", plan.vision_work(model, 1296, 1), H200) == pytest.approx(1.5 * tower, rel=0.1)
    unknown = fitted.tower_ms("llava_next", plan.vision_work(model, 1296, 1), H200)
    assert tower < unknown < 1.5 * tower  # a family that was not measured takes the mean


def test_eight_bits_are_half_of_the_bytes_at_twice_the_rate():
    model = plan.describe("llava-1.5-7b")
    plain, half = plan.prefill_work(model, 616, 1), plan.prefill_work(model, 616, 1, fp8=True)
    assert half.flops == pytest.approx(plain.flops / 2, rel=0.01) and half.tokens == plain.tokens
    assert half.read == pytest.approx(plain.read / 2, rel=0.03) and half.read > plain.read / 2  # the head stays
    rows = rows_from(Calibration(prefill=TRUE, vision=TRUE, host_ms=0.0, source="made"))
    eight = {**rows[0], "precision": "fp8", "num_columns": 616, "prefill_ms": TRUE.ms(half, H200)}
    found = [results_of([*rows, eight])]
    assert calibrate.held_out(found, "fast", H200)[-1]["prefill"] == pytest.approx(1.0, abs=0.15)
    assert calibrate.calibrate(found, "fast").source.startswith("fitted to 13 measured rows")
    other = results_of([{**rows[0], "precision": "int4"}])
    assert not calibrate.even_rows(other, "fast")


def test_rows_are_predicted_by_all_the_others_where_there_are_enough():
    rows = rows_from(Calibration(prefill=TRUE, vision=TRUE, host_ms=0.0, source="made"))
    left_out = [one["prefill"] for one in calibrate.held_out([results_of(rows)], "fast", H200)]
    assert left_out == pytest.approx([1.0] * 12, abs=0.15)
    rows[0]["prefill_ms"] *= 2  # which the others know nothing of
    same = {**rows[0], "method": "holov"}  # nor of another method's row of the same shape
    left_out = calibrate.held_out([results_of([*rows, same])], "fast", H200)
    assert [left_out[0]["prefill"], left_out[-1]["prefill"]] == pytest.approx([0.5, 0.5], abs=0.1)
    assert calibrate.held_out([results_of(rows[:4])], "fast", H200) == [{}] * 4


@pytest.mark.skipif(not MEASURED, reason="results/ttft.json is not there: diffprune profile on a GPU writes it")
def test_the_curves_are_fitted_to_all_that_was_measured():
    found = [read_results(path) for path in MEASURED]
    assert CURVES.read_text() == calibrate.as_json(calibrate.calibrate(found, "fast"))


def test_rows_that_drop_inside_the_language_model_are_left_out():
    rows = rows_from(Calibration(prefill=TRUE, vision=TRUE, host_ms=0.0, source="made"))
    inside = {**rows[0], "method": "pyramiddrop"}
    failed = {"method": "full", "backbone": "llava-1.5-7b", "path": "fast", "batch": 1, "error": "no"}
    assert len(calibrate.even_rows(results_of([*rows, inside, failed]), "fast")) == 12
    assert calibrate.measured_rows(results_of(rows), "eager") == []


def test_rows_of_an_unknown_card_need_its_name():
    rows = rows_from(Calibration(prefill=TRUE, vision=TRUE, host_ms=0.0, source="made"))
    with pytest.raises(ValueError, match="name it with --gpu"):
        calibrate.calibrate([results_of(rows, device="CPU")], "fast")


@pytest.mark.skipif(not MEASURED, reason="results/ttft.json is not there: diffprune profile on a GPU writes it")
@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.stem)
def test_the_plan_is_within_a_quarter_of_every_measured_fast_prefill(path: Path):
    results = read_results(path)
    key = gpu_of_device(results.device)
    assert key is not None
    compared = calibrate.compare(results, plan.CALIBRATIONS["fast"], GPUS[key], "fast")
    assert compared
    far = [row for row in compared if not 0.75 <= row["predicted_over_measured"] <= 1.25]
    assert not far, far


@pytest.mark.skipif(not MEASURED, reason="results/ttft.json is not there: diffprune profile on a GPU writes it")
def test_the_page_tells_how_far_the_plan_is_from_what_was_measured():
    page = (Path(__file__).parents[2] / "docs" / "profile.md").read_text()
    assert accuracy.refresh(page, [read_results(path) for path in MEASURED]) == page


def test_a_plan_is_compared_at_the_shapes_that_were_measured():
    counts = plan.describe("llava-1.5-7b").count((336, 336))
    predicted = plan.predict(
        plan.describe("llava-1.5-7b"), H200, plan.CALIBRATIONS["fast"], counts=counts, num_kept=64, num_text=40,
        batch=1, text_buckets=(40, 100),
    )  # fmt: skip
    row = {
        "method": "diffprune", "backbone": "llava-1.5-7b", "path": "fast", "batch": 1, "num_text": 40, "keep": 64,
        "num_visual": 576, "num_kept": 64, "num_columns": 104, **predicted,
    }  # fmt: skip
    rows = [{**row, "pruner_ms": 2 * predicted["pruner_ms"]}, {**row, "method": "holov"}, {**row, "error": "no"}]
    results = replace(results_of(rows[:2]), command="diffprune profile --text-buckets 40,100 --out x")
    stages, others = accuracy.accuracy([results], "fast").split("\n\n")
    assert stages.splitlines()[-1].endswith("| 1.00 to 1.00 | 0.50 to 0.50 | 1.00 to 1.00 | 1.00 to 1.00 | - |")
    assert others.splitlines()[-1] == "| llava-1.5-7b, 64 tokens | 1 | 1.00 to 1.00 |"
    with pytest.raises(ValueError, match="no row of the eager path to compare with"):
        accuracy.accuracy([results], "eager")
    with pytest.raises(ValueError, match="between which the tables go"):
        accuracy.refresh("no markers", [results])


# --- the command ------------------------------------------------------------------------------------------------------


def run(*arguments: str) -> None:
    from diffprune.cli.main import build_app

    build_app()(args=["plan", *arguments], standalone_mode=False)


def test_the_command_prints_full_and_pruned(capsys):
    run("--backbone", "qwen2.5-vl-7b", "--image", "1344x896", "--keep", "0.1111", "--batch", "8", "--gpu", "h200")
    out = capsys.readouterr().out
    assert "1,536 tokens" in out and "speedup" in out and "8.29 B parameters" in out
    full, pruned = [line.split() for line in out.splitlines() if line.startswith("H200")]
    assert full[:4] == ["H200", "fitted", "8", "1,536"] and pruned[:4] == ["H200", "fitted", "8", "171"]
    assert max(map(len, out.splitlines())) <= 80
    assert f"Efficiency curves: {plan.CALIBRATIONS['fast'].source}." in out  # a guess must not look measured


def test_several_cards_budgets_and_batches_are_one_table(capsys):
    run("--keep", "64,32", "--batch", "1,8", "--gpu", "h200,a100-80", "--json")
    found = json.loads(capsys.readouterr().out)
    keys = [(row["card"], row["batch"], row["kept"]) for row in found["rows"]]
    assert keys == [
        (card, batch, kept) for card in ("H200", "A100 80 GB") for batch in (1, 8) for kept in (576, 64, 32)
    ]
    assert {row["card"]: row["times"] for row in found["rows"]} == {"H200": "fitted", "A100 80 GB": "extrapolated"}
    for full, pruned in zip(found["rows"][::3], found["rows"][1::3], strict=True):
        assert pruned["speedup"] == pytest.approx(full["ttft_ms"] / pruned["ttft_ms"]) and "speedup" not in full
        assert pruned["decode_tok_s"] > full["decode_tok_s"] > 0
    alone = plan.plan("llava-1.5-7b", GPUS["a100-80"], image=(336, 336), keep=32, batch=8)[1]
    assert found["rows"][-1]["ttft_ms"] == alone["ttft_ms"]
    with pytest.raises(ValueError, match="are of one card"):
        run("--keep", "64", "--gpu", "h200,a100-80", "--memory", "40")


def test_times_say_what_they_rest_on():
    fast, eager = plan.CALIBRATIONS["fast"], plan.CALIBRATIONS["eager"]
    assert fast.basis(H200) == "fitted" and fast.basis(GPUS["t4"]) == "extrapolated" and eager.basis(H200) == "assumed"
    assert fast.basis(replace(H200, tflops=500.0)) == "extrapolated"  # a card that is not as it was


def test_the_command_pads_the_text_to_the_buckets_it_is_given(capsys):
    found = []
    for more in ([], ["--text-buckets", "40,100"]):
        run("--keep", "64", "--gpu", "h200", "--json", *more)
        found.append(json.loads(capsys.readouterr().out)["rows"][1])
    assert found[0]["kv_mb"] / found[1]["kv_mb"] == pytest.approx((64 + 64 + 32) / (64 + 40 + 32))
    with pytest.raises(ValueError, match="--text-buckets 'x' is no list"):
        run("--keep", "64", "--gpu", "h200", "--text-buckets", "x")


def test_the_command_says_how_far_off_it_was(tmp_path, capsys):
    from diffprune.results import write_results

    rows = [row | {"keep": row["num_kept"]} for row in rows_from(plan.CALIBRATIONS["fast"])]
    write_results(tmp_path / "ttft.json", name="ttft", rows=rows, device="NVIDIA H200", command="diffprune profile")
    run("--against", str(tmp_path / "ttft.json"))
    assert "| llava-1.5-7b, all tokens, batch 8 | 1 | 1.00 to 1.00 | - | 1.00 to 1.00 |" in capsys.readouterr().out
    run("--against", str(tmp_path / "ttft.json"), "--json")
    found = json.loads(capsys.readouterr().out)["stages"]
    (row,) = [row for row in found if row["the plan's rows"] == "llava-1.5-7b, all tokens, batch 8"]
    assert row["prefill"] == pytest.approx([1.0, 1.0]) and row["pruner"] == []
    with pytest.raises(ValueError, match="no card was named"):  # half a datasheet is not passed over
        run("--against", str(tmp_path / "ttft.json"), "--tflops", "100")
    with pytest.raises(ValueError, match="drop --calibrate"):
        run("--against", str(tmp_path / "ttft.json"), "--calibrate", str(tmp_path / "ttft.json"))


@pytest.mark.parametrize("option", ["--against", "--calibrate"])
def test_what_was_measured_at_tiny_size_is_refused(tmp_path, option):
    from diffprune.results import write_results

    rows = [row | {"keep": row["num_kept"]} for row in rows_from(plan.CALIBRATIONS["fast"])]
    command = "diffprune profile --out x && diffprune profile --random-weights --size tiny --append --out x"
    write_results(tmp_path / "ttft.json", name="ttft", rows=rows, device="NVIDIA H200", command=command)
    with pytest.raises(ValueError, match=r"ttft\.json was made at tiny size.*without --size tiny"):
        run("--gpu", "h200", option, str(tmp_path / "ttft.json"))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda row: row.pop("ttft_ms"), "has a row of '.*' without a measured ttft_ms; give a file as"),
        (lambda row: row.update(encode_ms=0), "has a row of '.*' without a measured encode_ms; give a file as"),
        (lambda row: row.update(prefill_ms=0.0), "has a row of '.*' without a measured prefill_ms; give a file as"),
        (lambda row: row.update(path="eager"), "0 measured rows cannot fix a curve of 4 constants"),
        (None, "is not JSON"),
    ],
)
def test_curves_are_not_fitted_to_what_is_damaged(
    damage: Any, sentence: str, tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = json.loads((root / "results" / "ttft.json").read_text(encoding="utf-8"))
    for row in measured["rows"]:
        if "prefill_ms" in row and damage is not None:
            damage(row)
    file, curves = tmp_path / "ttft.json", tmp_path / "curves.json"
    text = json.dumps(measured)
    file.write_text(text if damage is not None else text[:5000], encoding="utf-8")
    monkeypatch.setattr(refit, "CURVES", curves)
    with pytest.raises(SystemExit, match=rf"{sentence}.*; curves.json is as it was"):
        refit.main(str(file))
    with pytest.raises(SystemExit, match="no results file was named"):
        refit.main()
    assert not curves.exists()


def test_the_command_gives_json(capsys):
    run("--keep", "64", "--tflops", "200", "--bandwidth", "1000", "--memory", "48", "--json")
    found = json.loads(capsys.readouterr().out)
    assert [row["num_kept"] for row in found["rows"][:2]] == [576, 64]


def test_the_command_fits_its_curves_to_a_results_file(tmp_path, capsys):
    from diffprune.results import write_results

    rows = rows_from(Calibration(prefill=TRUE, vision=TRUE, host_ms=0.0, source="made"))
    write_results(tmp_path / "ttft.json", name="ttft", rows=rows, device="NVIDIA H200")
    run("--keep", "64", "--gpu", "h200", "--calibrate", str(tmp_path / "ttft.json"), "--wide")
    out = capsys.readouterr().out
    assert '"prefill": {' in out and "predicted over measured" in out


def test_a_row_held_out_is_told_beside_its_own_and_not_beside_one_inside_the_language_model(tmp_path, capsys):
    from diffprune.results import write_results

    rows = rows_from(Calibration(prefill=TRUE, vision=TRUE, host_ms=0.0, source="made"))
    rows[1]["prefill_ms"] *= 2  # one that no curve through the others can tell
    fastv = rows[3] | {"method": "fastv", "keep": 64, "num_columns": 640}
    write_results(tmp_path / "ttft.json", name="ttft", rows=[fastv, *rows], device="NVIDIA H200")
    run("--keep", "64", "--gpu", "h200", "--calibrate", str(tmp_path / "ttft.json"), "--json")
    inside, *others = json.loads(capsys.readouterr().out)["calibrated"]
    assert inside["method"] == "fastv" and "held_out" not in inside
    assert min(others, key=lambda row: row["held_out"]) is others[1]


def test_a_card_without_room_is_said(capsys):
    run("--backbone", "qwen2.5-vl-32b", "--gpu", "t4", "--keep", "64")
    assert "The full model does not fit into 16 GB with one request" in capsys.readouterr().err


def test_a_batch_far_too_large_is_said_and_not_timed(capsys):
    run("--batch", "100000", "--gpu", "h200", "--keep", "64", "--json")
    printed = capsys.readouterr()
    assert printed.err.count("A batch of 100,000 does not fit into 141 GB") == 2
    assert not any("ttft_ms" in row for row in json.loads(printed.out)["rows"])


def test_a_budget_beyond_the_picture_is_said(capsys):
    run("--keep", "9999", "--gpu", "h200")
    assert "keep=9999 is more than the picture has (576): nothing is pruned." in capsys.readouterr().err
    run("--keep", "576", "--gpu", "h200")
    assert "nothing is pruned" not in capsys.readouterr().err


def test_a_wrong_path_is_one_sentence():
    with pytest.raises(ValueError, match="path 'slow' is not known"):
        run("--path", "slow", "--gpu", "h200")
