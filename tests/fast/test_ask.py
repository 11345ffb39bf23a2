"""`diffprune ask --fast`: the same answer, and what compiling took."""

import json
from pathlib import Path

import pytest

from diffprune.cli import main as cli
from diffprune.fast import build
from tests import tiny


@pytest.mark.parametrize("method", ["cls_attention", "full"])
def test_a_fast_answer_is_the_same_answer(method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.picture(1, (192, 192)).save(tmp_path / "a.png")
    said = []
    for extra in ([], ["--fast"]):
        arguments = ["ask", "--model", "scenes-nano", "--method", method, "--keep", "16"]
        code = cli._run([*arguments, "--image", str(tmp_path / "a.png"), "--json", *extra, "What color is it?"])
        assert code == 0
        said.append(json.loads(capsys.readouterr().out))
    assert said[0]["answer"] == said[1]["answer"]
    assert "compile_seconds" not in said[0] and said[1]["compile_seconds"] > 0


def test_where_nothing_can_be_compiled_the_reference_path_answers_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")

    tiny.picture(1, (192, 192)).save(tmp_path / "a.png")
    arguments = ["ask", "--model", "scenes-nano", "--image", str(tmp_path / "a.png"), "--json", "What color is it?"]
    assert cli._run(arguments) == 0
    wanted = json.loads(capsys.readouterr().out)
    monkeypatch.setattr(build.CacheStore, "reserve", full)
    assert cli._run([*arguments, "--fast"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["answer"] == wanted["answer"] and "compile_seconds" not in found
    assert "the GPU has no room for the fast path; give fewer or smaller batch_sizes" in printed.err
    assert "The answer is the reference path's" in printed.err
