"""What `--out` names: written in one step, and neither a pipe nor a link in its place is followed or replaced."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from diffprune import api, loading
from diffprune.cli import main as cli
from diffprune.evaluate import pruners
from diffprune.evaluate.answers import Sheet, write_sheet
from diffprune.evaluate.journal import Journal
from diffprune.results import write_results
from diffprune.speed import subject
from diffprune.types import ImageSelection
from diffprune.viz import Panel, draw
from tests import tiny

# Imported before anything is put in its place: who first imports it then would keep the stand-in for all later tests.
LOADERS = (api, loading, pruners, subject)
ENDINGS = {"show": "png", "report": "md", "eval": "json", "ask": "jsonl", "profile": "json"}


def command(name: str, folder: Path) -> list[str]:
    """A command that would work, up to its `--out`."""
    (folder / "pictures").mkdir()
    tiny.picture(1).save(folder / "pictures" / "a.png")
    question = {"question": "What?", "answer": "red", "image": "a.png"}
    (folder / "pictures" / "q.jsonl").write_text(json.dumps(question) + "\n")
    rows = [{"method": "random", "keep": 64, "retention": 70.0}]
    write_results(folder / "results" / "main.json", name="main", rows=rows, command="x", commit="a", device="CPU")
    return {
        "show": ["show", "--image", str(folder / "pictures" / "a.png"), "--model", "owner/model"],
        "report": ["report", "--results", str(folder / "results")],
        "eval": ["eval", "--model", "owner/model", "--data", str(folder / "pictures" / "q.jsonl")],
        "ask": ["ask", str(folder / "pictures"), "--question", "What?", "--model", "owner/model"],
        "profile": ["profile", "--backbone", "llava-1.5-7b", "--random-weights", "--size", "tiny", "--device", "cpu"],
    }[name]


def make(kind: str, path: Path) -> None:
    if kind == "a symbolic link":
        path.with_name("real").write_text("kept")
        path.symlink_to(path.with_name("real"))
    else:
        os.mkfifo(path)


@pytest.mark.parametrize("kind", ["a symbolic link", "a device, pipe or socket"])
@pytest.mark.parametrize("name", sorted(ENDINGS))
def test_a_command_refuses_what_is_no_plain_file_before_it_loads_a_model(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in LOADERS:
        monkeypatch.setattr(module, "load_base", lambda *_, **__: pytest.fail("a model is loaded"))
    monkeypatch.setattr("diffprune.speed.profile.profile", lambda *_, **__: pytest.fail("a model is measured"))
    out = tmp_path / f"out.{ENDINGS[name]}"
    make(kind, out)
    assert cli._run([*command(name, tmp_path), "--out", str(out)]) == 2
    assert f"{out} is {kind} and is not replaced; name a file" in capsys.readouterr().err
    if kind == "a symbolic link":
        assert out.is_symlink() and (tmp_path / "real").read_text() == "kept"
    else:
        assert out.is_fifo()


@pytest.mark.parametrize("name", ["show", "ask"])
def test_a_command_refuses_a_place_it_cannot_write_to_before_it_loads_a_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied", "a file of ours")

    monkeypatch.setattr("diffprune.cli.tempfile.TemporaryFile", refuse)
    monkeypatch.setattr("diffprune.answering.add_lines", refuse)
    for module in LOADERS:
        monkeypatch.setattr(module, "load_base", lambda *_, **__: pytest.fail("a model is loaded"))
    out = tmp_path / f"out.{ENDINGS[name]}"
    assert cli._run([*command(name, tmp_path), "--out", str(out)]) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert "cannot write" in err and "(Permission denied); choose another" in err and "a file of ours" not in err


def test_a_folder_without_results_does_not_replace_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "results.md"
    page.write_text("old")
    (tmp_path / "photos").mkdir()
    assert cli._run(["report", "--results", str(tmp_path / "photos"), "--out", str(page)]) == 2
    assert f"{tmp_path / 'photos'} holds no results file" in capsys.readouterr().err and page.read_text() == "old"


def drawing(out: Path) -> None:
    boxes = torch.tensor([[0, 0, 20, 20], [20, 0, 40, 20], [0, 20, 20, 40], [20, 20, 40, 40]]).float()
    selection = ImageSelection(keep=torch.tensor([0, 3]), logits=None, grid=(2, 2), boxes=boxes)
    draw(tiny.picture(1, (40, 40)), [Panel("random", selection)], out)


@pytest.mark.parametrize(
    ("ending", "write"),
    [
        ("png", drawing),
        ("svg", drawing),
        ("json", lambda out: write_results(out, name="x", rows=[], command="x", commit="a", device="CPU")),
        ("answers.json", lambda out: write_sheet(out, Sheet([], {}, []))),
        ("answers.jsonl", lambda out: Journal(out, {}, runs=1, count=1)),
    ],
)
def test_whatever_is_written_from_python_follows_no_link(ending: str, write: Any, tmp_path: Path) -> None:
    link = tmp_path / f"link.{ending}"
    make("a symbolic link", link)
    with pytest.raises(ValueError, match="is a symbolic link and is not replaced"):
        write(link)
    assert link.is_symlink() and (tmp_path / "real").read_text() == "kept"


def test_a_drawing_that_fails_midway_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "kept.png"
    out.write_text("old")

    def save(self: Image.Image, path: Path, *_: Any, **__: Any) -> None:
        Path(path).write_text("half")
        raise OSError("the disk is full")

    monkeypatch.setattr(Image.Image, "save", save)
    with pytest.raises(OSError, match="full"):
        drawing(out)
    assert out.read_text() == "old" and os.listdir(tmp_path) == ["kept.png"]
