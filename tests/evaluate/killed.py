"""Runs one evaluation several times, each in a process of its own that kills itself at another point of an append.

python -m tests.evaluate.killed MODEL DATA OUT POINT...     POINT: before, between or after, @ which append
"""

import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from diffprune.evaluate import journal
from diffprune.evaluate.session import Session
from tests.evaluate.own_questions import asked


def die_at(point: str) -> None:
    """From now on, this process dies at that point of writing answers down."""
    moment, _, which = point.partition("@")
    append, appends = journal.add_lines, [0]

    def dying(path: Path, values: Iterable[Any]) -> None:
        appends[0] += 1
        if appends[0] != int(which):
            append(path, values)
            return
        if moment == "after":
            append(path, values)
        elif moment == "between":
            whole = path.read_bytes() if path.exists() else b""
            append(path, values)
            grown = path.read_bytes()
            path.write_bytes(grown[: (len(whole) + len(grown)) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    journal.add_lines = dying


def main(model: str, data: str, out: str, *points: str) -> None:
    torch.set_num_threads(1)  # no pool of threads that a fork would lose
    for point in points:
        child = os.fork()
        if child == 0:
            die_at(point)
            Session(asked(Path(model), Path(data), Path(out) / point / "x.json")).run()
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (point, status)


if __name__ == "__main__":
    main(*sys.argv[1:])
