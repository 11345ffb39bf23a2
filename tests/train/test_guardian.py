"""Runs that go wrong say so, once, in a sentence; runs that do not are silent."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from diffprune.methods.diffprune import DiffPrune
from diffprune.train.guardian import reversed_scores, signs
from diffprune.types import VisualTokens
from tests.train.runs import train
from tests.train.test_run import records

GOOD = {"hard": 0.22, "throttled": 0.20, "random": 0.53, "reversed": 1.4, "deviation": 0.8}


@pytest.mark.parametrize(
    "change, keys",
    [
        ({}, []),
        ({"deviation": 1e-5}, ["flat"]),
        ({"reversed": 0.1}, ["reversed"]),
        ({"reversed": 0.219}, []),  # not clearly
        ({"hard": 0.53}, ["random"]),
        ({"hard": 0.9, "reversed": 0.3}, ["reversed", "random"]),
        ({"hard": 0.40}, ["gap"]),
        ({"hard": 0.36}, []),  # less than half of the gain is lost
        ({"deviation": 1e-5, "reversed": 0.1, "hard": 0.53}, ["flat", "random"]),
    ],
)
def test_each_sign_has_its_sentence(change: dict[str, float], keys: list[str]) -> None:
    found = signs(GOOD | change)
    assert list(found) == keys
    assert all(sentence.endswith(("steps", "seed", "bridge", "budget.range")) for sentence in found.values())


def test_a_budget_of_all_is_the_only_sign_and_a_loss_of_another_kind_is_compared_with_nothing() -> None:
    assert list(signs(GOOD | {"hard": 0.53, "random": 0.53, "deviation": 0.0}, whole=True)) == ["whole"]
    own = {"hard": 0.40, "throttled": 0.01, "random": 0.53}
    assert list(signs(own)) == ["gap"] and not signs(own, throttles=False)


def test_a_method_that_ranks_nothing_is_asked_for_its_losses_alone() -> None:
    assert list(signs({"hard": 0.6, "throttled": 0.5, "random": 0.5})) == ["random"]


def test_scores_are_turned_around_inside_and_whole_again_after_an_error() -> None:
    class Ranked(DiffPrune):
        def __init__(self) -> None:
            nn.Module.__init__(self)

        def score(self, tokens: VisualTokens) -> Any:
            return tokens.x[..., 0]

    x, mask = torch.tensor([[[3.0], [1.0], [2.0], [100.0]]]), torch.tensor([[True, True, True, False]])
    method, tokens = Ranked(), VisualTokens(x=x, mask=mask)
    assert method.select(tokens, 1).tolist() == [[0]]
    with pytest.raises(KeyError), reversed_scores(method) as deviations:
        assert method.select(tokens, 1).tolist() == [[1]]
        raise KeyError
    assert method.select(tokens, 1).tolist() == [[0]] and "score" not in vars(method)
    assert deviations[0].tolist() == pytest.approx([(2 / 3) ** 0.5])  # of the real tokens


def test_a_scorer_that_never_learns_is_told_once_in_metrics_and_summary(disk: Path, tmp_path: Path) -> None:
    still = {"lr": 1e-60, "steps": 4}
    tau = {"start": 2.0, "end": 0.1, "anneal_steps": 1}
    summary = train(disk, tmp_path, optim=still, validation={"every": 1}, tau=tau)
    checked = records(tmp_path, "validation")
    assert "deviation" not in checked[0]  # the temperature has not settled
    assert all(record["deviation"] == 0 and "reversed" in record for record in checked[1:])
    said = [sentence for record in checked for sentence in record.get("warnings", [])]
    assert len([sentence for sentence in said if "tells no tokens apart" in sentence]) == 1
    assert summary["warnings"] == said


@pytest.mark.parametrize("budget", [{"keep": 1.0}, {"keep": 10_000}])
def test_a_budget_of_every_token_is_told_and_not_taken_for_a_bad_scorer(
    budget: dict[str, Any], disk: Path, tmp_path: Path
) -> None:
    (said,) = train(disk, tmp_path, optim={"steps": 1}, budget=budget)["warnings"]
    assert "the budget keeps every token of the held-out pictures" in said
