"""Rows of scored answers: summaries, leads that hold, where a run comes from, and how far repetitions lie apart."""

import numpy as np
import pytest

from diffprune.evaluate.answers import Answers, Entry
from diffprune.evaluate.rows import quality_rows
from diffprune.results import check_rows


def answered(method: str, keep: int | float, seed: int, right: float | str, count: int = 200) -> Answers:
    """Answers to questions of one task; `right` is a share drawn by the run's own generator, or marks of 0 and 1."""
    if isinstance(right, str):
        marks = [mark == "1" for mark in right]
    else:
        name = sum(map(ord, method))
        marks = (np.random.default_rng([name, int(keep), seed]).random(count) < right).tolist()
    units = [100.0 * mark for mark in marks]
    score = {"gqa": sum(units) / len(units)}
    said = ["yes" if mark else "no" for mark in marks]
    return Answers(Entry(method, keep, seed), said, score, dict(score), {"gqa": units}, seconds=1.0)


FULL = answered("full", 1.0, 0, 1.0)


def summaries(runs: list[Answers], full: Answers = FULL, **more) -> dict[tuple[str, int | float], dict]:
    rows = quality_rows([full, *runs], full, **more)
    check_rows(rows)
    return {(row["method"], row["keep"]): row for row in rows if "retention" in row}


def test_the_lead_is_of_retention_averaged_over_seeds() -> None:
    full = answered("full", 1.0, 0, "11111111")
    ours = [answered("diffprune", 64, 1, "11101111"), answered("diffprune", 64, 2, "11111011")]
    rows = summaries([*ours, answered("random", 64, 0, "10101111")], full, versus="diffprune")
    assert rows["diffprune", 64]["retention"] == pytest.approx(87.5)  # 7 of 8 with either seed
    assert rows["random", 64]["retention"] == pytest.approx(75.0)
    assert rows["random", 64]["lead"] == pytest.approx(12.5)
    low, high = rows["random", 64]["lead_ci95"]
    assert low < 12.5 < high and not rows["random", 64]["lead_holds"]  # eight questions show nothing
    assert "lead" not in rows["diffprune", 64] and "lead" not in rows["full", 1.0]


def test_a_row_says_what_its_interval_is_over_and_one_run_has_no_deviation() -> None:
    rows = summaries([answered("ours", 64, seed, 0.9) for seed in (1, 2, 3)] + [answered("other", 64, 0, 0.8)])
    assert rows["ours", 64]["ci_over"] == "seeds and questions" and rows["ours", 64]["retention_std"] > 0
    assert rows["other", 64]["ci_over"] == "questions" and "retention_std" not in rows["other", 64]


def test_a_lead_that_depends_on_the_seed_does_not_hold_though_the_questions_alone_would_say_so() -> None:
    shares = (0.97, 0.80, 0.72)  # by seed, against 0.75: ahead on average
    ours = [answered("ours", 8, seed, share, 2000) for seed, share in enumerate(shares)]
    theirs, full = answered("theirs", 8, 0, 0.75, 2000), answered("full", 1.0, 0, 1.0, 2000)
    row = summaries([*ours, theirs], full, versus="ours")["theirs", 8]
    assert row["lead"] > 6 and row["lead_ci95"][0] < 0 < row["lead_ci95"][1] and not row["lead_holds"]
    one = summaries([answered("ours", 8, 0, 0.83, 2000), theirs], full, versus="ours")["theirs", 8]
    assert one["lead_holds"] and one["lead_p"] < 0.05


def test_what_the_same_trainings_do_two_ways_is_compared_seed_by_seed() -> None:
    """Seeds lie 20 points apart, and each loses five points otherwise: that is sure, whatever the next seed is."""
    shares = {1: 0.95, 2: 0.75, 3: 0.85}
    full = answered("full", 1.0, 0, 1.0, 400)
    hard = [answered("diffprune", 64, seed, share, 400) for seed, share in shares.items()]

    def fewer(name: str) -> list[Answers]:  # every 20th question is lost
        marks = [
            ["0" if place % 20 == 0 else "01"[said == "yes"] for place, said in enumerate(one.said)] for one in hard
        ]
        return [answered(name, 64, one.entry.seed, "".join(kept)) for one, kept in zip(hard, marks, strict=True)]

    for name in ("diffprune-throttled", "diffprune otherwise", "diffprune-diverse", "diffprune-diverse[beta=1]"):
        row = summaries([*hard, *fewer(name)], full, versus="diffprune")[name, 64]
        low, high = row["lead_ci95"]
        assert row["lead_holds"] and 0 < low < row["lead"] < high < 8
        assert ("gap" in row) == name.endswith("-throttled")
        if "gap" in row:
            assert row["gap"] == pytest.approx(-row["lead"])
            assert row["gap_ci95"] == pytest.approx([-high, -low], abs=0.3)
    for name in ("gumbel_ste", "diffprune-paper", "diffprune[noise=unit]"):  # other trainings
        assert not summaries([*hard, *fewer(name)], full, versus="diffprune")[name, 64]["lead_holds"]
    odd = summaries([*hard, *fewer("diffprune-throttled")[:2]], full, versus="diffprune")["diffprune-throttled", 64]
    assert not odd["lead_holds"]  # other seeds


def test_leads_are_corrected_for_their_number() -> None:
    """A lead that would hold alone (p of 0.01 to 0.04) does not among forty that show nothing."""
    ours, near = answered("ours", 8, 0, 0.90), answered("near", 8, 7, 0.83)
    alone = summaries([ours, near], versus="ours")["near", 8]
    assert 0.005 < alone["lead_p"] < 0.05 and alone["lead_holds"]
    equal = [Answers(Entry(f"m{n}", 8, 0), ours.said, ours.score, ours.raw, ours.units) for n in range(40)]
    among = summaries([ours, near, *equal], versus="ours")["near", 8]
    assert among["lead_ci95"][0] > 0 and among["lead_p"] > 0.05 and not among["lead_holds"]


def test_a_clear_lead_holds_among_very_many() -> None:
    ours, far = answered("ours", 8, 0, 0.95), answered("far", 8, 0, 0.2)
    equal = [Answers(Entry(f"m{n}", 8, 0), ours.said, ours.score, ours.raw, ours.units) for n in range(300)]
    assert summaries([ours, far, *equal], versus="ours")["far", 8]["lead_holds"]


def test_best_and_second_are_marked_only_where_they_are_ahead_of_all_below() -> None:
    shares = {"first": 0.95, "second": 0.8, "third": 0.5, "oracle": 0.99, "first-throttled": 0.99}
    rows = summaries([answered(name, 8, 0, share) for name, share in shares.items()])
    assert {name: row.get("rank") for (name, _), row in rows.items() if name != "full"} == {
        "first": 1, "second": 2, "third": None, "oracle": None, "first-throttled": None,
    }  # fmt: skip
    marks = {"a": 160, "b": 159, "c": 20}  # of 200, the same ones: a is ahead of b by one question
    near = summaries([answered(name, 8, 0, "1" * right + "0" * (200 - right)) for name, right in marks.items()])
    assert not any("rank" in row for row in near.values())  # nobody is best, so nobody is second
    seeds = [answered("ours", 8, seed, share) for seed, share in enumerate((0.99, 0.5, 0.9))]
    assert not any("rank" in row for row in summaries([*seeds, answered("b", 8, 0, 0.7)]).values())


@pytest.mark.parametrize("versus", ["ours", "near"])
def test_a_mark_claims_no_lead_that_the_correction_does_not_hold(versus: str) -> None:
    two = [answered("ours", 8, 0, 0.90), answered("near", 8, 7, 0.83)]
    assert summaries(two, versus=versus)["ours", 8]["rank"] == 1
    same = two[("ours", "near").index(versus)]
    more = [Answers(Entry(f"m{n}", 4, 0), same.said, same.score, same.raw, same.units) for n in range(40)]
    more.append(Answers(Entry(versus, 4, 0), same.said, same.score, same.raw, same.units))
    rows = summaries([*two, *more], versus=versus)
    assert "rank" not in rows["ours", 8] and "rank" not in rows["near", 8]


def test_rows_say_where_a_run_comes_from_and_summaries_name_each_origin_once() -> None:
    runs = [answered("ours", 64, seed, 0.9) for seed in (1, 2, 3)]
    origins = {
        ("ours", 64, seed): {"recipe": "bridge", "choice": "top-k", "commit": commit, "command": f"eval {commit}"}
        for seed, commit in ((1, "abc"), (2, "abc"), (3, "def"))
    }
    rows = quality_rows([FULL, *runs], FULL, origins=origins)
    check_rows(rows)
    own = [row["commit"] for row in rows if row["method"] == "ours" and "score" in row]
    assert own == ["abc", "abc", "def"] and "commit" not in rows[0]
    summary = next(row for row in rows if row["method"] == "ours" and "retention" in row)
    assert (summary["recipe"], summary["commit"]) == ("bridge", "abc, def")
    assert summary["command"] == "eval abc && eval def"


def test_repetitions_of_a_training_tell_how_far_runs_with_one_seed_lie_apart() -> None:
    full = answered("full", 1.0, 0, "1111111111")
    runs = [answered("ours", 8, 42, "1111111110"), answered("ours", 8, 7, "1111111100")]
    again = [answered("again", 8, 42, "1111111000"), answered("again", 8, 7, "1111111100")]
    rows = summaries([*runs, *again], full, repeats={"ours": ["again"]})
    assert rows["ours", 8]["n_seeds"] == 2 and ("again", 8) not in rows  # they are no further seeds
    # seed 42: 90 and 70, variance 200; seed 7: 80 and 80; pooled over two degrees of freedom
    assert rows["ours", 8]["repeat_std"] == pytest.approx(10.0)
    assert rows["ours", 8]["repeat_of"] == "2 runs of seed 42, 2 runs of seed 7"
    with pytest.raises(ValueError, match="no answers of 'agian', which is named as a repetition of 'ours'"):
        summaries([*runs, *again], full, repeats={"ours": ["agian"]})


def test_one_token_is_not_all_of_them() -> None:
    """1 and 1.0 are equal numbers and other budgets: the full model's row is not at that of one token."""
    ours, other = answered("ours", 1, 0, 0.9), answered("other", 1, 0, 0.5)
    rows = summaries([ours, other], versus="ours")
    assert "lead" not in rows["full", 1.0] and rows["other", 1]["lead"] > 0
    alone = summaries([answered("ours", 2, 0, 0.9), answered("other", 2, 0, 0.5)], versus="ours")
    assert rows["other", 1]["lead_p"] == alone["other", 2]["lead_p"]  # one lead, corrected for one
