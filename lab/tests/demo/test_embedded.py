"""`diffprune demo` on the weights that come with the package."""

import json
import shutil
from pathlib import Path

import pytest

from diffprune.cli import main as cli
from diffprune_lab.demo.story import MODEL
from diffprune_lab.scenes import reference


@pytest.mark.slow
def test_a_quick_demo_runs_on_the_embedded_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "demo"
    code = cli._run(["demo", "--quick", "--out", str(out)])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert "diffprune" in printed.out and str(out / "index.html") in printed.out
    summary = json.loads((out / "summary.json").read_text())
    full = [row["score"] for row in summary["rows"] if row["method"] == "full" and "task" in row]
    assert len(full) == 10 and sum(full) / 10 > 40  # the weights are trained ones
    assert (out / "index.html").stat().st_size > 50_000


def test_damaged_weights_are_named_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(reference.ASSETS / MODEL, tmp_path / MODEL)
    shard = tmp_path / MODEL / "model.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    monkeypatch.setattr(reference, "ASSETS", tmp_path)
    out = tmp_path / "demo"
    code = cli._run(["demo", "--quick", "--out", str(out)])
    err = capsys.readouterr().err
    assert code == 2 and f"{shard} is damaged" in err.splitlines()[-1]
    assert list(out.iterdir()) == []
