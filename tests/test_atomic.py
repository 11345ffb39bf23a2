"""Files are written whole or not at all, and nothing but a plain file is replaced."""

import os
from pathlib import Path

import pytest

from diffprune.atomic import replacing, require_plain, write_text


def test_a_file_is_replaced_in_one_step_and_readable(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "a.json"
    write_text(target, "one")
    write_text(target, "two")
    assert target.read_text() == "two"
    assert target.stat().st_mode & 0o777 == 0o644
    assert os.listdir(target.parent) == ["a.json"]


def test_a_block_that_fails_leaves_the_old_file_alone(tmp_path: Path) -> None:
    target = tmp_path / "a.png"
    write_text(target, "old")
    with pytest.raises(RuntimeError, match="midway"), replacing(target) as new:
        assert new.suffix == ".png"  # who writes a picture goes by the ending
        new.write_text("half")
        raise RuntimeError("midway")
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.png"]


def test_a_place_that_cannot_be_written_is_named_and_not_the_file_beside_it(tmp_path: Path, monkeypatch) -> None:
    target = tmp_path / "a.md"

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(tmp_path / ".a.x1y2.md"))

    monkeypatch.setattr("diffprune.atomic.tempfile.mkstemp", refuse)
    with pytest.raises(PermissionError) as error:
        write_text(target, "x")
    assert str(error.value) == f"cannot write to {target} (Permission denied); name another file"


def test_what_is_no_plain_file_is_refused_by_name(tmp_path: Path) -> None:
    real = tmp_path / "real.json"
    real.write_text("kept")
    link, pipe, folder = tmp_path / "link.json", tmp_path / "pipe", tmp_path / "folder"
    link.symlink_to(real)
    os.mkfifo(pipe)
    folder.mkdir()
    for target, kind in ((link, "a symbolic link"), (pipe, "a device, pipe or socket"), (folder, "a folder")):
        with pytest.raises(ValueError, match=f"{target.name} is {kind} and is not replaced; name a file"):
            write_text(target, "x")
    assert link.is_symlink() and real.read_text() == "kept" and pipe.is_fifo()
    with pytest.raises(ValueError, match="null is a device"):
        require_plain("/dev/null")  # which a write that was let through would replace for the whole machine
