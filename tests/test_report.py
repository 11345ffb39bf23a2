"""Tables of rows: methods that were measured under the same conditions stand side by side."""

from dataclasses import replace
from typing import Any

import pytest

from diffprune.report import refresh_tables, render_tables
from diffprune.results import Results

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


def test_a_row_that_failed_is_named_with_its_error_under_the_table():
    good, bad = {**ROW, "method": "full", "batch": 1, "ttft_ms": 20.0}, {**ROW, "method": "holov", "batch": 1}
    page = render_tables([good, {**bad, "error": "RuntimeError: no room"}])
    assert "| full | fast | 20.00 |" in page and "| holov" not in page
    assert "Not in the table: holov, fast (RuntimeError: no room).\n" in page
    alone = render_tables([{**bad, "error": "RuntimeError: no room"}])
    assert "|" not in alone and "Not in the table: holov, fast (RuntimeError: no room)." in alone


def test_paths_of_a_method_stand_together_however_they_were_run():
    rows = [
        {**ROW, "method": method, "path": path, "batch": 1, "ttft_ms": ms}
        for method, path, ms in (
            ("full", "eager", 4.0),
            ("full", "fast", 3.0),
            ("holov", "fast", 1.0),
            ("holov", "eager", 2.0),
        )
    ]
    lines = [line for line in render_tables(rows).splitlines() if line.startswith(("| full", "| holov"))]
    assert lines == ["| full | eager | 4 |", "| full | fast | 3 |", "| holov | eager | 2 |", "| holov | fast | 1 |"]


def test_what_a_guess_gets_stands_under_the_scores_of_the_tasks_that_have_it():
    row = {"method": "full", "keep": 1.0, "seed": 0, "full_score": 90.0}
    rows = [{**row, "task": "color", "score": 90.0}, {**row, "task": "shape", "score": 80.0}]
    page = render_tables([rows[0] | {"chance": 27.5}, rows[1]])
    assert "| full | 1.0 | 90.00 | 80.00 |\n| chance | - | 27.50 | - |\n" in page
    assert page.count("chance") == 1
    assert "chance" not in render_tables(rows)


def test_selection_without_a_number_is_a_dash_with_its_reason():
    row = {"num_visual": 576, "num_kept": 64, "calls": 30}
    rows = [
        {**row, "method": "holov", "batch": 1, "pruner_ms": 1.0, "graph_ms": 0.5},
        {**row, "method": "holov", "batch": 8, "pruner_ms": 2.0, "graph_ms": 0.6},
        {**row, "method": "prunesid", "batch": 1, "pruner_ms": 3.0, "graph_ms": None},
        {**row, "method": "prunesid", "batch": 8, "calls": 0, "skipped": "no time was left"},
        {**row, "method": "holov", "batch": 32, "calls": 0, "skipped": "no time was left"},
        {**row, "method": "prunesid", "batch": 32, "calls": 0, "skipped": "no time was left"},
    ]
    launched, replayed = render_tables(rows).split("Replayed as a CUDA graph:")
    assert "| prunesid | 3 | - (1) |" in launched and "(1) no time was left." in launched
    assert "Not in the table: 64 of 576, batch 32 (no time was left)." in launched
    assert "| prunesid" not in replayed and "Not in the table: prunesid (no CUDA graph: it waits" in replayed


def test_a_selection_in_parts_says_how_many_images_there_were_at_a_time():
    row = {"method": "holov", "num_visual": 576, "num_kept": 64, "calls": 1, "pruner_ms": 9.0}
    page = render_tables([row | {"batch": 1}, row | {"batch": 32, "at_once": 8}])
    assert page.endswith("So many images at a time, for want of memory: holov at 64 of 576 (8).\n")


def test_many_columns_leave_out_what_is_the_same_and_stand_on_their_side():
    row: dict[str, object] = {"backbone": "a", "same": 7} | {f"key_{index}": index for index in range(12)}
    page = render_tables([row, {"backbone": "b", "same": 7} | {f"key_{index}": index + 1 for index in range(12)}])
    assert "The same in all rows: same 7." in page
    assert "|  | a | b |" in page and "| key_3 | 3 | 4 |" in page


def found(name: str, rows: list[dict[str, Any]]) -> Results:
    return Results(
        name=name,
        command="",
        commit="c",
        date="2026-01-01",
        device="card",
        versions={},
        seeds=[],
        rows=rows,
        notes="",
    )


def test_a_readme_block_can_be_short():
    rows = [
        {**ROW, "method": "full", "path": "eager", "batch": 1, "ttft_ms": 30.0, "encode_ms": 9.0},
        {**ROW, "method": "diffprune", "batch": 1, "ttft_ms": 6.0, "encode_ms": 1.0},
        {**ROW, "method": "diffprune", "batch": 32, "ttft_ms": 99.0},
    ]
    results = found("ttft", rows)
    text = "<!-- results: ttft, short -->\nold\n<!-- end of results -->"
    page = refresh_tables(text, {"ttft": results})
    assert page.startswith("<!-- results: ttft, short -->\n") and page.endswith("\n<!-- end of results -->")
    assert "| diffprune | fast | 6 | 5 |" in page and "old" not in page and "99" not in page and "encode" not in page
    with pytest.raises(ValueError, match="of retention or of times to the first token; 'ttft' has neither"):
        refresh_tables(text, {"ttft": replace(results, rows=[])})
    kept = [{"method": name, "keep": 64, "retention": left} for name, left in (("full", 100.0), ("random", 81.234))]
    page = refresh_tables(text, {"ttft": replace(results, rows=kept)})
    assert "| random | 81.2 |" in page and "full" not in page


def test_speed_rows_without_a_model_still_make_a_table():
    assert "batch 2:" in render_tables([{"path": "eager", "batch": 2, "ttft_ms": 1.0}])


def test_a_short_table_of_quality_goes_from_the_best_at_the_smallest_budget_below_the_first_method():
    rows = [
        {"method": method, "keep": keep, "retention": left}
        for method, lefts in (("random", (90.0, 50.0)), ("worse", (99.0, 60.0)), ("better", (98.0, 70.0)))
        for keep, left in zip((64, 32), lefts, strict=True)
    ]
    results = found("kept", [{"method": "full", "keep": 1.0, "retention": 100.0}, *rows])
    page = refresh_tables("<!-- results: kept, short -->\n<!-- end of results -->", {"kept": results})
    order = [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("|")][2:]
    assert order == ["random", "better", "worse"]


def test_each_time_stands_beside_its_ratio_to_the_floor():
    row = {**ROW, "method": "full", "batch": 1, "prefill_ms": 6.0, "ratio_to_floor": 1.5, "floor_ms": 4.0}
    row |= {"ttft_ms": 9.0, "ttft_ratio_to_floor": 1.8, "decode_tok_s": 200.0, "decode_ratio_to_floor": 1.25}
    page = render_tables([row])
    assert (
        "| method | path | prefill_ms | ratio_to_floor | floor_ms | ttft_ms | ttft_ratio_to_floor | decode_tok_s | "
        "decode_ratio_to_floor |" in page
    )


def test_scores_by_task_are_means_over_seeds_where_nothing_sums_them_up():
    rows = [
        {"method": "random", "keep": 64, "seed": seed, "task": task, "score": score, "full_score": 100.0}
        for seed, task, score in ((0, "colour", 50.0), (1, "colour", 60.0), (0, "shape", 20.0))
    ]
    assert "| random | 64 | 55.00 | 20.00 |" in render_tables(rows)
    assert "colour" not in render_tables([*rows, {"method": "random", "keep": 64, "retention": 40.0}])


def test_models_of_one_file_have_tables_of_their_own():
    rows = [
        {"backbone": name, "method": "random", "keep": 64, "retention": left} for name, left in (("s", 1.0), ("l", 2.0))
    ]
    page = render_tables(rows)
    assert page.index("s:\n") < page.index("| random | 1.0 |") < page.index("l:\n") < page.index("| random | 2.0 |")


def test_many_plain_rows_are_one_number_by_its_conditions():
    rows = [
        {"backbone": "tiny", "method": f"m{place}", "keep": keep, "n_seeds": 5, "lift": place + keep}
        for place in range(30)
        for keep in (0.25, 0.5)
    ]
    page = render_tables(rows)
    assert "lift by keep:" in page and "| m3 | tiny | 3.25 | 3.5 |" in page and "n_seeds" not in page
    assert "60 rows." in render_tables([{"own": index} for index in range(60)])
