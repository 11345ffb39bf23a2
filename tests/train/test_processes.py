"""Two processes are one run: the same losses, step by step, and one pruner."""

import subprocess
import sys
from pathlib import Path

import pytest

from diffprune.config import load_config
from diffprune.train.run import train_pruner
from tests.train import runs

LAUNCH = "-m accelerate.commands.launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no"


def test_two_processes_have_the_losses_of_one(tmp_path: Path) -> None:
    """`accelerate launch` with gloo on the CPU; a broken row gives one process a forward pass without samples."""
    model, data = runs.save_model(tmp_path / "model"), runs.save_pictures(tmp_path / "data", 104)
    (data / "77.png").write_bytes(b"")
    optim = {"batch_size": 1, "accumulate": 4, "steps": None}
    values = runs.values(model, data, optim=optim, budget={"keep": None, "range": [2, 8]}, validation={"every": 25})
    config = runs.write_config(tmp_path / "run.yaml", values)
    command = f"-m diffprune train --config {config} --out {tmp_path / 'two'} optim.accumulate=2"
    arguments = [*LAUNCH.split(), "--dynamo_backend", "no", "--main_process_port", "0", *command.split()]
    two = subprocess.Popen(
        [sys.executable, *arguments],
        env={**runs.environment(), "ACCELERATE_USE_CPU": "true"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        train_pruner(load_config(config), tmp_path / "one", quiet=True)
    finally:
        out, errors = two.communicate(timeout=200)
    assert two.returncode == 0, errors.decode()
    assert out.decode().count("the pruner:") == 1  # one of them tells
    expected = runs.losses(tmp_path / "one")
    assert len(expected) == 25 and runs.losses(tmp_path / "two") == pytest.approx(expected, rel=1e-5)
    assert '"row": 77' in (tmp_path / "two" / "broken.jsonl").read_text()
