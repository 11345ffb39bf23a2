"""From what lmms-eval keeps of each question to scored units: the harness judges, the units are ours.

A score of the harness is one number over a task; retention, its interval and leads need one value for each independent
unit, of which the score is the mean. Whether an answer is right is the harness's own verdict throughout, and the mean
of the units is held against the harness's score by whoever reads (`harness.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from diffprune.evaluate import metrics
from diffprune.integrations.suites import ROTATION, Benchmark

Sample = Mapping[str, Any]  # what the harness keeps of one question


def counted(benchmark: Benchmark, samples: Sequence[Sample]) -> list[Sample]:
    """The samples that have one of the benchmark's score keys, in the order of the data; SEED's videos have not."""
    found = [sample for sample in samples if any(key in sample for key in benchmark.keys)]
    return sorted(found, key=lambda sample: sample["doc_id"])


def read(benchmark: Benchmark, samples: Sequence[Sample]) -> tuple[metrics.Scored, float]:
    """The score in percent with its units, and the most points there are in the benchmark's own unit."""
    verdicts = [next(sample[key] for key in benchmark.keys if key in sample) for sample in samples]
    scored = READINGS[benchmark.reading](verdicts)
    subtasks = {verdict["category"] for verdict in verdicts} if benchmark.reading == "pairs" else ()
    return scored, float(metrics.MME_SUBTASK_MAXIMUM * len(subtasks) or 100)


def _values(verdicts: Sequence[float]) -> metrics.Scored:
    return metrics.mean([100.0 * float(value) for value in verdicts])


def _f1(verdicts: Sequence[Mapping[str, str]]) -> metrics.Scored:
    """F1 of yes over all rows; an answer that is neither yes nor no is no miss: the harness leaves it out."""
    above, below = [], []
    for one in verdicts:
        said, true = one["prediction"], one["ground_truth"]
        above.append(2.0 * (said == true == "yes"))
        below.append(above[-1] + float((true, said) in (("no", "yes"), ("yes", "no"))))
    return metrics.mean(metrics.ratio_units(above, below))


def _pairs(verdicts: Sequence[Mapping[str, Any]]) -> metrics.Scored:
    return metrics.pair_score(
        [one["score"] == 1.0 for one in verdicts],
        [one["question_id"] for one in verdicts],
        [one["category"] for one in verdicts],
    )


def _letters(verdicts: Sequence[Mapping[str, str]]) -> metrics.Scored:
    same = [one["pred"].lower().strip() == one["answer"].lower().strip() for one in verdicts]
    return metrics.mean([100.0 * value for value in same])


def _circular(verdicts: Sequence[Mapping[str, Any]]) -> metrics.Scored:
    """The share of questions right in every rotation; a rotation without its question does not count."""
    import pandas  # pyright: ignore[reportMissingImports]
    from lmms_eval.tasks.mmbench.mmbench_evals import MMBench_Evaluator  # pyright: ignore[reportMissingImports]

    judge = MMBench_Evaluator()
    table = pandas.DataFrame(list(verdicts)).sort_values(by="index")
    table["prediction"] = table["prediction"].astype(str)
    answers = dict(zip(table["index"], table["answer"], strict=True))
    units = []
    for index in table["index"][table["index"] < ROTATION]:
        rotations = table[table["index"] % ROTATION == index]
        units.append(100.0 * judge.eval_sub_data(rotations, answers, static_only=True))
    return metrics.mean(units)


def static_circular(results: Sequence[Mapping[str, Any]], args: Any) -> float:
    """MMBench's score by rules alone, as the harness's static task gives it, for a task that would ask a judge."""
    return _circular(results).score


READINGS: dict[str, Callable[[Sequence[Any]], metrics.Scored]] = {
    "value": _values,
    "f1": _f1,
    "pairs": _pairs,
    "circular": _circular,
    "letter": _letters,
}
