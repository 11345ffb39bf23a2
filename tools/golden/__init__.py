"""Golden runs: what the code answered at one commit, recorded so that a later one can be held against it.

Only the command line, `PrunedVLM`, `methods()` and the tests' tiny models are used, so that nothing here depends on
where a module lies.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
Row = dict[str, Any]


def digest(content: Any) -> str:
    """A short fingerprint of plain values."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def weights_digest(path: Path) -> str:
    """A fingerprint of the tensors of a safetensors file: names, kinds and bits."""
    from safetensors.torch import load_file

    found = hashlib.sha256()
    for name, value in sorted(load_file(path).items()):
        found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        found.update(value.contiguous().flatten().view(-1).numpy().tobytes())
    return found.hexdigest()[:16]


def shipped(name: str) -> Path:
    """The folder of a model or pruner that comes with the checkout, wherever it lies."""
    for folder in ("src", "lab"):
        for path in sorted((ROOT / folder).rglob(f"{name}/config.json")):
            return path.parent
    raise RuntimeError(f"there is no folder {name} with a config.json below src or lab")


def prepare_torch() -> None:
    import torch
    from transformers.utils.logging import disable_progress_bar

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    disable_progress_bar()
