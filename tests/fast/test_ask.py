"""`diffprune ask --fast`: the same answer, and what compiling took."""

import json
from pathlib import Path

import pytest

from diffprune.cli import main as cli
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
