"""Golden runs: what the code answered at one commit, recorded so that a later one can be held against it.

    python -m tools.golden record kept train --out results/golden
    python -m tools.golden check kept train --against results/golden     # exit code 1 and one line per difference

Parts (all where none is named):
    train    20 training steps on scenes-nano in float32: every loss, bit for bit
    kept     every method on three families at two budgets: kept indices, greedy tokens, the loss of those that learn
    fast     greedy tokens of the fast path on the CPU
    resume   a training run killed by SIGKILL and resumed ends with the weights of the unbroken run
    answers  a trained pruner and every method without training on the scenes tasks; takes long and is written as it
             goes: started again, it leaves out the methods that are in its file

Losses and weights are compared bit for bit, on one thread of a CPU. Another kind of CPU may round differently: there,
record from the older commit first.
"""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tools.golden import ROOT, Row, commands, models, prepare_torch

# What a row is about; everything else in it but NOTES was measured and is compared.
KEYS = ("run", "kind", "step", "family", "method", "options", "keep", "seed")
NOTES = ("value", "clear")
PARTS = {
    "train": commands.record_train,
    "kept": models.record_kept,
    "fast": models.record_fast,
    "resume": commands.record_resume,
    "answers": commands.record_answers,
}


def about(row: Row) -> str:
    """What a row is about, in words."""
    named = [f"{key}={row[key]}" if key in ("step", "keep", "seed") else str(row[key]) for key in KEYS if key in row]
    return " ".join(named)


def differences(part: str, old: Sequence[Row], new: Sequence[Row]) -> list[str]:
    """One line for each thing that is not as it was."""
    before, after = ({about(row): row for row in rows} for rows in (old, new))
    lines = [f"{part}: {key}: no longer there" for key in before if key not in after]
    lines += [f"{part}: {key}: not recorded before" for key in after if key not in before]
    for key in before.keys() & after.keys():
        was, now = before[key], after[key]
        for name in sorted((was.keys() | now.keys()) - {*KEYS, *NOTES}):
            if was.get(name) != now.get(name):
                lines.append(f"{part}: {key}: {name} {change(name, was.get(name), now.get(name))}")
    return sorted(lines)


def change(name: str, was: Any, now: Any) -> str:
    """What became of a value; of the marks of answers, two letters each, how many are others."""
    if name == "marks" and was and now:
        pairs = [(was[i : i + 2], now[i : i + 2]) for i in range(0, max(len(was), len(now)), 2)]
        return f"of {sum(old != new for old, new in pairs)} of {len(pairs)} answers changed"
    return f"was {short(was)}, is {short(now)}"


def short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else text[:117] + "..."


def commit() -> str:
    """The last commit that changed the code that is run."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments, "--", "src", "lab"], cwd=ROOT, capture_output=True, text=True)
        return done.stdout.strip()

    return (git("log", "-1", "--format=%H") or "unknown") + ("-dirty" if git("status", "--porcelain") else "")


def processor() -> str:
    """The processor's own name, where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def write(path: Path, part: str, rows: Sequence[Row]) -> None:
    """The rows in the form of a results file, one row a line."""
    folder = path.parent.resolve()
    shown = folder.relative_to(ROOT).as_posix() if folder.is_relative_to(ROOT) else folder.name
    packages = ("diffprune", "torch", "transformers", "numpy", "accelerate")
    versions = {"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in packages}}
    head = {
        "name": part,
        "command": f"python -m tools.golden record {part} --out {shlex.quote(shown)}",
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "device": f"{processor()}, 1 thread",
        "versions": versions,
        "seeds": [commands.RECIPE["seed"]] if part in ("train", "resume") else [0],
        "notes": (PARTS[part].__doc__ or "").split("\n")[0],
    }
    if part in ("train", "resume"):
        head["recipes"] = {run: commands.recipe_of(run) for run in commands.RUNS}
    if part == "answers":
        head["options"] = {"pruner": commands.PRUNER, "eval": shlex.join(commands.EVAL)}
    body = ",\n".join(json.dumps(row) for row in rows)
    text = json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n{body}\n]\n}}\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(text)
    os.replace(unfinished, path)


def read(path: Path) -> list[Row]:
    return json.loads(path.read_text())["rows"] if path.is_file() else []


def measure(part: str, known: Sequence[Row]) -> Iterator[Row]:
    """The rows of a part, each said once it is there."""
    for row in PARTS[part](known):
        print(f"{part}: {about(row)}", file=sys.stderr, flush=True)
        yield row


def record(part: str, folder: Path) -> None:
    """Write a part's file; of `answers`, after each method."""
    path = folder / f"{part}.json"
    rows = read(path) if part == "answers" else []
    for row in measure(part, tuple(rows)):
        rows.append(row)
        if part == "answers":
            write(path, part, rows)
    write(path, part, rows)


def check(part: str, folder: Path) -> list[str]:
    path = folder / f"{part}.json"
    if not path.is_file():
        return [f"{part}: there is no {path}; record it first"]
    try:
        return differences(part, read(path), list(measure(part, ())))
    except Exception as error:
        return [f"{part}: {type(error).__name__}: {error}"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("record", "check"))
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--out", type=Path, default=ROOT / "results/golden", help="folder to record into")
    parser.add_argument("--against", type=Path, default=ROOT / "results/golden", help="folder to compare with")
    given = parser.parse_args()
    if unknown := [part for part in given.parts if part not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    os.environ.update(commands.ONE_THREAD)  # before torch is imported
    prepare_torch()
    lines = []
    for part in given.parts or PARTS:
        if given.action == "record":
            record(part, given.out)
        else:
            lines += check(part, given.against)
    print("\n".join(lines) if lines else "no difference" if given.action == "check" else "recorded")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
