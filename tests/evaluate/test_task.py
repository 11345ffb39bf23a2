"""Tasks: metrics by name over questions, and what guessing gets."""

import pytest

from diffprune.evaluate import metrics
from diffprune.evaluate.task import METRICS, Metric, Question, Task


def ask(answer: str, place: int, **more) -> Question:
    return Question(id=f"q{place}", prompt="what?", answer=answer, **more)


def test_a_question_has_one_accepted_answer_and_is_scored_by_itself_unless_it_says_otherwise() -> None:
    assert ask("red", 0).answers == ("red",) and ask("red", 0).group == "q0"
    assert ask("red", 0, answers=("red", "ruby"), group=3).answers == ("red", "ruby")


@pytest.mark.parametrize(
    ("metric", "questions", "outputs", "score", "raw", "chance"),
    [
        ("exact", [ask("red", 0), ask("red", 1), ask("two", 2, subset="count")], ["Red.", "blue", "two"], 200 / 3,
         200 / 3, 100.0),
        ("vqa", [ask("red", 0, answers=("red",) * 2 + ("blue",) * 8), ask("no", 1, answers=("no",) * 10)],
         ["red", "yes"], 30.0, 30.0, 50.0),
        ("choice", [ask("A", 0, choices=("x", "y")), ask("B", 1, choices=("x", "y", "z", "w"))], ["A", "A"], 50.0,
         50.0, 37.5),
        ("circular", [ask("A", i, choices=("x", "y"), group=i // 2) for i in range(4)], ["A", "A", "A", "B"], 50.0,
         50.0, 50.0),
        ("pope", [ask("yes", 0, subset="random"), ask("no", 1, subset="random")], ["yes", "no"], 100.0, 100.0,
         200 / 3),
        ("mme", [ask("yes", 0, group=0, subset="a"), ask("no", 1, group=0, subset="a"),
                 ask("yes", 2, group=1, subset="b"), ask("no", 3, group=1, subset="b")],
         ["yes", "no", "yes", "yes"], 62.5, 250.0, 37.5),
    ],
)  # fmt: skip
def test_metrics_by_name(
    metric: str, questions: list[Question], outputs: list[str], score: float, raw: float, chance: float
) -> None:
    task = Task("some", questions, METRICS[metric])
    scored = task.score(outputs)
    assert scored.score == pytest.approx(score) and scored.raw == pytest.approx(raw)
    assert sum(scored.per_question) / len(scored.per_question) == pytest.approx(score)
    assert task.chance == pytest.approx(chance)
    assert task.ceiling >= scored.score


def test_a_source_may_bring_a_metric_of_its_own() -> None:
    longest = Metric(lambda outputs, questions: metrics.mean([float(len(o)) for o in outputs]), lambda questions: 0.0)
    assert Task("own", [ask("x", 0), ask("y", 1)], longest).score(["four", ""]).score == 2.0


def test_outputs_that_do_not_match_the_questions_are_refused() -> None:
    with pytest.raises(ValueError, match="1 outputs cannot answer 2 questions: give one for each"):
        Task("two", [ask("x", 0), ask("y", 1)], METRICS["exact"]).score(["x"])


def test_a_pair_of_mme_is_right_where_both_are_however_many_pairs_its_subtask_has() -> None:
    pairs = [("a", 0), ("b", 1), ("b", 2), ("b", 3)]
    questions = [ask(word, 2 * group + place, group=group, subset=subset)
                 for subset, group in pairs for place, word in enumerate(("yes", "no"))]  # fmt: skip
    task = Task("some", questions, METRICS["mme"])
    said = ["yes", "yes", *("yes", "no"), *("no", "no"), *("yes", "no")]
    assert task.right(said) == [False, True, False, True]
    assert task.score(said).per_question[0] == 50.0  # of 200, so points do not say it
