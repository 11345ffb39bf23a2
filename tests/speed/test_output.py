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


def test_a_bar_is_as_long_as_its_label_and_quartiles_are_drawn_where_they_are(tmp_path: Path, monkeypatch):
    from matplotlib.figure import Figure

    row = {"method": "full", "path": "eager", "batch": 1, "num_text": 40, "encode_ms": 20.0, "prefill_ms": 5.0}
    fast = {**row, "path": "fast", "ttft_ms": 3.25, "ttft_quartiles": [3.0, 3.5]}
    other = {**row, "batch": 32, "ttft_ms": 99.0}
    drawn = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *given, **more: (drawn.append(self), save(self, *given, **more))
    )
    output.draw_bars([{**row, "ttft_ms": 8.0}, fast, other, {**row, "error": "none"}], tmp_path / "bars.png")
    (axes,) = drawn[0].axes
    assert sorted(bar.get_width() for bar in axes.patches) == [3.25, 8.0]  # stages may overlap: their sum is another
    assert [text.get_text().strip() for text in axes.texts] == ["8.0", "3.2"]
    assert sum(type(line).__name__ == "LineCollection" for line in axes.collections) == 1  # one row has quartiles
    assert drawn[0].get_size_inches()[0] == 6.9 and (tmp_path / "bars.png").stat().st_size > 1000
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
