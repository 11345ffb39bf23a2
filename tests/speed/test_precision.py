"""How far logits in fewer bits are off, at tiny size."""

from typing import Any

import pytest

from diffprune.results import read_results
from diffprune.speed import precision


@pytest.mark.parametrize("backbone", ["llava-1.5-7b", "qwen2.5-vl-7b"])
def test_eight_bits_are_further_off_than_sixteen_and_not_by_much(backbone: str) -> None:
    half, eight = precision.errors(backbone, tiny=True, device="cpu")
    assert (half["precision"], eight["precision"]) == ("float16", "fp8")
    assert 1e-5 < half["error"] < 5e-3 < eight["error"] < 0.2


def test_the_command_writes_its_rows(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    out = tmp_path / "fp8.json"
    monkeypatch.setattr(
        "sys.argv", ["precision", "--size", "tiny", "--device", "cpu", "--out", str(out), "--commit", "abc1234"]
    )
    precision.main()
    assert [row["precision"] for row in read_results(out).rows] == ["float16", "fp8"]
    assert "fp8: error" in capsys.readouterr().out
