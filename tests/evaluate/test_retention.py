"""Retention: the paper's Avg. column."""

import pytest

from diffprune.evaluate.retention import retention
from diffprune.report.paper import TABLES

ROWS = [
    pytest.param(table, scores, average, id=f"{table.name}-{budget}-{method}")
    for table in TABLES
    for budget, method, scores, average in table.rows
]


@pytest.mark.parametrize(("table", "scores", "average"), ROWS)
def test_the_average_of_the_papers_main_tables_comes_out(table, scores, average):
    pairs = dict(zip(table.benchmarks, scores, strict=True))
    full = dict(zip(table.benchmarks, table.full, strict=True))
    assert abs(retention(pairs, full) - average) <= 0.06


def test_a_benchmark_without_a_score_is_left_out():
    assert retention({"gqa": 30.0, "mme": None}, {"gqa": 60.0, "mme": 1800.0}) == 50.0


def test_the_mean_is_over_benchmarks_and_not_over_points():
    assert retention({"gqa": 60.0, "mme": 900.0}, {"gqa": 60.0, "mme": 1800.0}) == 75.0


def test_no_score_at_all_is_refused():
    with pytest.raises(ValueError, match="No benchmark has a score"):
        retention({"gqa": None}, {"gqa": 60.0})


@pytest.mark.parametrize("full", [{}, {"pope": 0.0}, {"pope": None}])
def test_a_benchmark_the_full_model_has_no_score_on_is_named(full):
    with pytest.raises(ValueError, match="'pope'"):
        retention({"pope": 50.0}, full)
