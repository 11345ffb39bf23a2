"""Retention: the paper's Avg. column, and its interval."""

import numpy as np
import pytest

from diffprune.evaluate.retention import lead, lead_ci95, retention, retention_ci95
from tests.paper.paper_tables import TABLES

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


def test_the_interval_of_equal_answers_is_a_point():
    answers = {"gqa": [0.0, 100.0] * 50, "pope": [100.0] * 30}
    assert retention_ci95(answers, answers) == (100.0, 100.0)


def test_the_interval_covers_the_retention_and_narrows_with_more_questions():
    generator = np.random.default_rng(1)
    widths = []
    for count in (100, 1600):
        full = {name: (100.0 * (generator.random(count) < 0.9)).tolist() for name in ("gqa", "seed")}
        pruned = {name: [v * (generator.random() < 0.8) for v in values] for name, values in full.items()}
        low, high = retention_ci95(pruned, full)
        means = [np.mean(pruned[name]) / np.mean(full[name]) for name in full]
        assert low < 100 * np.mean(means) < high
        widths.append(high - low)
    assert 2.5 < widths[0] / widths[1] < 6.5  # the square root of 16, roughly


def test_pairing_makes_the_interval_narrower_than_independent_answers_would():
    generator = np.random.default_rng(2)
    full = (100.0 * (generator.random(400) < 0.6)).tolist()
    same_questions = [v if generator.random() < 0.95 else 0.0 for v in full]
    other_questions = generator.permutation(same_questions).tolist()
    paired, unpaired = (retention_ci95({"gqa": values}, {"gqa": full}) for values in (same_questions, other_questions))
    assert paired[1] - paired[0] < 0.5 * (unpaired[1] - unpaired[0])


def test_the_interval_is_the_same_under_a_seed_and_in_any_order():
    full = {"gqa": [100.0, 0.0, 100.0, 100.0] * 20, "seed": [100.0, 100.0, 0.0] * 20}
    pruned = {"gqa": [100.0, 0.0, 0.0, 100.0] * 20, "seed": [0.0, 100.0, 0.0] * 20}
    backwards = dict(reversed(pruned.items()))
    assert retention_ci95(pruned, full, seed=3) == retention_ci95(backwards, full, seed=3)
    assert retention_ci95(pruned, full, seed=3) != retention_ci95(pruned, full, seed=4)


@pytest.mark.parametrize("full", [{}, {"gqa": [100.0]}])
def test_answers_that_cannot_be_paired_are_refused(full):
    with pytest.raises(ValueError, match="'gqa' cannot be paired"):
        retention_ci95({"gqa": [100.0, 0.0]}, full)


def test_no_answers_at_all_are_refused():
    with pytest.raises(ValueError, match="No benchmark has answers"):
        retention_ci95({}, {})


def test_a_full_model_without_a_right_answer_is_named():
    with pytest.raises(ValueError, match="'gqa'"):
        retention_ci95({"gqa": [0.0, 0.0]}, {"gqa": [0.0, 0.0]})


def test_the_lead_of_a_hand_example():
    """Four questions each: gqa 3 of 4 against 2, pope 4 against 4, and the full model has all right."""
    full = {"gqa": [100.0] * 4, "pope": [100.0] * 4}
    ours = {"gqa": [100.0, 100.0, 100.0, 0.0], "pope": [100.0] * 4}
    theirs = {"gqa": [100.0, 0.0, 100.0, 0.0], "pope": [100.0] * 4}
    assert lead(ours, theirs, full) == 12.5  # a quarter of gqa, half of the mean
    # The difference of a resample is 12.5 times how often question 2 is drawn: of Binomial(4, 1/4) the 2.5 % point
    # is 0 and the 97.5 % point is 3.
    assert lead_ci95(ours, theirs, full) == pytest.approx((0.0, 37.5))
    assert lead_ci95(theirs, ours, full) == pytest.approx((-37.5, 0.0))


def test_the_lead_over_the_same_answers_is_nothing():
    full = {"gqa": [100.0, 0.0, 100.0] * 9}
    ours = {"gqa": [100.0, 0.0, 0.0] * 9}
    assert lead(ours, ours, full) == 0.0 and lead_ci95(ours, ours, full) == (0.0, 0.0)


def test_pairing_the_two_models_makes_the_lead_surer_than_their_own_intervals_say():
    generator = np.random.default_rng(5)
    full = {"gqa": (100.0 * (generator.random(400) < 0.9)).tolist()}
    theirs = {"gqa": [v * (generator.random() < 0.6) for v in full["gqa"]]}
    ours = {"gqa": [v if generator.random() < 0.97 else 100.0 for v in theirs["gqa"]]}  # right a little more often
    low, high = lead_ci95(ours, theirs, full)
    own = retention_ci95(ours, full)
    assert 0 < low < lead(ours, theirs, full) < high and high - low < 0.5 * (own[1] - own[0])


def test_a_lead_over_answers_to_other_questions_is_refused():
    with pytest.raises(ValueError, match="'pope' was asked of one model alone"):
        lead_ci95({"gqa": [100.0]}, {"gqa": [100.0], "pope": [0.0]}, {"gqa": [100.0], "pope": [100.0]})
