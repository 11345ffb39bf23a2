"""Intervals over seeds and questions: against closed forms, under a seed, and what cannot be paired."""

import numpy as np
import pytest

from diffprune.evaluate.bootstrap import Units, holm, interval, resample_questions, resample_seeds, two_sided_p


def ci95(runs: list[Units], full: Units, *, seed: int = 0) -> list[float]:
    return interval(resample_seeds(resample_questions(runs, full, seed=seed), of="x", seed=seed))


def lead_ci95(ours: Units, theirs: Units, full: Units) -> list[float]:
    drawn = resample_questions([ours, theirs], full)
    return interval(drawn[:, 0] - drawn[:, 1])


def test_the_interval_of_equal_answers_is_a_point():
    answers = {"gqa": [0.0, 100.0] * 50, "pope": [100.0] * 30}
    assert ci95([answers], answers) == [100.0, 100.0]
    assert ci95([answers, answers, answers], answers) == [100.0, 100.0]


def test_the_interval_covers_the_retention_and_narrows_with_more_questions():
    generator = np.random.default_rng(1)
    widths = []
    for count in (100, 1600):
        full = {name: (100.0 * (generator.random(count) < 0.9)).tolist() for name in ("gqa", "seed")}
        pruned = {name: [v * (generator.random() < 0.8) for v in values] for name, values in full.items()}
        low, high = ci95([pruned], full)
        means = [np.mean(pruned[name]) / np.mean(full[name]) for name in full]
        assert low < 100 * np.mean(means) < high
        widths.append(high - low)
    assert 2.5 < widths[0] / widths[1] < 6.5  # the square root of 16, roughly


def test_pairing_makes_the_interval_narrower_than_independent_answers_would():
    generator = np.random.default_rng(2)
    full = (100.0 * (generator.random(400) < 0.6)).tolist()
    same_questions = [v if generator.random() < 0.95 else 0.0 for v in full]
    other_questions = generator.permutation(same_questions).tolist()
    paired, unpaired = (ci95([{"gqa": values}], {"gqa": full}) for values in (same_questions, other_questions))
    assert paired[1] - paired[0] < 0.5 * (unpaired[1] - unpaired[0])


def test_the_interval_is_the_same_under_a_seed_and_in_any_order():
    full = {"gqa": [100.0, 0.0, 100.0, 100.0] * 20, "seed": [100.0, 100.0, 0.0] * 20}
    pruned = {"gqa": [100.0, 0.0, 0.0, 100.0] * 20, "seed": [0.0, 100.0, 0.0] * 20}
    backwards = dict(reversed(pruned.items()))
    assert ci95([pruned], full, seed=3) == ci95([backwards], full, seed=3)
    assert ci95([pruned], full, seed=3) != ci95([pruned], full, seed=4)
    drawn = resample_questions([pruned, full], full)
    assert np.array_equal(resample_seeds(drawn, of="x"), resample_seeds(drawn, of="x"))


def test_a_translation_tells_no_more_about_other_questions_than_its_original():
    generator = np.random.default_rng(4)
    values, full = (100.0 * (generator.random(400) < 0.8)).tolist(), [100.0] * 400

    def width(*names: str) -> float:
        low, high = ci95([dict.fromkeys(names, values)], dict.fromkeys(names, full))
        return high - low

    alone = width("scenes/mmbench")
    assert width("scenes/mmbench_cn", "scenes/mmbench") == pytest.approx(alone, rel=0.02)
    assert width("scenes/mmbench", "scenes/seed") < 0.8 * alone
    low, high = ci95([{"a": values, "a_cn": values[:300]}], {"a": full, "a_cn": full[:300]})  # not the same questions
    assert high - low < 0.85 * alone


def seeds_apart(spread: float, count: int, generator: np.random.Generator) -> tuple[list[Units], Units]:
    """Three runs whose shares of right answers differ by `spread`, and a full model that has all right."""
    shares = (0.8 - spread, 0.8, 0.8 + spread)
    return [{"gqa": (100.0 * (generator.random(count) < share)).tolist()} for share in shares], {"gqa": [100.0] * count}


def test_seeds_that_lie_apart_widen_the_interval_as_their_variance_says():
    """With many questions only the seeds are left: Student's t with the deviation of the mean of three."""
    runs, full = seeds_apart(0.1, 4000, np.random.default_rng(3))
    values = resample_seeds(resample_questions(runs, full), of="x")
    retained = [np.mean(run["gqa"]) for run in runs]
    half = float(np.std(retained, ddof=1)) / 3**0.5 * 4.303
    assert interval(values) == pytest.approx([np.mean(retained) - half, np.mean(retained) + half], abs=0.1 * half)
    mean_run = {"gqa": np.mean([run["gqa"] for run in runs], axis=0).tolist()}
    over_questions = ci95([mean_run], full)  # what resampling questions alone would say
    assert interval(values)[1] - interval(values)[0] > 5 * (over_questions[1] - over_questions[0])


def test_seeds_that_agree_leave_the_interval_of_the_questions():
    generator = np.random.default_rng(4)
    run = {"gqa": (100.0 * (generator.random(400) < 0.8)).tolist()}
    full = {"gqa": [100.0] * 400}
    drawn = resample_questions([run, run, run], full)
    assert resample_seeds(drawn, of="x") == pytest.approx(drawn[:, 0])


def test_every_method_draws_its_seeds_by_itself():
    runs, full = seeds_apart(0.1, 400, np.random.default_rng(5))
    drawn = resample_questions(runs, full)
    assert np.ptp(resample_seeds(drawn, of="ours") - resample_seeds(drawn, of="ours")) == 0
    assert (
        abs(
            np.corrcoef(resample_seeds(drawn - drawn[:, :1], of="a"), resample_seeds(drawn - drawn[:, :1], of="b"))[
                0, 1
            ]
        )
        < 0.2
    )


def test_an_interval_of_95_percent_covers_in_about_95_of_100_worlds():
    """Three seeds of a normal distribution: its mean is in the interval, which a plain bootstrap often misses."""
    generator = np.random.default_rng(6)
    full = {"gqa": [100.0] * 300}
    hits = 0
    for _ in range(80):
        shares = generator.normal(0.7, 0.05, 3)
        runs = [{"gqa": (100.0 * (generator.random(300) < share)).tolist()} for share in shares]
        drawn = resample_questions(runs, full, resamples=1000)
        low, high = interval(resample_seeds(drawn, of="x"))
        hits += low <= 70.0 <= high
    assert hits >= 72  # nine in ten at least, where a plain bootstrap of seeds and questions has about three in four


def test_holm_s_rule_holds_for_methods_of_three_seeds():
    """Of twenty methods that are neither better nor worse than ours hardly ever one is said to be."""
    generator = np.random.default_rng(7)
    wrong = 0
    for _ in range(20):
        ours, *theirs = (
            resample_seeds(np.tile(generator.normal(90, spread, count), (2000, 1)), of=str(place))
            for place, (count, spread) in enumerate([(5, 0.3)] + [(3, 3.0)] * 20)
        )
        wrong += min(holm([two_sided_p(ours - values) for values in theirs])) < 0.05
    assert wrong <= 3


@pytest.mark.parametrize("full", [{}, {"gqa": [100.0]}])
def test_answers_that_cannot_be_paired_are_refused(full):
    with pytest.raises(ValueError, match="'gqa' cannot be paired"):
        resample_questions([{"gqa": [100.0, 0.0]}], full)


def test_no_answers_at_all_are_refused():
    for runs in ([], [{}]):
        with pytest.raises(ValueError, match="No benchmark has answers"):
            resample_questions(runs, {})


def test_a_full_model_without_a_right_answer_is_named():
    with pytest.raises(ValueError, match="'gqa'"):
        resample_questions([{"gqa": [0.0, 0.0]}], {"gqa": [0.0, 0.0]})


def test_runs_over_other_questions_are_refused():
    with pytest.raises(ValueError, match="'pope' was asked of one model alone"):
        lead_ci95({"gqa": [100.0]}, {"gqa": [100.0], "pope": [0.0]}, {"gqa": [100.0], "pope": [100.0]})


def test_the_lead_of_a_hand_example():
    """Four questions each: gqa 3 of 4 against 2, pope 4 against 4, and the full model has all right."""
    full = {"gqa": [100.0] * 4, "pope": [100.0] * 4}
    ours = {"gqa": [100.0, 100.0, 100.0, 0.0], "pope": [100.0] * 4}
    theirs = {"gqa": [100.0, 0.0, 100.0, 0.0], "pope": [100.0] * 4}
    # The difference of a resample is 12.5 times how often question 2 is drawn: of Binomial(4, 1/4) the 2.5 % point
    # is 0 and the 97.5 % point is 3.
    assert lead_ci95(ours, theirs, full) == pytest.approx((0.0, 37.5))
    assert lead_ci95(theirs, ours, full) == pytest.approx((-37.5, 0.0))


def test_pairing_the_two_models_makes_the_lead_surer_than_their_own_intervals_say():
    generator = np.random.default_rng(5)
    full = {"gqa": (100.0 * (generator.random(400) < 0.9)).tolist()}
    theirs = {"gqa": [v * (generator.random() < 0.6) for v in full["gqa"]]}
    ours = {"gqa": [v if generator.random() < 0.97 else 100.0 for v in theirs["gqa"]]}  # right a little more often
    low, high = lead_ci95(ours, theirs, full)
    own = ci95([ours], full)
    assert 0 < low < high and high - low < 0.5 * (own[1] - own[0])


def test_p_values_of_a_hand_example():
    assert two_sided_p(np.array([1.0] * 99)) == pytest.approx(0.02)
    assert two_sided_p(np.array([-1.0] * 3 + [1.0] * 96)) == pytest.approx(0.08)
    assert two_sided_p(np.zeros(99)) == 1.0


def test_holm_corrects_the_smallest_for_all_and_never_lets_a_larger_one_overtake():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0] and holm([]) == []
