"""Many commands side by side, each with a log and a limit: what scripts in runs/ put trainings and answers into.

    python -m diffprune_lab.studies.side_by_side JOBS.txt --at-once 16 --seconds 500 --work out/study

A line of JOBS.txt is a name, a limit in seconds and a command. `PYTHON -m diffprune_lab ...`, or one below it, runs
in a fork of this process, which has imported everything heavy once; a hundred small runs would else spend ten seconds
each on that. Any other command is started as it is. What a job prints goes to WORK/logs/NAME.log, what became of it to
WORK/status.txt; one that fails or takes too long stops no other.
"""

import argparse
import importlib
import os
import runpy
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

# Nothing of these may touch the GPU when it is imported: a fork cannot use one that its parent has touched.
HEAVY = (
    "torch",
    "accelerate",
    "transformers.models.llava.modeling_llava",
    "transformers.models.clip.modeling_clip",
    "transformers.models.llama.modeling_llama",
    "diffprune.train.run",
    "diffprune.evaluate.session",
    "diffprune_lab.scenes.source",
    "diffprune_lab.scarce.source",
)
GRACE = 10  # seconds between being asked to end and being ended
TOO_LONG = 124  # exit code, as of timeout(1)


class Job(NamedTuple):
    """A line of the file."""

    name: str
    limit: float
    command: list[str]

    @property
    def is_own(self) -> bool:
        """Whether it is a module of this package, which a fork can run."""
        return self.command[1:2] == ["-m"] and "".join(self.command[2:3]).split(".")[0] == "diffprune_lab"


class Running(NamedTuple):
    """A job that was started, as a process that leads a group of its own.

    Args:
        process: Of a program; held, for one that is forgotten is waited for by `subprocess` itself.
    """

    job: Job
    pid: int
    start: float
    process: "subprocess.Popen[bytes] | None" = None


def read_jobs(path: Path) -> list[Job]:
    """The jobs of a file, in order; a line that is none is a `ValueError`."""
    jobs = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        words = shlex.split(line)
        if not words:
            continue
        try:
            jobs.append(Job(words[0], float(words[1]), words[2:]))
        except (IndexError, ValueError):
            raise ValueError(f"{path}, line {number}: {line!r} is no name, limit in seconds and command") from None
    return jobs


def fork(run: Callable[[], int | None], log: Path) -> int:
    """The process that runs this with its output in the log."""
    pid = os.fork()
    if pid:
        return pid
    code: object = 1
    try:
        os.setpgid(0, 0)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        code = run()
    except SystemExit as end:
        code = end.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)


def own_command(module: str, words: list[str]) -> None:
    """What `python -m` does with a module of this package and these words."""
    sys.argv = ["diffprune", *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)  # results files name the command by __main__


def forks_can_use_the_gpu(work: Path) -> bool:
    """Whether a fork of this process can compute on the GPU; True where there is none."""

    def use_it() -> None:
        import torch

        if torch.cuda.is_available():
            torch.ones(2, device="cuda").sum().item()

    _, status = os.waitpid(fork(use_it, work / "logs" / "fork.log"), 0)
    return status == 0


def start(job: Job, work: Path, *, forking: bool) -> Running:
    log = work / "logs" / f"{job.name}.log"
    if forking and job.is_own:
        return Running(job, fork(lambda: own_command(job.command[2], job.command[3:]), log), time.monotonic())
    with log.open("w") as file:
        process = subprocess.Popen(job.command, stdout=file, stderr=subprocess.STDOUT, process_group=0)
    return Running(job, process.pid, time.monotonic(), process)


def end(running: Running, number: int) -> None:
    """Send the signal to the job and to what it has started."""
    for send in (os.killpg, os.kill):  # the group may not be there yet
        try:
            send(running.pid, number)
        except ProcessLookupError:
            continue
        return


def note(running: Running, code: int, work: Path) -> None:
    """Write down what became of a job; one that failed is told of."""
    job, seconds = running.job, time.monotonic() - running.start
    with (work / "status.txt").open("a") as file:
        file.write(f"{job.name}\tcode {code}\t{seconds:.0f} s\n")
    if code:
        lines = (work / "logs" / f"{job.name}.log").read_text(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        print(f"{job.name} failed ({code}): {last[:300]}", flush=True)


def run_all(jobs: list[Job], *, at_once: int, seconds: float, work: Path) -> int:
    """Run the jobs, so many at a time, until all ended or the time is up; how many ended well."""
    deadline, waiting, running, well = time.monotonic() + seconds, list(jobs), {}, 0
    asked: dict[int, float] = {}  # to end, when
    forking = any(job.is_own for job in jobs)
    if forking:
        for name in HEAVY:
            importlib.import_module(name)
        forking = forks_can_use_the_gpu(work)
    try:
        while running or (waiting and time.monotonic() < deadline):
            while waiting and len(running) < at_once and time.monotonic() < deadline:
                one = start(waiting.pop(0), work, forking=forking)
                running[one.pid] = one
            now = time.monotonic()
            for pid, one in running.items():
                if pid not in asked and now > min(one.start + one.job.limit, deadline):
                    asked[pid] = now
                    end(one, signal.SIGTERM)
                elif pid in asked and now > asked[pid] + GRACE:
                    end(one, signal.SIGKILL)
            for pid in list(running):
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    code = TOO_LONG if pid in asked else os.waitstatus_to_exitcode(status)
                    note(running.pop(pid), code, work)
                    well += code == 0
            time.sleep(0.05)
    finally:
        for one in running.values():
            end(one, signal.SIGKILL)
    return well


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("jobs", type=Path, help="file with a job in each line")
    parser.add_argument("--at-once", type=int, required=True, help="how many at a time")
    parser.add_argument("--seconds", type=float, required=True, help="for all of them")
    parser.add_argument("--work", type=Path, required=True, help="folder of logs/ and status.txt")
    given = parser.parse_args()
    (given.work / "logs").mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # what runs is ended by run_all
    run_all(read_jobs(given.jobs), at_once=given.at_once, seconds=given.seconds, work=given.work)


if __name__ == "__main__":
    main()
