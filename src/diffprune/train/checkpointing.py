"""Training checkpoints: a folder that is there whole or not at all, whatever happens while it is written.

    checkpoint-000400/  weights.safetensors  optimizer.safetensors  best.safetensors  random.safetensors  state.json

It is written under another name, brought to the disk, and only then renamed; the one before goes afterwards.
"""

import hashlib
import json
import logging
import os
import random
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from diffprune.atomic import sync_folder
from diffprune.json_files import read_json

logger = logging.getLogger("diffprune")

PREFIX, UNFINISHED, DAMAGED = "checkpoint-", ".unfinished-", "damaged-"
STATE_FILE = "state.json"


@dataclass(slots=True)
class Checkpoint:
    """Everything a run needs to go on.

    Args:
        state: Plain values: the step, the best validation, what was broken.
        tensors: By file: "weights" (scorer and throttler), "optimizer", "best", "random".
    """

    state: dict[str, Any]
    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)


def save_checkpoint(folder: Path, step: int, checkpoint: Checkpoint, *, keep: int) -> Path:
    """Write a checkpoint and let the oldest go; where that fails, the checkpoints of before are untouched.

    Args:
        keep: Checkpoints that stay.
    """
    final, new = folder / f"{PREFIX}{step:06d}", folder / f"{UNFINISHED}{step:06d}"
    if final.exists():  # made a moment ago, on another occasion of the same step
        return final
    remove_unfinished(folder)
    with writing(f"the checkpoint of step {step}", folder):
        try:
            new.mkdir(parents=True)
            digests = {}
            for name, tensors in checkpoint.tensors.items():
                plain = {key: value.detach().to("cpu", copy=True).contiguous() for key, value in tensors.items()}
                content = safetensors.torch.save(plain)
                digests[name] = _digest(content)
                write_bytes(new / f"{name}.safetensors", content)
            state = {"state": checkpoint.state, "state_digest": _state_digest(checkpoint.state), "digests": digests}
            write_bytes(new / STATE_FILE, json.dumps(state, allow_nan=False).encode())
            os.replace(new, final)
            sync_folder(folder)
        except OSError:
            shutil.rmtree(new, ignore_errors=True)
            raise
    for old in list_checkpoints(folder)[keep:]:
        shutil.rmtree(old, ignore_errors=True)
    return final


@contextmanager
def writing(what: str, folder: Path, *, of_run: bool = True) -> Iterator[None]:
    """Where the disk refuses what is written inside, one sentence: what, why, which checkpoint is whole, the way out.

    Args:
        what: Is written, in words.
        folder: Where room is to be made.
        of_run: Whether it is the run's, with its checkpoints.
    """
    try:
        yield
    except OSError as error:
        latest = (list_checkpoints(folder) or [None])[0] if of_run else None
        if latest is not None:
            way = f"{latest} is whole: make room in {folder} and go on with --resume"
        elif of_run:  # then the folder is free again (`claimed`)
            way = f"no checkpoint has been written yet: make room in {folder} and start again"
        else:
            way = f"make room in {folder} and go on with --resume"
        raise OSError(f"{what} cannot be written ({error.strerror or error}); {way}") from error


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def list_checkpoints(folder: Path) -> list[Path]:
    """The folder's checkpoints, the newest first; a folder of such a name without our state file is not ours."""
    found = [
        (int(match[1]), path)
        for path in folder.glob(f"{PREFIX}*")
        if (match := re.fullmatch(PREFIX + r"(\d+)", path.name)) and (path / STATE_FILE).is_file()
    ]
    return [path for _, path in sorted(found, reverse=True)]


def remove_unfinished(folder: Path) -> None:
    """Clear away what a run left that was ended in the middle of writing."""
    for path in folder.glob(f"{UNFINISHED}*"):
        shutil.rmtree(path, ignore_errors=True)


def load_latest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint that is whole, or None where there is none; a damaged one is passed over."""
    for path in list_checkpoints(folder):
        try:
            return _read(path)
        except (OSError, ValueError):
            continue
    return None


def set_damaged_aside(folder: Path) -> None:
    """Rename checkpoints newer than the newest whole one, so that the run can write theirs anew; nothing is deleted."""
    for path in list_checkpoints(folder):
        try:
            _read(path)
            return
        except (OSError, ValueError) as error:
            aside = folder / f"{DAMAGED}{path.name}"
            shutil.rmtree(aside, ignore_errors=True)  # of an earlier time
            os.replace(path, aside)
            logger.warning("%s; it is now %s, and the run goes on from what is before it", error, aside.name)


def _read(path: Path) -> Checkpoint:
    """A checkpoint, every file of it compared with its digest; `ValueError` where one is not what was written."""
    content = read_json(path / STATE_FILE)
    state, digests = (content.get(key) for key in ("state", "digests")) if isinstance(content, dict) else (None, None)
    if not isinstance(state, dict) or not isinstance(digests, dict):
        raise ValueError(f"{path / STATE_FILE} is damaged")
    # Checkpoints of before 2026-11-18 have no digest of their state.
    if content.get("state_digest", _state_digest(state)) != _state_digest(state):
        raise ValueError(f"{path / STATE_FILE} is damaged")
    if set(digests) != {file.stem for file in path.glob("*.safetensors")}:
        raise ValueError(f"{path} does not hold the files that its {STATE_FILE} names")
    tensors = {}
    for name, digest in digests.items():
        raw = (path / f"{name}.safetensors").read_bytes()
        if _digest(raw) != digest:
            raise ValueError(f"{path / name}.safetensors is damaged")
        tensors[name] = safetensors.torch.load(raw)
    return Checkpoint(state, tensors)


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _state_digest(state: Mapping[str, Any]) -> str:
    return _digest(json.dumps(state, sort_keys=True).encode())


# --- the optimiser and the random generators as plain tensors -------------------------------------------------------


def optimizer_tensors(optimizer: Any) -> dict[str, Tensor]:
    """AdamW's moments and counts as `index.name`; learning rates follow from the step and are not kept."""
    state = optimizer.state_dict()["state"]
    return {f"{index}.{name}": value for index, entry in state.items() for name, value in entry.items()}


def restore_optimizer(optimizer: Any, tensors: Mapping[str, Tensor]) -> None:
    """Put those tensors back."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def random_tensors() -> dict[str, Tensor]:
    """The states of torch's, NumPy's and Python's own generators."""
    _, keys, place, has_gauss, gauss = np.random.get_state(legacy=True)
    version, words, following = random.getstate()
    states = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
        "numpy_place": torch.tensor([place, has_gauss]),
        "numpy_gauss": torch.tensor([gauss], dtype=torch.float64),
        "python": torch.tensor([version, *words]),
        "python_gauss": torch.tensor([] if following is None else [following], dtype=torch.float64),
    }
    return states | {f"cuda.{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}


def restore_random(states: Mapping[str, Tensor]) -> None:
    """Put those states back."""
    torch.set_rng_state(states["torch"])
    place, has_gauss = states["numpy_place"].tolist()
    keys = states["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, place, has_gauss, states["numpy_gauss"].item()))
    version, *words = states["python"].tolist()
    following = states["python_gauss"].tolist()
    random.setstate((version, tuple(words), following[0] if following else None))
    cuda = sorted((key for key in states if key.startswith("cuda.")), key=lambda key: int(key[5:]))
    if torch.cuda.device_count() == len(cuda):
        torch.cuda.set_rng_state_all([states[key] for key in cuda])
