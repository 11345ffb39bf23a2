"""The hardness term of a run: absent by default, rising with the step, and no part of validation."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from diffprune.config import make_config
from diffprune.methods.diffprune import DiffPrune
from diffprune.ops import hard_mask
from diffprune.schedules import ramp_at
from diffprune.train import run as run_module
from diffprune.train.run import train_pruner
from tests.methods.examples import make_method, make_tokens
from tests.train import runs

K = torch.tensor([4, 3, 2])


def diffprune() -> DiffPrune:
    method = make_method("diffprune", response="sigmoid")
    assert isinstance(method, DiffPrune)
    return method


def test_it_is_the_binary_cross_entropy_with_the_hard_choice_at_the_run_s_temperature() -> None:
    method, tokens = diffprune(), make_tokens()
    assert method.restrict(tokens, K, tau=0.5).penalty is None
    method.hardness = 1.5
    restricted = method.restrict(tokens, K, tau=0.5)
    chosen = hard_mask(restricted.logits, K, tokens.mask)
    wanted = [
        torch.nn.functional.binary_cross_entropy(alpha[real], hard[real].float())
        for alpha, hard, real in zip(restricted.alpha, chosen, tokens.mask, strict=True)
    ]
    torch.testing.assert_close(restricted.penalty, 1.5 * torch.stack(wanted).mean())


def test_the_ramp_is_linear_and_then_flat() -> None:
    assert [ramp_at(step, ramp_steps=4) for step in range(6)] == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]
    assert ramp_at(0, ramp_steps=0) == 1.0


def train(disk: Path, out: Path, **changes: Any) -> list[dict[str, Any]]:
    train_pruner(make_config(runs.values(disk / "model", disk / "data", **changes)), out, quiet=True)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_a_run_raises_it_step_by_step_and_hardens_the_weights(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights: list[float] = []
    harden = run_module.Run._harden

    def watch(self: run_module.Run, weight: float) -> None:
        weights.append(weight)
        harden(self, weight)

    monkeypatch.setattr(run_module.Run, "_harden", watch)
    still = {"tau": {"start": 1.0, "end": 1.0}, "optim": {"lr": 0.05}}  # the temperature hardens nothing
    soft = train(disk, tmp_path / "soft", **still)
    assert set(weights) == {0.0}
    weights.clear()
    hard = train(disk, tmp_path / "hard", hardness=50.0, hardness_ramp=2, **still)
    assert weights == [0.0, 25.0, 50.0, 0.0, 50.0, 50.0, 50.0, 0.0]  # six steps, a validation after the third and last
    entropies = [[one["entropy"] for one in records if one["kind"] == "train"] for records in (soft, hard)]
    assert entropies[0][:2] == entropies[1][:2] and entropies[1][-1] < entropies[0][-1] - 0.05
    assert hard[1]["loss"] > soft[1]["loss"] + 1  # the term is in the loss that is told
    checked = [record for record in hard if record["kind"] == "validation"]
    assert all(record["throttled"] < 10 for record in checked)  # and not in this one


def test_another_method_has_no_such_term(disk: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"hardness=1\.0 is a term of diffprune's loss, and 'gumbel_ste' has its own"):
        train(disk, tmp_path, method={"name": "gumbel_ste"}, hardness=1.0)
    with pytest.raises(ValueError, match=r"hardness_ramp is 1\.5"):
        make_config(runs.values(disk / "model", disk / "data", hardness_ramp=1.5))
