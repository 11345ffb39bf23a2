"""The scripts in runs/: what they begin ends with them, and what is there is kept."""

import lzma
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATIENCE = 300  # seconds until a script counts as hanging
# Stands for a training: writes weights into --out and says who it is; then it goes on until the file $END is there.
TRAINING = """#!/usr/bin/env bash
while [ "$1" != --out ]; do shift; done
mkdir -p "$2" && echo weights >"$2/model.safetensors" && echo $$ >>"$PIDS"
until [ -e "$END" ]; do sleep 0.05; done
"""


def executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def scaling(folder: Path) -> subprocess.Popen[str]:
    """`runs/scaling.sh train` in small, with its output in a pipe; trainings go on until `folder / "end"` is there."""
    python = executable(folder / "python", TRAINING)
    own = {"PYTHON": python, "WORK": folder / "work", "PIDS": folder / "pids", "END": folder / "end", "SIZE": "tiny"}
    return subprocess.Popen(
        [ROOT / "runs" / "scaling.sh", "train", "60", "-", folder / "out", "0"],
        env={**os.environ, **{key: str(value) for key, value in own.items()}},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def packed(folder: Path) -> list[str]:
    """The weights in what a script left."""
    whole = b"".join(piece.read_bytes() for piece in sorted((folder / "out").glob("models.tar.xz.*")))
    names = (
        subprocess.run(["tar", "-t"], input=lzma.decompress(whole), capture_output=True, check=True)
        .stdout.decode()
        .split()
    )
    return [name.split("/")[0] for name in names if name.endswith(".safetensors")]


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_training_in_small_is_packed_and_leaves_nobody_behind(tmp_path: Path) -> None:
    (tmp_path / "end").touch()
    script = scaling(tmp_path)
    output, _ = script.communicate(timeout=PATIENCE)  # the pipe stays open as long as anybody holds it
    assert script.returncode == 0, output
    assert sorted(packed(tmp_path)) == ["l", "m", "s"]


def test_trainings_end_with_the_script_and_what_they_had_is_kept(tmp_path: Path) -> None:
    script, pids = scaling(tmp_path), tmp_path / "pids"
    try:
        wait_for(lambda: pids.exists() and pids.read_text().strip() != "")
        script.send_signal(signal.SIGTERM)
        output, _ = script.communicate(timeout=PATIENCE)
        assert script.returncode == 143, output
        assert packed(tmp_path) == ["tower"]
        wait_for(lambda: not any(is_running(int(pid)) for pid in pids.read_text().split()))
    finally:
        (tmp_path / "end").touch()  # for those that should have ended and did not


@pytest.mark.parametrize(
    "seeds, code, trains", [(" 42 123 456", 0, 1), ("42", 0, 1), ("", 0, 1), ("42 123", 3, 0), ("42 123", 0, 0)]
)
def test_seeds_run_side_by_side_once_there_is_a_classifier(tmp_path: Path, seeds: str, code: int, trains: int) -> None:
    """With a stand-in for python: which processes are started, and not what they find.

    Another one for sleep tells that the script is waiting; only then is the classifier trained.
    """
    others = seeds.split()[1:]
    executable(tmp_path / "sleep", f"#!/bin/bash\ntouch {tmp_path}/waiting\nexec {shutil.which('sleep')} 0.05\n")
    executable(
        tmp_path / "python",
        f"""#!/bin/bash
[ "$1" != -c ] || exec {sys.executable} "$@"
echo "$@" >>{tmp_path}/started
while [ $# -gt 0 ]; do
    if [ "$1" = --save-weights ]; then
        until [ {len(others)} = 0 ] || [ -e {tmp_path}/waiting ]; do {shutil.which("sleep")} 0.05; done
        mkdir -p "$2"
        [ {trains} = 0 ] || touch "$2/training.json"
    fi
    [ "$1" != --weights ] || [ -f "$2/training.json" ] || exit 9
    shift
done
exit {code}
""",
    )
    env = {**os.environ, "PYTHON": str(tmp_path / "python"), "WEIGHTS": str(tmp_path / "weights"), "MPS": "0"}
    env["PATH"] = f"{tmp_path}:{env['PATH']}"
    try:
        ran = subprocess.run(
            ["runs/probes.sh", "deit-tiny deit-small", "2", "pictures", str(tmp_path / "out"), "--size", "tiny"],
            cwd=ROOT,
            env=env | ({"SEEDS": seeds} if seeds else {}),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
    finally:
        (tmp_path / "waiting").touch()  # nobody goes on waiting for a script that did not
    assert ran.returncode == (0 if trains else 1), ran.stderr
    assert ("deit-small: no classifier was trained, so seeds 123 were not run" in ran.stderr) == (not trains)
    started = (tmp_path / "started").read_text().splitlines()
    for name in ("deit-tiny", "deit-small"):
        own = [line.split(" --seeds ")[1].split()[0] for line in started if name in line and "--seeds" in line]
        assert own[:1] == seeds.split()[:1]
        assert sorted(own[1:]) == (sorted(others) if trains else [])  # side by side, so in any order
    assert all(line.startswith("-m diffprune_lab probe all") and line.endswith("--size tiny") for line in started)
    assert len(started) == 2 * (len(seeds.split()) if trains and seeds else 1)


@pytest.mark.parametrize("starts", [0, 1])
def test_a_gpu_that_cannot_be_shared_stops_no_script(tmp_path: Path, starts: int) -> None:
    executable(tmp_path / "nvidia-cuda-mps-control", f'#!/bin/sh\n[ "$1" = -d ] && exit {1 - starts}\nexit 1\n')
    script = (
        "set -euo pipefail; python=false MPS=1; . runs/side_by_side.sh; share_gpu; echo ${CUDA_MPS_PIPE_DIRECTORY-no}"
    )
    found = subprocess.run(
        ["bash", "-c", script],
        cwd=ROOT,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == "no\n"
