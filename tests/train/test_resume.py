"""A run that is killed, stopped or out of room goes on as if nothing had happened."""

import errno
import json
import os
import random
import shutil
import signal
from pathlib import Path

import pytest
import safetensors.torch
import torch

from diffprune.config import load_config
from diffprune.train import checkpointing
from diffprune.train.checkpointing import (
    Checkpoint,
    load_latest,
    optimizer_tensors,
    random_tensors,
    restore_optimizer,
    restore_random,
    save_checkpoint,
)
from diffprune.train.folder import alone_in, claim_folder
from tests.train import runs

STEPS = 10


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    model, data = runs.save_model(folder / "model"), runs.save_pictures(folder / "data")
    values = runs.values(
        model, data, optim={"steps": STEPS}, validation={"every": 4}, budget={"keep": None, "range": [2, 8]}
    )
    return runs.write_config(folder / "run.yaml", values)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    with runs.ForkServer(tmp_path_factory.mktemp("server") / "log") as server:
        yield server


def last(folder: Path) -> Path:
    return checkpointing.list_checkpoints(folder)[0]


@pytest.fixture(scope="module")
def unbroken(config: Path, server: runs.ForkServer) -> Path:
    folder = config.parent / "unbroken"
    server.start("train", "--config", str(config), "--out", str(folder))
    assert server.wait() == 0, server.log.read_text()
    return folder


def assert_same_run(folder: Path, unbroken: Path) -> None:
    assert runs.losses(folder) == runs.losses(unbroken)
    assert (folder / "model.safetensors").read_bytes() == (unbroken / "model.safetensors").read_bytes()
    for name in ("weights", "optimizer", "best", "random"):
        ours, theirs = (last(path) / f"{name}.safetensors" for path in (folder, unbroken))
        assert ours.read_bytes() == theirs.read_bytes(), name


KILLS = [("begin", 0, None), ("checkpoint", 4, 2), ("metrics", 7, 6)]
MORE_KILLS = [
    ("begin", 0, None),
    ("metrics", 1, None),
    ("checkpoint", 4, 2),
    ("checkpoint", 8, 6),
    ("metrics", 9, 8),
]


@pytest.mark.parametrize("kills", [KILLS, pytest.param(MORE_KILLS, marks=pytest.mark.slow)], ids=["three", "five"])
def test_a_run_killed_again_and_again_ends_bit_equal(kills, config, server, unbroken):
    """SIGKILL before the first step, between two steps, and while a checkpoint is written."""
    folder = config.parent / f"killed{len(kills)}"
    command = ("train", "--config", str(config), "--out", str(folder), "--resume")
    for place, step, saved in kills:
        server.start(*command, end=(place, step, signal.SIGKILL))
        assert server.wait() == -signal.SIGKILL, server.log.read_text()
        found = load_latest(folder)
        assert (None if found is None else found.state["step"]) == saved
    server.start(*command)
    assert server.wait() == 0, server.log.read_text()
    assert_same_run(folder, unbroken)


def test_sigterm_saves_and_leaves_and_the_run_goes_on(config, server, unbroken):
    folder = config.parent / "stopped"
    command = ("train", "--config", str(config), "--out", str(folder), "--resume", "saving.every=1000")
    server.start(*command, end=("metrics", 2, signal.SIGTERM))
    assert server.wait() == 143, server.log.read_text()
    assert "everything is saved, go on with: diffprune train --resume" in server.log.read_text()
    found = load_latest(folder)
    assert found is not None and found.state["step"] == 3  # the step after the signal is finished
    assert not (folder / "model.safetensors").exists()
    server.start(*command)
    assert server.wait() == 0
    assert_same_run(folder, unbroken)


def test_a_finished_run_is_left_as_it_is(config, server, unbroken):
    folder = unbroken
    before = (folder / "model.safetensors").read_bytes()
    server.start("train", "--config", str(config), "--out", str(folder), "--resume")
    assert server.wait() == 0
    assert (folder / "model.safetensors").read_bytes() == before and len(runs.losses(folder)) == STEPS


def some(step: int) -> Checkpoint:
    return Checkpoint({"step": step}, {"weights": {"a": torch.full((4,), float(step))}})


def test_a_full_disk_leaves_the_last_checkpoint_whole(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, 2, some(2), keep=1)

    def full(path: Path, content: bytes) -> None:
        path.write_bytes(content[: len(content) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(checkpointing, "write_bytes", full)
        with pytest.raises(
            OSError, match=r"step 4 cannot be written \(No space left on device\); .*checkpoint-000002 is"
        ):
            save_checkpoint(tmp_path, 4, some(4), keep=1)
    found = load_latest(tmp_path)
    assert found is not None and found.state == {"step": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000002"]
    save_checkpoint(tmp_path, 4, some(4), keep=1)  # there is room again
    assert load_latest(tmp_path).state == {"step": 4}


def test_a_damaged_checkpoint_is_passed_over(tmp_path):
    for step in (2, 4):
        save_checkpoint(tmp_path, step, some(step), keep=2)
    path = tmp_path / "checkpoint-000004" / "weights.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert load_latest(tmp_path).state == {"step": 2}
    (tmp_path / "checkpoint-000002" / "state.json").unlink()
    assert load_latest(tmp_path) is None


def test_only_the_newest_checkpoints_stay(tmp_path):
    (tmp_path / ".unfinished-000001").mkdir()
    for step in range(1, 5):
        save_checkpoint(tmp_path, step, some(step), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-000003", "checkpoint-000004"]


def test_checkpoints_are_counted_and_not_spelled(tmp_path):
    """From a million on, a name is longer than those before it, and as text it would come first."""
    for step in (999_998, 999_999, 1_000_000, 1_000_001):
        save_checkpoint(tmp_path, step, some(step), keep=2)
    assert [path.name for path in checkpointing.list_checkpoints(tmp_path)] == [
        "checkpoint-1000001",
        "checkpoint-1000000",
    ]
    assert load_latest(tmp_path).state == {"step": 1_000_001}


def test_folders_of_the_user_are_left_alone(tmp_path):
    for name in ("checkpoint-best", "checkpoint-000001-copy", "checkpoint-000000"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.txt").write_text("mine")
    save_checkpoint(tmp_path, 1, some(1), keep=1)
    for name in ("checkpoint-best", "checkpoint-000001-copy"):  # as the user copied them
        shutil.copy(tmp_path / "checkpoint-000001" / "state.json", tmp_path / name)
    for step in range(2, 5):
        save_checkpoint(tmp_path, step, some(step), keep=1)
    assert len(list(tmp_path.glob("checkpoint-*/mine.txt"))) == 3
    assert load_latest(tmp_path).state == {"step": 4}


def test_a_damaged_newest_checkpoint_is_set_aside_and_written_anew(tmp_path):
    for step in (2, 4):
        save_checkpoint(tmp_path, step, some(step), keep=2)
    weights = tmp_path / "checkpoint-000004" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    checkpointing.set_damaged_aside(tmp_path)
    assert [path.name for path in checkpointing.list_checkpoints(tmp_path)] == ["checkpoint-000002"]
    assert (tmp_path / "damaged-checkpoint-000004" / "weights.safetensors").is_file()
    save_checkpoint(tmp_path, 4, some(4), keep=1)  # the good one goes only now, when there is another
    assert load_latest(tmp_path).state == {"step": 4}
    checkpointing.set_damaged_aside(tmp_path)
    assert load_latest(tmp_path).state == {"step": 4}


@pytest.mark.parametrize(
    "content",
    ["[]", "null", '{"state": 3, "digests": {}}', '{"state": {}, "digests": []}', "{", "\x00", '{"digests": {}}'],
)
def test_an_odd_state_is_passed_over(tmp_path, content):
    for step in (2, 4):
        save_checkpoint(tmp_path, step, some(step), keep=2)
    (tmp_path / "checkpoint-000004" / "state.json").write_text(content)
    assert load_latest(tmp_path).state == {"step": 2}


def test_a_changed_state_is_noticed_and_an_older_one_without_digest_still_loads(tmp_path):
    save_checkpoint(tmp_path, 2, some(2), keep=1)
    path = tmp_path / "checkpoint-000002" / "state.json"
    path.write_text(path.read_text().replace('"step": 2', '"step": 3'))
    assert load_latest(tmp_path) is None
    content = json.loads(path.read_text())
    del content["state_digest"]
    path.write_text(json.dumps(content))
    assert load_latest(tmp_path).state == {"step": 3}


def test_two_runs_in_one_folder_are_refused(tmp_path):
    with (
        alone_in(tmp_path / "run"),
        pytest.raises(ValueError, match=r"another run is writing into .*run; wait for it"),
        alone_in(tmp_path / "run"),
    ):
        pass
    with alone_in(tmp_path / "run"):  # free again
        pass


def test_the_lock_lies_in_the_run_s_own_folder_and_is_no_link(tmp_path):
    with alone_in(tmp_path / "run"), alone_in(tmp_path / "other"):
        assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "run"]
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "run" / ".lock").unlink()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "mine.txt")
    with pytest.raises(ValueError, match="is a symbolic link and is not replaced"), alone_in(tmp_path / "run"):
        pass
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_a_run_whose_newest_checkpoint_is_damaged_goes_on_from_the_one_before(config, server, unbroken):
    folder = config.parent / "damaged"
    shutil.copytree(unbroken, folder)
    newest = last(folder)
    weights = newest / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    server.start("train", "--config", str(config), "--out", str(folder), "--resume")
    assert server.wait() == 0, server.log.read_text()
    assert (folder / f"damaged-{newest.name}").is_dir() and load_latest(folder).state["step"] == STEPS
    assert_same_run(folder, unbroken)


def test_checkpoints_without_their_config_are_not_gone_on_with(config, tmp_path):
    save_checkpoint(tmp_path, 2, some(2), keep=1)
    with pytest.raises(ValueError, match=r"holds checkpoints and no run.yaml"):
        claim_folder(tmp_path, load_config(config), resume=True)
    assert not (tmp_path / "run.yaml").exists() and load_latest(tmp_path) is not None


@pytest.mark.parametrize("part", ["language_model", "vision_tower"])
def test_a_run_does_not_go_on_with_another_base_model(part, config, server, unbroken):
    folder = config.parent / f"other_{part}"
    shutil.copytree(unbroken, folder)
    weights = next((config.parent / "model").glob("*.safetensors"))
    before = weights.read_bytes()
    tensors = safetensors.torch.load(before)
    name = max((key for key in sorted(tensors) if part in key), key=lambda key: tensors[key].numel())
    if part == "vision_tower":
        assert tensors[name].numel() > 4096
        tensors[name].view(-1)[1] += 1.0  # a single value that is not among the samples
    else:
        tensors[name] = tensors[name] + 0.5
    safetensors.torch.save_file(tensors, weights, metadata={"format": "pt"})
    try:
        said = len(server.log.read_text())
        server.start("train", "--config", str(config), "--out", str(folder), "--resume")
        assert server.wait() == 2
    finally:
        weights.write_bytes(before)
    assert "the run was started on another base model" in server.log.read_text()[said:]


def test_random_generators_go_on_where_they_were():
    import numpy as np

    states = random_tensors()
    first = (random.random(), random.gauss(), np.random.rand(), np.random.randn(), torch.rand(2).tolist())
    restore_random(states)
    assert (random.random(), random.gauss(), np.random.rand(), np.random.randn(), torch.rand(2).tolist()) == first


def test_an_optimiser_goes_on_where_it_was():
    def step(weight: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        (weight**3).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    step(weight, optimizer)
    other = torch.nn.Parameter(weight.detach().clone())
    copy = torch.optim.AdamW([other], lr=0.1)
    kept = {name: value.clone() for name, value in optimizer_tensors(optimizer).items()}
    restore_optimizer(copy, kept)
    step(weight, optimizer)
    step(other, copy)
    assert torch.equal(weight, other)
