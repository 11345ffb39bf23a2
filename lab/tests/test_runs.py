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


def test_what_is_handed_on_comes_in_pieces_and_takes_the_place_of_what_was_there(tmp_path: Path) -> None:
    """Random bytes, which no packing makes smaller; pieces of before, or of a call that was cut off, go."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in/weights").write_bytes(os.urandom(16 * 2**20))
    for name in ("out.tgz.02", "out.tgz.new.02"):
        (tmp_path / name).write_text("of before")
    script = f". runs/packed_models.sh; pieces {tmp_path}/out.tgz -C {tmp_path} in"
    subprocess.run(["bash", "-c", f"set -euo pipefail; {script}"], cwd=ROOT, check=True)
    parts = sorted(tmp_path.glob("out.tgz*"))
    assert [part.name for part in parts] == ["out.tgz.00", "out.tgz.01"]
    assert all(part.stat().st_size <= 15 * 2**20 for part in parts)
    whole = b"".join(part.read_bytes() for part in parts)
    names = subprocess.run(["tar", "-tz"], input=whole, capture_output=True, check=True).stdout.decode().split()
    assert names == ["in/", "in/weights"]


def test_what_cannot_be_packed_leaves_the_pieces_of_before(tmp_path: Path) -> None:
    (tmp_path / "x.tgz.00").write_bytes(b"of before")
    script = f"set -uo pipefail; . {ROOT}/runs/packed_models.sh; cd {tmp_path}; pieces x.tgz -C {tmp_path} not-there"
    done = subprocess.run(["bash", "-c", script], capture_output=True, check=False)
    assert done.returncode != 0 and [path.name for path in tmp_path.iterdir()] == ["x.tgz.00"]
    assert (tmp_path / "x.tgz.00").read_bytes() == b"of before"


def test_scorers_of_all_sizes_are_asked_first_and_those_of_one_seed_once(tmp_path: Path) -> None:
    python = executable(tmp_path / "python", "#!/usr/bin/env bash\nexit 0\n")
    (tmp_path / "weights").mkdir()
    for size in ("s", "m"):
        (tmp_path / "weights" / size).mkdir()
    script = "work=$1/work; mkdir -p $work; . runs/packed_models.sh; pack_models $1/in -C $1/weights s m"
    subprocess.run(["bash", "-c", f"set -euo pipefail; {script}", "_", str(tmp_path)], cwd=ROOT, check=True)
    own = {
        "LEARNED": "diffprune diffprune[tau.start=1]@42 m:diffprune[groups=merged]",
        "GROUPS_ASKED": "random,oracle",
        "SEEDS": "42 123",
        "SIZES": "s m",
    }
    subprocess.run(
        [ROOT / "runs/scaling.sh", "probe", tmp_path / "in", tmp_path / "out", "abc1234"],
        env={**os.environ, **own, "PYTHON": str(python), "WORK": str(tmp_path / "work"), "SIZE": "tiny"},
        capture_output=True,
        check=False,  # there is no table of answers that nobody gave
    )
    assert (tmp_path / "work/parts.txt").read_text().splitlines() == [
        *("m diffprune 42", "m diffprune 123", "s diffprune 42", "s diffprune 123"),
        *("m diffprune[tau.start=1] 42", "s diffprune[tau.start=1] 42"),
        *("m diffprune[groups=merged] 42", "m diffprune[groups=merged] 123"),
        *("m random,oracle 42,123", "s random,oracle 42,123"),
    ]


def test_answers_of_fewer_scorers_are_asked_anew_even_where_a_call_had_no_time(tmp_path: Path) -> None:
    """Nobody answers here: what is looked at is what is left to be asked, and what it would go on from."""
    python = executable(tmp_path / "python", "#!/usr/bin/env bash\nexit 0\n")
    work = tmp_path / "work"
    own = {"PYTHON": str(python), "WORK": str(work), "SIZE": "tiny", "SEEDS": "42", "FREE": "nothing"}

    def asked(scorer: str) -> str:
        (work / f"train/{scorer}-42").mkdir(parents=True, exist_ok=True)
        (work / f"train/{scorer}-42/model.safetensors").touch()
        script = [ROOT / "runs/study.sh", "eval", tmp_path / "out", "abc1234"]
        subprocess.run(script, env={**os.environ, **own}, capture_output=True, check=False)
        jobs = (work / "jobs/eval.txt").read_text().splitlines()
        return next((job for job in jobs if job.startswith("eval-ours@42 ")), "")

    assert "train/diffprune-42" in asked("diffprune")
    answers = [work / f"eval/ours@42{suffix}" for suffix in (".json", ".answers.json")]
    for path in answers:
        path.touch()
    assert asked("diffprune") == ""
    for _ in range(2):
        assert "train/diffprune-paper-42" in asked("diffprune-paper")
        assert not any(path.exists() for path in answers)


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


def test_fewer_tests_than_parts_leave_no_part_without_a_test(tmp_path: Path) -> None:
    """pytest given an empty file of names would run everything."""
    python = executable(
        tmp_path / "python",
        f"""#!/usr/bin/env bash
case "$*" in
*side_by_side*) exec {sys.executable} "$@" ;;
*--collect-only*) printf '%s\\n' tests/a.py::one tests/a.py::two ;;
*) last=${{@: -1:1}}; echo "$(cat "${{last#@}}")" >>{tmp_path}/asked ;;
esac
""",
    )
    run = subprocess.run(
        ["bash", ROOT / "runs/gpu_tests.sh", tmp_path / "out", "8", "tests/a.py"],
        env={**os.environ, "PYTHON": str(python), "WORK": str(tmp_path / "work"), "SECONDS_LEFT": "120"},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert run.returncode == 0 and "2 collected, 2 of 2 parts without a failure" in run.stdout
    assert sorted((tmp_path / "asked").read_text().split()) == ["tests/a.py::one", "tests/a.py::two"]
    assert "" not in (tmp_path / "asked").read_text().splitlines()
