"""Our metrics on 500 recorded answers: equal to lmms-eval's functions but where it is named and explained."""

import json
from collections import Counter

import pytest

from tests.integrations.recorded import BENCHMARKS, DIFFERENCES, EACH, make_records, ours, read_records

RECORDS = read_records()


def test_there_are_500_and_they_are_those_that_the_generator_makes() -> None:
    assert Counter(record["task"] for record in RECORDS) == dict.fromkeys(BENCHMARKS, EACH)
    assert sum(1 for record in RECORDS) == 500
    made = [json.loads(json.dumps(record)) for record in make_records()]
    assert [{key: value for key, value in record.items() if key != "harness"} for record in RECORDS] == made


@pytest.mark.parametrize("task", BENCHMARKS)
def test_every_verdict_that_differs_is_explained_and_every_explanation_is_needed(task: str) -> None:
    differ = {
        (task, record["form"])
        for record in RECORDS
        if record["task"] == task and ours(record) != pytest.approx(record["harness"], abs=1e-9)
    }
    assert differ == {place for place in DIFFERENCES if place[0] == task}


def test_both_verdicts_are_seen_on_every_benchmark() -> None:
    for task in BENCHMARKS:
        verdicts = [record["harness"] for record in RECORDS if record["task"] == task]
        assert min(verdicts) == 0.0 and max(verdicts) >= 0.9
