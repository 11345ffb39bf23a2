"""Tables of rows: methods that were measured under the same conditions stand side by side."""

from dataclasses import replace
from typing import Any

import pytest

from diffprune.report import refresh_tables, render_page, render_tables
from diffprune.results import Results

ROW = {"backbone": "llava-1.5-7b", "path": "fast", "num_text": 40, "num_visual": 576}


def test_what_all_rows_share_is_the_title_and_what_differs_a_column():
    rows = [
        {**ROW, "method": "full", "batch": 1, "ttft_ms": 20.0, "splice_ms": 0.1},
        {**ROW, "method": "diffprune", "batch": 32, "requests_s": 70.0},
        {**ROW, "method": "diffprune", "batch": 1, "ttft_ms": 8.0, "splice_ms": 0.1},
    ]
    page = render_tables(rows)
    assert page.startswith("llava-1.5-7b, fast, 40 text tokens:\n\n| method | batch | ttft_ms | requests_s |\n")
    assert "| full | 1 | 20.00 | - |\n| diffprune | 1 | 8 | - |\n| diffprune | 32 | - | 70.00 |" in page
    assert "num_visual" not in page and "splice_ms" not in page


def test_many_speed_rows_are_the_stages_of_the_first_shape_and_the_first_token_of_all():
    rows = [
        {
            **ROW,
            "method": f"m{index}",
            "path": path,
            "batch": batch,
            "prefill_ms": 2.0 * index,
            "ttft_ms": index + extra,
        }
        for index in range(10)
        for path, batch, extra in (("eager", 1, 0.5), ("fast", 1, 0.25), ("fast", 32, 0.125))
    ]
    page = render_tables([*rows[:-1], {**ROW, "method": "m9", "path": "fast", "batch": 32, "error": "no room"}])
    assert "Stages of llava-1.5-7b, fast, batch 1, 40 text tokens, and ttft_ms of every shape:" in page
    assert "| method | prefill_ms | ttft_ms eager, batch 1 | ttft_ms fast, batch 1 | ttft_ms fast, batch 32 |" in page
    assert "| m3 | 6 | 3.5 | 3.25 | 3.125 |" in page and "| m9 | 18.00 | 9.5 | 9.25 | - (1) |" in page
    assert "(1) no room." in page and sum(line.startswith("| m") for line in page.splitlines()) == 11


def test_a_row_that_failed_is_named_with_its_error_under_the_table():
    good, bad = {**ROW, "method": "full", "batch": 1, "ttft_ms": 20.0}, {**ROW, "method": "holov", "batch": 1}
    page = render_tables([good, {**bad, "error": "RuntimeError: no room"}])
    assert "| full | 20.00 |" in page and "| holov" not in page
    assert "Not in the table: holov (RuntimeError: no room).\n" in page
    alone = render_tables([{**bad, "error": "RuntimeError: no room"}])
    assert "|" not in alone and "Not in the table: holov (RuntimeError: no room)." in alone


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
    page = render_tables(rows)
    assert page.startswith("Launched from Python / replayed as a CUDA graph (-: no CUDA graph: it waits")
    assert "| holov | 1 / 0.5 | 2 / 0.6 |" in page
    assert "| prunesid | 3 / - | - (1) |" in page and "(1) no time was left." in page
    assert "Not in the table: 64 of 576, batch 32 (no time was left)." in page


def test_a_selection_without_its_kernels_has_a_line_of_its_own():
    row = {"method": "gots", "num_visual": 576, "num_kept": 64, "batch": 1, "calls": 30, "graph_ms": None}
    page = render_tables([row | {"pruner_ms": 0.5}, row | {"pruner_ms": 9.0, "steps": "torch"}])
    assert "| gots | 0.5 |" in page and "| gots, steps by torch | 9 |" in page


def test_a_selection_that_was_called_once_is_named():
    row = {"num_visual": 576, "num_kept": 64, "batch": 1}
    cold = row | {"method": "holov", "calls": 1, "pruner_ms": 1198.0}
    page = render_tables([cold, row | {"method": "gots", "calls": 1, "pruner_ms": 600.0}])
    assert page.endswith("loading kernels is in the time: holov at 64 of 576, batch 1.\n")


def test_a_selection_in_parts_says_how_many_images_there_were_at_a_time():
    row = {"method": "holov", "num_visual": 576, "num_kept": 64, "calls": 1, "pruner_ms": 9.0}
    page = render_tables([row | {"batch": 1}, row | {"batch": 32, "at_once": 8}])
    assert page.endswith("So many images at a time, for want of memory: holov at 64 of 576 (8).\n")


def test_of_many_columns_what_is_equal_in_all_rows_is_a_sentence():
    row: dict[str, Any] = {"backbone": "a", "same": 7} | {f"key_{index}": index for index in range(12)}
    page = render_tables([row, {"backbone": "b", "same": 7} | {f"key_{index}": index + 1 for index in range(12)}])
    assert "In all rows: same 7." in page and "| backbone | key_0 | key_1 |" in page and "| b | 1 | 2 |" in page


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


def test_rows_of_several_runs_stand_in_a_table_for_each_run():
    wide = {f"key{place}": place for place in range(9)}
    rows = [
        {"name": name, "ours_ms": 1.0, "device": device, "command": f"measure {device}", **wide}
        for device in ("cpu", "gpu")
        for name in ("first", "second")
    ]
    page = render_tables(rows)
    assert page.count("| first |") == 2 and page.count("| name |") == 2 and "| device |" not in page
    assert "In all rows: " in page and "device cpu" in page and "command `measure gpu`" in page


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
    assert "\ncard, 2026-01-01, commit `c`:\n" in page and "| random | 81.2 |" in page and "full" not in page


def test_a_readme_block_names_its_methods():
    speed = [
        {**ROW, "method": method, "path": path, "batch": 1, "ttft_ms": ms}
        for method, path, ms in (("full", "eager", 9.0), ("holov", "fast", 3.0), ("fastv", "fast", 4.5))
    ]
    text = "<!-- results: x, short, fastv -->\n<!-- end of results -->"
    page = refresh_tables(text, {"x": found("x", speed)})
    assert page.startswith("<!-- results: x, short, fastv -->\n")
    assert "| fastv | fast | 4.5 | 2 |" in page and "| full" not in page and "| holov" not in page
    kept = [{"method": name, "keep": 64, "retention": left} for name, left in (("random", 8.0), ("fastv", 9.0))]
    page = refresh_tables(text.replace("fastv", "fastv random"), {"x": found("x", kept)})
    assert page.index("| random | 8.0 |") < page.index("| fastv | 9.0 |")
    with pytest.raises(ValueError, match="'x' has no rows of fastvv; it has fastv, full, holov"):
        refresh_tables(text.replace("fastv", "fastvv"), {"x": found("x", speed)})


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
        "| method | prefill_ms | ratio_to_floor | floor_ms | ttft_ms | ttft_ratio_to_floor | decode_tok_s | "
        "decode_ratio_to_floor |" in page
    )


def test_scores_by_task_are_means_over_seeds_where_nothing_sums_them_up():
    rows = [
        {"method": "random", "keep": 64, "seed": seed, "task": task, "score": score, "full_score": 100.0}
        for seed, task, score in ((0, "colour", 50.0), (1, "colour", 60.0), (0, "shape", 20.0))
    ]
    assert "| random | 64 | 55.00 | 20.00 |" in render_tables(rows)
    assert "colour" not in render_tables([*rows, {"method": "random", "keep": 64, "retention": 40.0}])


def test_models_of_one_file_stand_side_by_side_without_intervals():
    rows = [
        {"backbone": name, "method": method, "keep": 64, "retention": left, "ci95": [0.0, 3.0]}
        for name, left in (("s", 1.0), ("l", 2.0))
        for method in ("full", "random")
    ]
    page = render_tables(rows)
    assert "| method | s, keep 64 | l, keep 64 |" in page and "| random | 1.0 | 2.0 |" in page and "full" not in page


def test_many_methods_are_two_tables_by_their_seeds():
    rows = [
        {"method": f"m{index}", "keep": 64, "retention": 50.0, "retention_std": 1.0, "n_seeds": 3 if index < 5 else 1}
        for index in range(30)
    ]
    several, one = render_tables(rows).split("One run:")
    assert several.startswith("Several seeds:") and "| m4 | 50.0 ± 1.0 |" in several and "m5" not in several
    assert "| m5 | 50.0 |" in one and "m4 " not in one
    assert "seeds" not in render_tables(rows[:25])


def test_a_file_whose_methods_a_section_above_has_shows_the_rest():
    def summary(*methods: str) -> list[dict[str, Any]]:
        return [{"method": name, "keep": 64, "retention": float(len(name))} for name in methods]

    names = [f"m{index}" for index in range(19)]
    files = {"a": found("a", summary(*names, "more")), "b": found("b", summary(*names, "other"))}
    first, second = render_page(files).split("## b\n")
    assert "| m3 | 2.0 |" in first and "| m3 |" not in second and "| other | 5.0 |" in second
    assert "Methods that [a](#a) has too, with equal numbers" in second and "[All 20 rows](../results/b.json)" in second
    changed = replace(files["b"], rows=[row | {"retention": 9.0} for row in files["b"].rows])
    assert "| m3 | 9.0 |" in render_page({**files, "b": changed})


def test_a_supervised_bound_is_called_so():
    rows = [{"method": "taught", "keep": 0.25, "lift": 2.0}]
    page = render_page({"x": replace(found("x", rows), notes="taught: a scorer that was shown the boxes")})
    assert "| supervised upper bound | 0.25 | 2 |" in page and "taught" not in page
    assert "supervised upper bound: a scorer that was shown the boxes. [All 1 rows]" in page


def test_many_plain_rows_are_one_number_by_its_conditions():
    rows = [
        {"backbone": "tiny", "method": f"m{place}", "keep": keep, "n_seeds": 5, "lift": place + keep}
        for place in range(30)
        for keep in (0.25, 0.5)
    ]
    page = render_tables(rows)
    assert "lift by keep:" in page and "| m3 | tiny | 3.25 | 3.5 |" in page and "n_seeds" not in page
    models = [{**row, "backbone": name} for name in ("tiny", "small") for row in rows]
    assert "| method | tiny, keep 0.25 | tiny, keep 0.5 | small, keep 0.25 |" in render_tables(models)
    assert "60 rows." in render_tables([{"own": index} for index in range(60)])


def test_a_method_that_tables_call_otherwise_is_explained_where_it_is_there():
    rows = [{"method": "cls_attention", "keep": 64, "retention": 90.0}]
    page = render_page({"x": found("x", rows)})
    assert "| fastervlm | 90.0 |" in page and "`fastervlm` is also known as `cls_attention`." in page
    assert "also known as" not in render_page({"x": found("x", [row | {"method": "random"} for row in rows])})


def test_a_long_page_begins_with_where_to_find_what():
    rows = [{"method": "random", "keep": 64, "retention": 90.0 + index} for index in range(7)]
    files = {f"kept{index}": found(f"kept{index}", [row]) for index, row in enumerate(rows)}
    files["ttft"] = found("ttft", [{**ROW, "method": "full", "batch": 1, "ttft_ms": 20.0}])
    assert "](#" not in render_page(files)
    page = render_page({**files, "leak": found("leak", [{"recipe": "paper", "read": 12.5}])})
    assert "- answers: [kept0](#kept0), " in page and page.count("](#kept") == 7
    assert "- time and memory: [ttft](#ttft)\n- everything else: [leak](#leak)\n\n## kept0\n" in page
