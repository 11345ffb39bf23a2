"""Runs one evaluation several times, each in a process of its own that kills itself at another point of an append.

python -m tests.evaluate.killed MODEL DATA OUT POINT...     POINT: before, between or after, @ which append
"""

import os
import signal
import sys
from pathlib import Path

import torch

from diffprune.evaluate import journal
from diffprune.evaluate.session import Session
from tests.evaluate.own_questions import asked


def run_until(point: str, model: Path, data: Path, out: Path) -> None:
    """Evaluate, and die at that point."""
    moment, _, which = point.partition("@")
    append, appends = journal.Journal._append, [0]

    def dying(self: journal.Journal, line: dict) -> None:
        appends[0] += 1
        if appends[0] != int(which):
            append(self, line)
            return
        if moment == "after":
            append(self, line)
        elif moment == "between":
            assert self.path is not None
            whole = self.path.read_bytes() if self.path.exists() else b""
            append(self, line)
            grown = self.path.read_bytes()
            self.path.write_bytes(grown[: (len(whole) + len(grown)) // 2])
        os.kill(os.getpid(), signal.SIGKILL)

    journal.Journal._append = dying  # type: ignore[method-assign]
    Session(asked(model, data, out)).run()


def main(model: str, data: str, out: str, *points: str) -> None:
    torch.set_num_threads(1)  # no pool of threads that a fork would lose
    for point in points:
        child = os.fork()
        if child == 0:
            run_until(point, Path(model), Path(data), Path(out) / point / "x.json")
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (point, status)


if __name__ == "__main__":
    main(*sys.argv[1:])
