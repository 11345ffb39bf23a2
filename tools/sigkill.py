"""Kills real processes with SIGKILL wherever they are, and looks whether anything is lost and the ends are equal.

    python -m tools.sigkill --kills 200 --seed 0 --out results/sigkill.json

A quarter of the kills each goes to training (at a random moment after a random number of steps), to the writing of
checkpoints and to `save_pretrained` over a saved pruner (both at a random one of their file operations), and to an
evaluation (at a random moment after a random number of written batches). Everything is imported once; each process
that is killed is a fork, so that what it does begins at once. Tiny models; what is on the disk is checked after every
kill, and what a run ends with is compared with an unbroken one's, byte by byte.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from diffprune.answering import SUFFIXES  # noqa: F401  # with what it imports, before the first fork
from diffprune.cli.main import _run
from diffprune.evaluate.answers import answers_file
from diffprune.evaluate.journal import journal_file
from diffprune.evaluate.session import Session
from diffprune.json_files import read_lines
from diffprune.model import PrunedVLM
from diffprune.registry import BACKBONES, METHODS
from diffprune.results import Row, read_results, write_results
from diffprune.train import run as training  # noqa: F401  # before the first fork
from diffprune.train.checkpointing import list_checkpoints, load_latest
from tests.evaluate import own_questions
from tests.train import runs

OPERATIONS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.copyfile", "os.utime")
KILLED = -signal.SIGKILL
LIVES = 5  # kills of one run before it may end


def start(task: Callable[[], Any], log: Path) -> int:
    """The id of a process that does the task."""
    child = os.fork()
    if child == 0:
        code = 70
        try:
            handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(handle, 1)
            os.dup2(handle, 2)
            result = task()
            code = result if isinstance(result, int) else 0
        finally:
            os._exit(code)
    return child


def end(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die_at(operation: int, folder: Path, task: Callable[[], Any]) -> Callable[[], Any]:
    """The task, in a process that kills itself right before its n-th file operation in the folder."""

    def dying() -> Any:
        done = 0

        def watch(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal done
            if event in OPERATIONS and arguments and str(arguments[0]).startswith(str(folder)):
                done += 1
                if done == operation:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        return task()

    return dying


def kill_after(child: int, path: Path, lines: int, delay: float) -> int:
    """Kill a process a moment after a file has more lines; its exit code, which is another where it was over before."""
    while count_lines(path) <= lines:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    return end(child)


def count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


class Trial:
    """Kills of one kind, counted.

    Args:
        disk: A folder with a tiny model, pictures, captions and questions.
        random: Draws every moment.
    """

    def __init__(self, disk: Path, seed: str) -> None:
        self.disk, self.random = disk, random.Random(seed)
        self.kills = self.ends = self.lost = self.unequal = 0
        self.log = disk / "log"

    def row(self, name: str) -> Row:
        return {"what": name, "kills": self.kills, "ends": self.ends, "lost": self.lost, "unequal": self.unequal}


def train(disk: Path, folder: Path, *more: str) -> Callable[[], int]:
    return lambda: _run(["train", "--config", str(disk / "run.yaml"), "--out", str(folder), "--resume", *more])


def same_run(folder: Path, unbroken: Path) -> bool:
    """Whether two finished runs have the same losses, pruner and checkpoint."""
    ours, theirs = list_checkpoints(folder)[0], list_checkpoints(unbroken)[0]
    files = [f"{name}.safetensors" for name in ("weights", "optimizer", "best", "random")]
    pairs = [(folder / "model.safetensors", unbroken / "model.safetensors"), *((ours / n, theirs / n) for n in files)]
    return runs.losses(folder) == runs.losses(unbroken) and all(a.read_bytes() == b.read_bytes() for a, b in pairs)


def kill_training(trial: Trial, kills: int, *, in_checkpoints: bool) -> None:
    """Kill runs between or in their steps, or in the file operations of their checkpoints; each is ended after some."""
    more = ("saving.every=1",) if in_checkpoints else ()
    unbroken = trial.disk / f"unbroken{in_checkpoints}"
    assert end(start(train(trial.disk, unbroken, *more), trial.log)) == 0, trial.log.read_text()[-2000:]
    while trial.kills < kills:
        folder = trial.disk / "killed"
        shutil.rmtree(folder, ignore_errors=True)
        reached = 0
        for _ in range(min(LIVES, kills - trial.kills)):
            task = train(trial.disk, folder, *more)
            if in_checkpoints:
                code = end(start(die_at(trial.random.randint(1, 60), folder, task), trial.log))
            else:
                metrics = folder / "metrics.jsonl"
                wanted = count_lines(metrics) + trial.random.randint(0, 4)
                child = start(task, trial.log)
                code = kill_after(child, metrics, wanted, trial.random.uniform(0, 0.1))
            if code != KILLED:
                assert code == 0, trial.log.read_text()[-2000:]
                break
            trial.kills += 1
            found = load_latest(folder)
            step = 0 if found is None else int(found.state["step"])
            trial.lost += step < reached
            reached = step
        assert end(start(train(trial.disk, folder, *more), trial.log)) == 0, trial.log.read_text()[-2000:]
        trial.ends += 1
        trial.unequal += not same_run(folder, unbroken)


def kill_saving(trial: Trial, kills: int) -> None:
    """Kill a save over a saved pruner; what loads afterwards is the old one or the new one, whole."""
    folder = trial.disk / "saved"
    base, processor = runs.tiny.build("llava")
    vlms = [PrunedVLM(base, processor, method="diffprune", keep=keep) for keep in (4, 5)]
    expected = []
    for number, vlm in enumerate(vlms):
        with torch.no_grad():
            for parameter in vlm.method.parameters():
                parameter.fill_(number + 1.0)
        vlm.save_pretrained(trial.disk / f"saved{number}", base_id="some/base")
        expected.append((vlm.budget.keep, (trial.disk / f"saved{number}" / "model.safetensors").read_bytes()))
    vlms[0].save_pretrained(folder, base_id="some/base")
    while trial.kills < kills:
        new = trial.random.randrange(2)
        operation = trial.random.randint(1, 30)
        task = die_at(operation, folder, lambda new=new: vlms[new].save_pretrained(folder, base_id="some/base"))
        code = end(start(task, trial.log))
        assert code in (KILLED, 0), trial.log.read_text()[-2000:]
        trial.kills += code == KILLED
        loaded = PrunedVLM.from_pretrained(folder, base=base, processor=processor)  # refuses what does not fit
        found = (loaded.budget.keep, (folder / "model.safetensors").read_bytes())
        trial.lost += found not in expected
        trial.ends += code == 0
        trial.unequal += code == 0 and found != expected[new]


def kill_evaluation(trial: Trial, kills: int) -> None:
    """Kill evaluations; what was written down is never lost, and each ends as an unbroken one."""
    model, data = trial.disk / "model", trial.disk / "mine.jsonl"

    def task(out: Path) -> Callable[[], Any]:
        return lambda: Session(own_questions.asked(model, data, out)).run() and 0

    unbroken = trial.disk / "unbroken" / "x.json"
    unbroken.parent.mkdir()
    assert end(start(task(unbroken), trial.log)) == 0, trial.log.read_text()[-2000:]
    while trial.kills < kills:
        out = trial.disk / "answers" / "x.json"
        shutil.rmtree(out.parent, ignore_errors=True)
        out.parent.mkdir()
        known = 0
        for _ in range(min(LIVES, kills - trial.kills)):
            lines = journal_file(out)
            wanted = count_lines(lines) + trial.random.randint(0, 2)
            child = start(task(out), trial.log)
            code = kill_after(child, lines, wanted, trial.random.uniform(0, 0.05))
            if code != KILLED:
                assert code == 0, trial.log.read_text()[-2000:]
                break
            trial.kills += 1
            if not lines.exists():  # killed after the last batch: the sheet has it all
                trial.lost += not answers_file(out).exists()
                continue
            answered = sum(len(line["asked"]) for line in read_lines(lines)[0][1:])
            trial.lost += answered < known
            known = answered
        assert end(start(task(out), trial.log)) == 0, trial.log.read_text()[-2000:]
        trial.ends += 1
        same = answers_file(out).read_bytes() == answers_file(unbroken).read_bytes()
        trial.unequal += not (same and read_results(out).rows == read_results(unbroken).rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200, help="together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="results file to write")
    options = parser.parse_args()
    torch.set_num_threads(1)  # no pool of threads that a fork would lose
    BACKBONES.names(), METHODS.names()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="sigkill-") as place:
        disk = Path(place).resolve()
        model, pictures = runs.save_model(disk / "model"), runs.save_pictures(disk / "data")
        values = runs.values(model, pictures, optim={"steps": 24}, validation={"every": 6})
        runs.write_config(disk / "run.yaml", values)
        own_questions.write_jsonl(disk, 40)
        each = -(-options.kills // 4)
        for name, kill in (
            ("training", lambda trial: kill_training(trial, each, in_checkpoints=False)),
            ("checkpoint writing", lambda trial: kill_training(trial, each, in_checkpoints=True)),
            ("save_pretrained", lambda trial: kill_saving(trial, each)),
            ("eval", lambda trial: kill_evaluation(trial, each)),
        ):
            trial = Trial(disk, f"{options.seed}:{name}")
            kill(trial)
            rows.append(trial.row(name))
            print(rows[-1], flush=True)
    if options.out is not None:
        notes = (
            "lost: kills after which less was on the disk than before; unequal: ends that differ from an unbroken run"
        )
        write_results(options.out, name=options.out.stem, rows=rows, seeds=[options.seed], notes=notes)
    return 1 if any(row["lost"] or row["unequal"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
