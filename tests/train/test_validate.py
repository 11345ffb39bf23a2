"""What a run measures and starts from, with weights that never move: nothing else may change the numbers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from diffprune.methods.diffprune import DiffPrune
from diffprune.model import PrunedVLM
from diffprune.train import trainer as trainer_module
from diffprune.train.frozen import load_frozen
from diffprune.train.objective import Objective
from tests.train import runs
from tests.train.runs import train
from tests.train.test_run import records

STILL = {"lr": 1e-60, "steps": 4}  # too small a rate to move any weight


@pytest.fixture
def ranked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scorers that start with an opinion; with a head of zeros no temperature would matter."""
    start = DiffPrune.start_training

    def with_opinion(self: Any) -> None:
        start(self)
        nn.init.normal_(self.scorer.head.weight, std=2.0)

    monkeypatch.setattr(DiffPrune, "start_training", with_opinion)


@pytest.mark.usefixtures("ranked")
def test_validation_has_the_final_temperature_and_the_same_noise_at_every_step(disk: Path, tmp_path: Path) -> None:
    throttled = {}
    for end in (0.05, 1.0):
        tau = {"start": 2.0, "end": end, "anneal_steps": 4}
        train(disk, tmp_path / str(end), optim=STILL, validation={"every": 1}, tau=tau, recipe="paper")
        checked = records(tmp_path / str(end), "validation")
        assert len(checked) == 4 and len({record["hard"] for record in checked}) == 1
        assert len({record["throttled"] for record in checked}) == 1
        throttled[end] = checked[0]["throttled"]
    assert abs(throttled[0.05] - throttled[1.0]) > 1e-5, "the temperature must matter"


def test_a_loss_is_divided_by_the_answer_tokens_of_the_global_batch(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    divisors: list[float] = []
    counted: list[int] = []
    take_step, forward = trainer_module.Trainer.take_step, Objective.forward

    def watched(self: Any, parts: Any, **options: Any) -> Any:
        answers = [answer for part in parts for sample in part.samples for answer in sample.answers]
        counted.append(sum(len(self.vlm.backbone._answer_ids(answer)) for answer in answers))
        return take_step(self, parts, **options)

    def noted(self: Any, samples: Any, step: Any, tau: float, num_targets: Any, **options: Any) -> Any:
        if isinstance(step, int):  # a training step; validation has a word in its place
            divisors.append(num_targets.item())
        return forward(self, samples, step, tau, num_targets, **options)

    monkeypatch.setattr(trainer_module.Trainer, "take_step", watched)
    monkeypatch.setattr(Objective, "forward", noted)
    train(disk, tmp_path, optim={"steps": 2})
    assert divisors == [float(count) for count in counted for _ in range(2)]  # two forward passes a step
    assert len(counted) == 2 and min(counted) > 4


def test_what_loading_draws_does_not_decide_where_the_scorer_starts(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_and_draw(*arguments: Any) -> Any:
        loaded = load_frozen(*arguments)
        torch.rand(7)
        return loaded

    train(disk, tmp_path / "a", optim={"steps": 1}, validation={"every": 1})
    monkeypatch.setattr(trainer_module, "load_frozen", load_and_draw)
    train(disk, tmp_path / "b", optim={"steps": 1}, validation={"every": 1})
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_a_loss_that_rises_over_the_run_is_validated_as_it_will_be_at_the_end(disk: Path, tmp_path: Path) -> None:
    """Else its first validations are the best ones, whatever was learned."""
    still = {"lr": 1e-60, "steps": 3}
    train(disk, tmp_path, method={"name": "visionselector", "ramp_steps": 3}, optim=still, validation={"every": 1})
    throttled = [record["throttled"] for record in records(tmp_path, "validation")]
    assert throttled == pytest.approx([throttled[0]] * 3)
    assert runs.losses(tmp_path)[0] < throttled[0]


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_validation_without_a_number_ends_the_run_in_a_sentence(
    loss: float, disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Objective.forward

    def overflown(self: Any, samples: Any, step: Any, *given: Any, **options: Any) -> Any:
        value, entropy = forward(self, samples, step, *given, **options)
        return (value if isinstance(step, int) or options["kind"] != "hard" else value * loss), entropy

    monkeypatch.setattr(Objective, "forward", overflown)
    with pytest.raises(
        ValueError, match=rf"loss of the held-out samples is {loss} \(hard\); .* backbone.dtype=bfloat16"
    ):
        train(disk, tmp_path, optim={"steps": 3})
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-000002"]


@pytest.mark.parametrize(("native", "kept"), [(False, 6), (True, 5)])
def test_a_share_is_rounded_as_it_will_be_deployed(
    native: bool, kept: int, disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts, loss = set(), PrunedVLM.loss

    def noted(self: Any, batch: Any, **options: Any) -> Any:
        counts.update(options["keep"].tolist())
        return loss(self, batch, **options)

    monkeypatch.setattr(PrunedVLM, "loss", noted)
    method = {"name": "visionselector", "native": native}
    train(disk, tmp_path, method=method, budget={"keep": 0.35}, optim={"steps": 1})
    assert counts == {kept}  # of 16 tokens
