"""Jobs side by side, as real processes: forks for our own commands, programs for others, each with its log and end."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from diffprune_lab.studies.side_by_side import read_jobs
from lab.tests.test_runs import is_running

PATIENCE = 300  # seconds until a test counts as hanging


def start(folder: Path, *lines: str, at_once: int = 2) -> "subprocess.Popen[str]":
    (folder / "jobs.txt").write_text("\n".join(lines) + "\n")
    options = ["--at-once", str(at_once), "--seconds", str(PATIENCE), "--work", str(folder / "work")]
    return subprocess.Popen(
        [sys.executable, "-m", "diffprune_lab.studies.side_by_side", str(folder / "jobs.txt"), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def status(folder: Path) -> dict[str, str]:
    lines = (folder / "work" / "status.txt").read_text().splitlines()
    return {name: code for name, code, _ in (line.split("\t") for line in lines)}


def test_own_commands_are_forks_and_each_has_its_log_and_its_code(tmp_path: Path) -> None:
    own = f"{sys.executable} -m diffprune_lab"
    ran = start(
        tmp_path,
        f"good 200 {own} methods --json",
        f"bad 200 {own} ask --model no-such-folder --image x.png 'What is there?'",
        "other 200 bash -c 'echo from bash; exit 3'",
        "long 0.2 sleep 200",
    )
    output, _ = ran.communicate(timeout=PATIENCE)
    assert ran.returncode == 0, output
    assert status(tmp_path) == {"good": "code 0", "bad": "code 2", "other": "code 3", "long": "code 124"}
    logs = tmp_path / "work" / "logs"
    assert "diffprune" in {row["name"] for row in json.loads((logs / "good.log").read_text())}
    assert (logs / "bad.log").read_text().startswith("diffprune: ")
    assert "bad failed (2): diffprune: " in output and "other failed (3): from bash" in output


def test_what_a_fork_writes_down_names_its_own_command(tmp_path: Path) -> None:
    written = tmp_path / "asked.json"
    options = f"--methods random --keep 4 --tasks scenes --questions 1 --model scenes-nano --out {written}"
    ran = start(tmp_path, f"eval 200 {sys.executable} -m diffprune_lab eval {options}")
    output, _ = ran.communicate(timeout=PATIENCE)
    assert status(tmp_path) == {"eval": "code 0"}, output
    assert json.loads(written.read_text())["command"].startswith("diffprune eval --methods random")


def test_many_short_programs_are_each_waited_for_once(tmp_path: Path) -> None:
    ran = start(tmp_path, *(f"job{number} 200 true" for number in range(40)), at_once=8)
    output, _ = ran.communicate(timeout=PATIENCE)
    assert ran.returncode == 0 and len(status(tmp_path)) == 40, output
    assert set(status(tmp_path).values()) == {"code 0"}


def test_what_was_started_ends_with_it(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    ran = start(tmp_path, f"one 200 bash -c 'sleep 200 & echo $! >{told}.new; mv {told}.new {told}; wait'")
    try:
        deadline = time.monotonic() + PATIENCE
        while not told.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        ran.send_signal(signal.SIGTERM)
        ran.communicate(timeout=PATIENCE)
        assert ran.returncode == 128 + signal.SIGTERM
        while is_running(int(told.read_text())):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        ran.kill()


@pytest.mark.parametrize("line", ["alone", "name soon sleep 1"])
def test_a_line_that_is_no_job_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "jobs.txt").write_text(f"a 1 true\n{line}\n")
    with pytest.raises(ValueError, match=rf"jobs.txt, line 2: '{line}' is no name, limit in seconds and command"):
        read_jobs(tmp_path / "jobs.txt")
