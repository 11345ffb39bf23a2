"""A folder asked into a file: goes on where it ended, adds to no other run, leaves no picture out unsaid."""

import json
from pathlib import Path
from typing import Any

import pytest

from diffprune.answering import answer_folder, read_answers
from diffprune.cli.ask import progress_line
from diffprune.cli.main import _run
from tests import tiny
from tests.contracts.vlm import pruned

RUN: dict[str, Any] = {"question": "what is it?", "method": "divprune", "keep": "5", "max_new_tokens": 3}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "photos"
    (place / "more").mkdir(parents=True)
    for number in range(3):
        tiny.picture(number).save(place / f"{number}.png")
    tiny.picture(3).save(place / "more" / "3.JPG", "JPEG")
    (place / "notes.txt").write_text("no picture")
    return place


def test_a_run_that_was_ended_goes_on_and_ends_as_if_it_had_not_been(folder: Path, tmp_path: Path) -> None:
    vlm, whole, ended = pruned("llava", "divprune", keep=5), tmp_path / "whole.jsonl", tmp_path / "ended.jsonl"
    summary = answer_folder(vlm, folder, whole, RUN, batch=2)
    rows = [json.loads(line) for line in whole.read_text().splitlines()]
    assert (summary.before, summary.added, summary.broken) == (0, 4, {})
    assert [row["image"] for row in rows] == ["0.png", "1.png", "2.png", "more/3.JPG"]
    assert rows[1]["answer"] == vlm.generate([folder / "1.png"], "what is it?", max_new_tokens=3, do_sample=False)
    assert all(row.items() >= RUN.items() for row in rows)
    content = whole.read_bytes()
    for length in (0, 10, content.index(b"\n") + 1, len(content) - 5, len(content)):  # wherever it was ended
        ended.write_bytes(content[:length])
        before = content[:length].count(b"\n")
        steps: list[tuple[int, int]] = []
        summary = answer_folder(vlm, folder, ended, RUN, batch=2, update=lambda *step, into=steps: into.append(step))
        assert ended.read_bytes() == content
        assert (summary.before, summary.added) == (before, 4 - before) and steps[-1] == (4 - before, 4 - before)


def test_a_broken_picture_is_named_and_asked_again_when_mended(folder: Path, tmp_path: Path) -> None:
    vlm, out = pruned("llava", "divprune", keep=5), tmp_path / "a.jsonl"
    (folder / "1.png").write_bytes(b"no picture")
    summary = answer_folder(vlm, folder, out, RUN)
    assert summary.added == 3 and "is no image that can be read" in summary.broken["1.png"]
    tiny.picture(1).save(folder / "1.png")
    summary = answer_folder(vlm, folder, out, RUN)
    assert (summary.before, summary.added, summary.broken) == (3, 1, {})


def test_another_run_s_answers_are_refused_and_stay(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl"
    other = json.dumps({"image": "0.png", "answer": "x", **RUN, "keep": "64"}) + "\n"
    for content, sentence in (
        (other, "answers with other keep .64; now 5.; choose another file"),
        ("[1]\n", "line 1 of"),
    ):
        out.write_text(content + '{"image": "cut')
        with pytest.raises(ValueError, match=sentence):
            read_answers(out, RUN)
        assert out.read_text() == content + '{"image": "cut'
    link = tmp_path / "link.jsonl"
    link.symlink_to(out)
    with pytest.raises(ValueError, match="symbolic link"):
        read_answers(link, RUN)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["what?"], "no picture is named; give --image"),
        (["what?", "--out", "a.jsonl"], "is for the answers of a folder"),
        (["nowhere", "--question", "what?", "--out", "a.jsonl"], "there is no folder nowhere"),
        (["", "--question", "what?", "--out", "a.jsonl"], "SUBJECT is empty"),
        (["PHOTOS", "--question", "what?"], "give --out answers.jsonl"),
        (["PHOTOS", "--question", "what?", "--out", "a.jsonl", "--image", "a.png"], "ask about one or the other"),
        (["PHOTOS", "--question", "what?", "--out", "a.jsonl", "--fast"], "leave it out for a folder"),
        (["PHOTOS", "--question", "what?", "--out", "OTHER"], "holds answers with other question"),
        (["EMPTY", "--question", "what?", "--out", "a.jsonl"], "holds no picture"),
    ],
)
def test_what_cannot_be_asked_is_refused_before_a_model_is_loaded(
    arguments: list[str], sentence: str, folder: Path, tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    other, empty = tmp_path / "other.jsonl", tmp_path / "empty"
    other.write_text('{"image": "0.png", "answer": "x", "question": "which?"}\n')
    empty.mkdir()
    named = {"PHOTOS": str(folder), "OTHER": str(other), "EMPTY": str(empty)}
    assert _run(["ask", *(named.get(word, word) for word in arguments)]) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "a.jsonl").exists()


def test_progress_has_a_rate_and_an_estimate() -> None:
    assert progress_line(0, 40, 0.0) == "40 pictures to ask"
    assert progress_line(10, 40, 5.0) == "10 of 40 pictures, 2 a second, 0:05, 0:15 left"
    assert progress_line(1, 10_000, 1.0) == "1 of 10000 pictures, 1 a second, 0:01, 2:46:39 left"
