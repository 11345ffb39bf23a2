"""Tables of speed rows: methods that were measured under the same conditions stand side by side."""

from diffprune.measure.report import render_tables

ROW = {"backbone": "llava-1.5-7b", "path": "fast", "num_text": 40, "num_visual": 576}


def test_each_batch_and_text_length_is_a_table_of_its_own():
    rows = [
        {**ROW, "method": "full", "batch": 1, "ttft_ms": 20.0, "splice_ms": 0.1},
        {**ROW, "method": "diffprune", "batch": 1, "ttft_ms": 8.0, "splice_ms": 0.1},
        {**ROW, "method": "full", "batch": 32, "requests_s": 70.0},
    ]
    page = render_tables(rows)
    assert "llava-1.5-7b, batch 1, 40 text tokens:" in page and "batch 32, 40 text tokens:" in page
    assert "| method | path | ttft_ms |\n|---|---|---:|\n| full | fast | 20.00 |\n| diffprune | fast | 8 |" in page
    assert "| method | path | requests_s |" in page
    assert "num_visual" not in page  # the same in all


def test_a_row_that_failed_shows_its_error():
    page = render_tables([{**ROW, "method": "full", "batch": 1, "error": "RuntimeError: no room"}])
    assert "| full | fast | RuntimeError: no room |" in page


def test_speed_rows_without_a_model_still_make_a_table():
    assert "batch 2:" in render_tables([{"path": "eager", "batch": 2, "ttft_ms": 1.0}])
