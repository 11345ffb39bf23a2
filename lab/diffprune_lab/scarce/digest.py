"""One number for what is frozen: the code of the world, of its tasks and of its oracle, and the weights on it."""

import hashlib
from pathlib import Path

from diffprune_lab.pretrain.package import weight_files

FROZEN = ("grounds", "masks", "world", "draw", "tokens", "language", "tasks", "oracle")


def frozen_digest(weights: Path | None = None) -> str:
    """The first 16 digits of a SHA-256; without weights, of the code alone.

    Import lines do not count: where a module lies is no part of what it does.
    """
    state = hashlib.sha256()
    for name in FROZEN:
        code = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8").splitlines()
        kept = [line for line in code if not line.startswith(("from ", "import "))]
        state.update("\n".join([name, *kept]).encode())
    if weights is not None:
        files = weight_files(weights)
        if not files:
            raise ValueError(f"There are no weights in {weights}: train them with runs/train_scarce.sh.")
        for path in files:
            state.update(path.name.encode())
            state.update(path.read_bytes())
    return state.hexdigest()[:16]
