"""Two processes are one run: the same losses, step by step, and one pruner."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from diffprune.config import BackboneConfig, load_config
from diffprune.model import PrunedVLM
from diffprune.train.frozen import load_frozen, recomputing, require_whole_layers
from diffprune.train.run import train_pruner
from tests import tiny
from tests.train import runs

LAUNCH = f"-m accelerate.commands.launch --config_file {runs.ROOT / 'configs/accelerate/two_gpus.yaml'}"


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process; a broken row gives one of two processes a forward pass without samples."""
    folder = tmp_path_factory.mktemp("one")
    model, data = runs.save_model(folder / "model"), runs.save_pictures(folder / "data", 40)
    (data / "27.png").write_bytes(b"")
    values = runs.values(
        model,
        data,
        optim={"batch_size": 1, "accumulate": 4, "steps": None},
        data={"validation": 5, "max_broken": 0.1},  # one of two processes has fewer than the other
        budget={"keep": None, "range": [2, 8]},
        validation={"every": 7},
        saving={"every": 3, "keep": 9},
    )
    train_pruner(load_config(runs.write_config(folder / "run.yaml", values)), folder / "out", quiet=True)
    return folder


def launch(arguments: str) -> str:
    """What two processes print that train together, with gloo on the CPU."""
    two = subprocess.run(
        [sys.executable, *LAUNCH.split(), "--main_process_port", "0", "-m", "diffprune", "train", *arguments.split()],
        env={**runs.environment(), "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        timeout=600,  # hangs; a busy machine may take minutes
        check=False,
    )
    assert two.returncode == 0, two.stderr.decode()
    return two.stdout.decode()


SHARDED = "backbone.shard=true optim.gradient_checkpointing=true"


@pytest.mark.parametrize("shard", ["", pytest.param(SHARDED, marks=pytest.mark.slow)])
def test_two_processes_have_the_losses_of_one(shard: str, one: Path, tmp_path: Path) -> None:
    """With `shard` each process holds half of every decoder layer."""
    printed = launch(f"--config {one / 'run.yaml'} --out {tmp_path} optim.accumulate=2 {shard}")
    assert printed.count("the pruner:") == 1  # one of them tells
    expected = runs.losses(one / "out")
    assert len(expected) == 8 and runs.losses(tmp_path) == pytest.approx(expected, rel=1e-5)
    assert '"row": 27' in (tmp_path / "broken.jsonl").read_text()


@pytest.mark.slow
def test_a_run_of_one_process_goes_on_with_two_and_again_with_one(one: Path, tmp_path: Path) -> None:
    """The first 3 steps are one process's and stay; what follows agrees with it to 1e-5."""
    folder = tmp_path / "run"
    shutil.copytree(one / "out", folder)
    expected = runs.losses(folder)
    broken = (folder / "broken.jsonl").read_text()
    runs.forget_after(folder, 3)
    assert "the pruner:" in launch(f"--resume {folder} optim.accumulate=2")
    two = runs.losses(folder)
    assert two[:3] == expected[:3] and two != expected and two == pytest.approx(expected, rel=1e-5)
    runs.forget_after(folder, 6)
    train_pruner(load_config(folder / "run.yaml", ["optim.accumulate=4"]), folder, resume=True, quiet=True)
    again = runs.losses(folder)
    assert again[:6] == two[:6] and again == pytest.approx(expected, rel=1e-5)
    assert (folder / "broken.jsonl").read_text() == broken


def test_a_sharded_model_holds_its_layers_in_parts_and_the_rest_whole(tmp_path: Path) -> None:
    config = BackboneConfig(name="llava", weights=str(runs.save_model(tmp_path)), dtype="float32")
    device = torch.device("cpu")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        model, processor, _ = load_frozen(config, device, init_device_mesh("cpu", (1,)))
        split = {name for name, value in model.named_parameters() if isinstance(value, DTensor)}
        assert split == {name for name, _ in model.named_parameters() if "language_model.layers." in name}
        losses = []
        for base in (model, load_frozen(config, device)[0]):
            torch.manual_seed(0)
            vlm = PrunedVLM(base, processor, method="diffprune", keep=4)
            require_whole_layers(vlm.method, vlm.backbone)
            batch = vlm.prepare([tiny.picture()], ["?"], ["a"])
            with recomputing(vlm.backbone, enabled=True):
                loss = vlm.loss(batch, generator=torch.Generator().manual_seed(0))
                loss.backward()
            learned = [value.grad for value in vlm.method.parameters() if value.requires_grad]
            losses.append((loss.item(), sum(grad.abs().sum().item() for grad in learned if grad is not None)))
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)
        for name in ("gumbel_ste-masked", "dynamicvit", "p_mod"):
            vlm = PrunedVLM(model, processor, method=name, keep=4)
            with pytest.raises(ValueError, match=rf"backbone.shard is true, and {name} runs decoder layers one by one"):
                require_whole_layers(vlm.method, vlm.backbone)
    finally:
        distributed.destroy_process_group()
