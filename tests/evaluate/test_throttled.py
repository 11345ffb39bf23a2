"""A trained pruner as training ran it: its throttler comes from the run's last checkpoint."""

from pathlib import Path

import pytest
import safetensors.torch
import torch

from diffprune.config import make_config
from diffprune.evaluate.files import read_questions
from diffprune.evaluate.made_by import made_by
from diffprune.evaluate.runner import Measurement
from diffprune.evaluate.throttled import load_throttled, run_config
from diffprune.model import PrunedVLM
from diffprune.saving import WEIGHTS_FILE
from diffprune.train.checkpointing import list_checkpoints
from diffprune.train.run import train_pruner
from tests.evaluate.own_questions import write_jsonl
from tests.train import runs


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    disk = tmp_path_factory.mktemp("throttled")
    model, data = runs.save_model(disk / "model"), runs.save_pictures(disk / "data", 12)
    changes = {"optim": {"steps": 2}, "tau": {"end": 0.3, "anneal_steps": 1}, "remove_below": 0.01, "seed": 9}
    train_pruner(make_config(runs.values(model, data, **changes)), disk / "run", quiet=True)
    return disk / "run"


def test_the_throttler_comes_back_with_the_run_s_last_temperature(trained: Path) -> None:
    deployed = PrunedVLM.from_pretrained(trained).method
    pruner, throttle = load_throttled(trained, deployed)
    assert (throttle.tau, throttle.remove_below) == (0.3, 0.01)
    best = safetensors.torch.load_file(list_checkpoints(trained)[0] / "best.safetensors")
    state = pruner.state_dict()
    assert set(state) == set(best) and all(torch.equal(state[name], best[name]) for name in best)
    moved = [name for name in best if not torch.equal(state[name], deployed.state_dict()[name])]
    assert moved and all(name.startswith("throttle_") for name in moved)  # the saved pruner has a block at its start
    config = run_config(trained)
    assert config is not None and config.seed == 9


def test_a_pruner_without_its_run_has_no_throttler(trained: Path, tmp_path: Path) -> None:
    vlm = PrunedVLM.from_pretrained(trained)
    vlm.save_pretrained(tmp_path)
    assert run_config(tmp_path) is None
    with pytest.raises(ValueError, match="holds no training checkpoint, so there is no throttler"):
        load_throttled(tmp_path, vlm.method)


def test_a_method_that_hides_tokens_from_attention_is_refused(trained: Path) -> None:
    vlm = PrunedVLM.from_pretrained(trained)
    hidden = vlm.with_method("dynamicvit").method
    with pytest.raises(ValueError, match="'dynamicvit' hides tokens from attention in training"):
        load_throttled(trained, hidden)


def test_a_pruner_of_other_weights_is_not_taken_for_the_run_s(trained: Path) -> None:
    assert (trained / WEIGHTS_FILE).is_file()
    vlm = PrunedVLM.from_pretrained(trained)
    with torch.no_grad():
        next(vlm.method.parameters()).add_(1.0)
    with pytest.raises(ValueError, match=r"the saved pruner and the last checkpoint of .* differ"):
        load_throttled(trained, vlm.method)


def test_answers_of_a_saved_scorer_follow_from_the_same_in_every_load(trained: Path, tmp_path: Path) -> None:
    """A loaded pruner's throttler is drawn anew and takes no part in its answers; another scorer's are told apart."""
    questions = read_questions(write_jsonl(tmp_path, 2))

    def follows(change: float = 0.0, method: str | None = None) -> dict[str, str]:
        vlm = PrunedVLM.from_pretrained(trained, method=method)
        states.append(vlm.method.state_dict())
        if change:
            weight = next(value for name, value in states[-1].items() if not name.startswith("throttle_"))
            weight.add_(change)
        run = Measurement(method="diffprune", keep=4, seed=0, pruner=vlm.method)
        return made_by(vlm, questions, [run], max_new_tokens=3)

    states: list[dict[str, torch.Tensor]] = []
    torch.manual_seed(1)
    first = follows()
    torch.manual_seed(2)
    assert follows() == first
    assert any(not torch.equal(states[0][name], states[1][name]) for name in states[0]), "both were drawn the same"
    other = follows(change=0.5)
    assert {name for name in first if other[name] != first[name]} == {"pruners"}
    one, two = (follows(method=f"diffprune-diverse[beta={beta}]") for beta in (1, 2))
    assert {name for name in one if one[name] != two[name]} == {"pruners"}, "of one scorer, chosen otherwise"
