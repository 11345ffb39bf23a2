"""What the pages promise of a run holds for every method that learns, not for DiffPrune alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diffprune.config import BudgetConfig, make_config
from diffprune.methods.oc_vtp import OCVTP
from diffprune.methods.visionselector import VisionSelector
from diffprune.model import PrunedVLM
from diffprune.train.objective import Objective
from tests import tiny
from tests.train import runs
from tests.train.runs import train
from tests.train.test_learned import INSIDE, LEARNED, OPTIONS
from tests.train.test_run import records


def named(name: str, **options: Any) -> dict[str, Any]:
    return {"name": name, **OPTIONS.get(name, {}), **options}


@pytest.mark.parametrize("name", [*INSIDE, "gumbel_ste-masked"])
def test_running_layers_again_changes_neither_losses_nor_validations(name: str, disk: Path, tmp_path: Path) -> None:
    """What drops inside the language model is validated over caches, and a layer that runs again fills none."""
    for again in ("False", "True"):
        train(disk, tmp_path / again, method=named(name), optim={"gradient_checkpointing": again == "True", "steps": 2})
    assert runs.losses(tmp_path / "True") == pytest.approx(runs.losses(tmp_path / "False"), rel=1e-6)
    (again, once) = (records(tmp_path / folder, "validation")[-1] for folder in ("True", "False"))
    assert [again[key] for key in ("throttled", "hard")] == pytest.approx(
        [once[key] for key in ("throttled", "hard")], rel=1e-6
    )


@pytest.mark.parametrize("name", INSIDE)
def test_a_step_may_hold_prompts_that_keep_all_their_tokens(name: str, disk: Path, tmp_path: Path) -> None:
    """A pass whose prompts lose none has no part in the gradient; in other passes some layers may lose none."""
    keep = {"keep": None, "range": [15, 16]}  # of 16 tokens
    found = []
    for batch_size in (1, 4):
        optim = {"batch_size": batch_size, "accumulate": 4 // batch_size, "steps": 3, "weight_decay": 0.1}
        train(disk, tmp_path / str(batch_size), method=named(name), budget=keep, optim=optim)
        found.append(runs.losses(tmp_path / str(batch_size)))
    assert found[0] == pytest.approx(found[1], rel=1e-5)


@pytest.mark.parametrize("name", INSIDE)
def test_every_parameter_has_a_gradient_where_several_processes_wait_for_it(name: str, disk: Path) -> None:
    model, processor = tiny.build("llava")
    config = make_config(runs.values(disk / "model", disk / "data", method=named(name), budget={"keep": 15}))
    vlm = PrunedVLM(model, processor, method=name, keep=15, **OPTIONS.get(name, {}))
    objective = Objective(vlm, config, runs.Endless(config.data, 0))
    for keep in (15, 16):
        vlm.method.zero_grad()
        objective.config = replace(config, budget=BudgetConfig(keep=keep))
        loss, _ = objective([runs.Endless(config.data, 0).sample(1)], 0, 1.0, torch.tensor(9.0))
        loss.backward()
        assert all(parameter.grad is not None for parameter in vlm.method.parameters())


def test_what_changes_over_a_run_follows_from_its_optimiser_steps(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    monkeypatch.setattr(VisionSelector, "at_step", lambda self, step: told.append(step))
    optim = {"steps": 3, "batch_size": 2, "accumulate": 2}
    train(disk, tmp_path, method=named("visionselector"), optim=optim)
    assert told == [0, 0, 1, 1, 2, 2]  # and of no validation


@pytest.mark.parametrize("name", LEARNED)
def test_a_budget_of_all_tokens_is_told_of_every_method(name: str, disk: Path, tmp_path: Path) -> None:
    summary = train(disk, tmp_path, method=named(name), optim={"steps": 1}, budget={"keep": 1.0})
    (said,) = summary["warnings"]
    assert "the budget keeps every token of the held-out pictures" in said


def test_a_loss_of_pictures_alone_is_not_compared_with_that_of_answers(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_loss = OCVTP.own_loss
    monkeypatch.setattr(OCVTP, "own_loss", lambda *given, **options: own_loss(*given, **options) / 1000)
    summary = train(disk, tmp_path, method=named("oc_vtp"), optim={"steps": 1})
    assert summary["best"]["throttled"] < summary["best"]["hard"] < summary["random"] and not summary["warnings"]
