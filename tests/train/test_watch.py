"""Records of a run, and what becomes of those a killed run left."""

import errno
import json
import os
from pathlib import Path

import pytest

from diffprune.train.watch import Watch, peak_memory_gb, plot_losses, read_metrics


def record(step: int) -> dict[str, float]:
    return {"step": step, "loss": 2.0, "tau": 1.0, "entropy": 3.0, "samples_s": 4.0, "memory_gb": 0.5}


def test_records_after_the_checkpoint_are_dropped_and_a_cut_line_is_no_error(tmp_path: Path) -> None:
    with Watch(tmp_path, steps=9, tensorboard=False, quiet=True) as watch:
        for step in range(1, 5):
            watch.step(record(step))
        watch.validation({"step": 4, "throttled": 1.0, "hard": 1.5, "gap": 0.5, "random": 2.0, "best": True})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    with Watch(tmp_path, steps=9, start=3, tensorboard=False, quiet=True) as watch:
        watch.step(record(4))
    assert [one["step"] for one in read_metrics(tmp_path)] == [1, 2, 3, 4]
    assert all(one["kind"] == "train" for one in read_metrics(tmp_path))


def test_other_processes_leave_nothing(tmp_path: Path, capsys) -> None:
    with Watch(None, steps=1) as watch:
        watch.step(record(1))
        watch.print_line("hello")
    assert capsys.readouterr().err == "" and not list(tmp_path.iterdir())


@pytest.mark.parametrize("quiet", [False, True])
def test_a_run_without_a_terminal_tells_every_half_minute_how_it_goes(
    quiet: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr("diffprune.train.watch.time.monotonic", lambda: now)
    with Watch(tmp_path, steps=20, start=4, tensorboard=False, quiet=quiet) as watch:
        for step in range(5, 13):
            now += 10.0
            watch.step(record(step))
    line = "loss 2.0000, tau 1.000, 4.0 samples/s"
    wanted = [f"step 7/20: {line}, 0:30, 2:10 left", f"step 10/20: {line}, 1:00, 1:40 left"]
    assert capsys.readouterr().err.splitlines() == ([] if quiet else wanted)


def test_there_is_no_picture_of_nothing(tmp_path: Path) -> None:
    assert plot_losses(tmp_path, []) is None
    path = plot_losses(tmp_path, [{"kind": "train", **record(1)}])
    assert path is not None and path.read_bytes().startswith(b"\x89PNG")


FULL = Path("/dev/full")  # takes nothing, as a full disk


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_told_with_the_checkpoint_that_is_whole_and_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkpoint-000002").mkdir()
    (tmp_path / "checkpoint-000002" / "state.json").write_text("{}")
    said = r"cannot be written \(No space left on device\); .*checkpoint-000002 is whole: make room in .* --resume"
    with (
        pytest.raises(OSError, match=f"^metrics.jsonl {said}"),
        Watch(tmp_path, steps=9, tensorboard=False, quiet=True) as watch,
    ):
        watch.file.close()
        watch.file = FULL.open("a")
        watch.step(record(3))

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    with pytest.raises(OSError, match=f"^loss.png {said}"):
        plot_losses(tmp_path, [{"kind": "train", **record(1)}])


def test_memory_is_measured() -> None:
    before = peak_memory_gb()
    assert 0.01 < before < 1000 and json.dumps(before)
