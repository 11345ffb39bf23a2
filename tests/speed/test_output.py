"""The results file and the figure of a profile."""

from pathlib import Path

import pytest

from diffprune.results import read_results
from diffprune.speed import output


def test_notes_name_what_is_missing_until_it_is_measured(tmp_path: Path):
    out = tmp_path / "ttft.json"
    first, second = (
        {"backbone": "x", "method": "full", "keep": 1.0, "path": "fast", "batch": 1, "num_text": text}
        for text in (40, 100)
    )
    third = {**second, "method": "holov"}
    missing = [output.in_words(second), output.in_words(third)]
    output.save(out, [{**first, "ttft_ms": 1.0}], device="cpu", commit="c", missing=missing)
    earlier = read_results(out)
    assert earlier.notes.endswith(f"{output.NOT_RUN}{missing[0]}; {missing[1]}.")
    output.save(out, [{**second, "ttft_ms": 1.0}], device="cpu", commit="c", earlier=earlier)
    assert read_results(out).notes.endswith(f"{output.NOT_RUN}{missing[1]}.")


def test_bars_add_up_to_the_time_to_first_token(tmp_path: Path):
    row = {"method": "full", "path": "eager", "batch": 1, "num_text": 40, "encode_ms": 2.0, "prefill_ms": 5.0}
    parts = output.bar_parts({**row, "ttft_ms": 8.0})
    assert sum(parts.values()) == 8.0 and parts["rest_ms"] == 1.0
    output.draw_bars([{**row, "ttft_ms": 8.0}, {**row, "error": "none"}], tmp_path / "bars.png")
    assert (tmp_path / "bars.png").stat().st_size > 1000
    output.draw_bars([{**row, "error": "none"}], tmp_path / "nothing.png")
    assert not (tmp_path / "nothing.png").exists()


def test_new_rows_join_those_of_the_same_code_and_device(tmp_path: Path):
    out = tmp_path / "ttft.json"
    row = {"backbone": "x", "method": "full", "keep": 1.0, "path": "eager", "batch": 1, "num_text": 40}
    assert output.read_earlier(out, device="cpu", commit="c1") is None
    output.save(out, [{**row, "ttft_ms": 1.0}, {**row, "batch": 2, "ttft_ms": 2.0}], device="cpu", commit="c1")
    earlier = output.read_earlier(out, device="cpu", commit="c1")
    output.save(out, [{**row, "ttft_ms": 3.0}], device="cpu", commit="c1", earlier=earlier)
    assert [item["ttft_ms"] for item in read_results(out).rows] == [2.0, 3.0]  # measured again, so replaced
    device = {"name": "device and weights", "backbone": "x", "copy_gb_s": 1.0}
    earlier = output.read_earlier(out, device="cpu", commit="c1")
    for _ in range(2):  # a run saves after every row
        output.save(out, [device, {**row, "ttft_ms": 4.0}], device="cpu", commit="c1", earlier=earlier)
    earlier = output.read_earlier(out, device="cpu", commit="c1")
    output.save(out, [device, {**row, "ttft_ms": 5.0}], device="cpu", commit="c1", earlier=earlier)
    assert [item.get("ttft_ms") for item in read_results(out).rows] == [2.0, None, None, 5.0]  # one device row a run
    with pytest.raises(ValueError, match="is of commit c1, not c2: drop --append"):
        output.read_earlier(out, device="cpu", commit="c2")
