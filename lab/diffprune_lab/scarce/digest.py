"""One number for what is frozen: the code of the world, of its tasks and of its oracle, and the weights on it.

python -m diffprune_lab.scarce.digest results/scarce_methods.json      writes it into every row of these files
"""

import argparse
import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path

from diffprune.results import read_results, write_results
from diffprune_lab.pretrain.package import weight_files
from diffprune_lab.scenes.reference import ASSETS

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


def stamp(path: Path, digest: str) -> None:
    """Write the digest into every row of a results file; all else stays. A row that has another one is no row of it."""
    found = read_results(path)
    if odd := {row["digest"] for row in found.rows if "digest" in row} - {digest}:
        raise ValueError(f"{path} has rows of another world or weights ({', '.join(sorted(odd))}): measure them anew.")
    rows = [{**row, "digest": digest} for row in found.rows]
    write_results(path, **{**dataclasses.asdict(found), "rows": rows})


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="results files of this world")
    for path in parser.parse_args(arguments).files:
        if not path.name.endswith(".answers.json"):
            stamp(path, frozen_digest(ASSETS / "scarce-llava"))


if __name__ == "__main__":
    main()
