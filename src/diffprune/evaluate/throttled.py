"""A trained pruner as training ran it, for measuring what dropping loses or gains over throttling.

The saved pruner holds the scorer alone; the throttler is in the run's last checkpoint, beside it.
"""

import copy
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from diffprune.config import RUN_FILE, RunConfig, load_config
from diffprune.methods.base import Pruner, TrainablePruner
from diffprune.saving import exported_state
from diffprune.train.checkpointing import load_latest


@dataclass(frozen=True, slots=True)
class Throttle:
    """How training ran a pruner at its end: see `PrunedVLM.throttle`."""

    tau: float
    remove_below: float = 0.0


def run_config(folder: Path) -> RunConfig | None:
    """The config of the run that a folder holds, or None where it holds a pruner alone."""
    return load_config(folder / RUN_FILE) if (folder / RUN_FILE).is_file() else None


def load_throttled(folder: Path, deployed: Pruner) -> tuple[Pruner, Throttle]:
    """The pruner with its throttler, and how the run's last steps used it.

    Args:
        folder: Of the run.
        deployed: Its saved pruner, already loaded.
    """
    config, found = run_config(folder), load_latest(folder)
    if config is None or found is None or not isinstance(deployed, TrainablePruner):
        raise ValueError(
            f"{folder} holds no training checkpoint, so there is no throttler to measure; give the folder "
            "`diffprune train` wrote, or leave --throttled out"
        )
    if deployed.hides_tokens:
        raise ValueError(
            f"{deployed.name!r} hides tokens from attention in training, which nothing can generate with; "
            f"leave --throttled out for {folder}"
        )
    state: dict[str, Tensor] = found.tensors.get("best") or found.tensors["weights"]
    pruner = copy.deepcopy(deployed)
    pruner.load_state_dict(state)
    before, after = exported_state(deployed.state_dict()), exported_state(state)
    if not all(torch.equal(before[name].cpu(), after[name].cpu()) for name in before):
        raise ValueError(f"the saved pruner and the last checkpoint of {folder} differ; let the run end with --resume")
    return pruner.eval(), Throttle(tau=config.tau.end, remove_below=config.remove_below)
