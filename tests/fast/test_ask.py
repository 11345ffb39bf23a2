"""`diffprune ask --fast`: the same answer, and what compiling took."""

import json

import pytest

from diffprune.cli import main as cli
from diffprune.fast import build
from tests import tiny
from tests.train import runs


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command on a tiny model and a picture."""
    folder = tmp_path_factory.mktemp("ask")
    tiny.picture(1).save(folder / "a.png")
    model = runs.save_model(folder / "model")
    return ["ask", "--model", str(model), "--image", str(folder / "a.png"), "--max-new-tokens", "8", "--json"]


@pytest.mark.parametrize("method", ["cls_attention", "full"])
def test_a_fast_answer_is_the_same_answer(method: str, ask: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    budget = [] if method == "full" else ["--keep", "5"]
    for extra in ([], ["--fast"]):
        assert cli._run([*ask, "--method", method, *budget, *extra, "What color is it?"]) == 0
        said.append(json.loads(capsys.readouterr().out))
    assert said[0]["answer"] == said[1]["answer"] != ""
    assert "compile_seconds" not in said[0] and said[1]["compile_seconds"] > 0


def test_where_nothing_can_be_compiled_the_reference_path_answers_and_that_is_said(
    ask: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")

    arguments = [*ask, "What color is it?"]
    assert cli._run(arguments) == 0
    wanted = json.loads(capsys.readouterr().out)
    monkeypatch.setattr(build.CacheStore, "reserve", full)
    assert cli._run([*arguments, "--fast"]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["answer"] == wanted["answer"] and "compile_seconds" not in found
    assert "the GPU has no room for the fast path; give fewer or smaller batch_sizes" in printed.err
    assert "The answer is the reference path's" in printed.err
