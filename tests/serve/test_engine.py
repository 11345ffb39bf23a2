"""`diffprune serve` by vLLM, with a stand-in in the engine's place: what it is started with, signals, exit codes.

The stand-in is a package called vllm that serves nothing; tests/integrations/test_vllm.py starts the engine itself.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import diffprune as dp
from diffprune import versions
from diffprune.cli.main import _run
from tests import tiny
from tests.serve.test_process import save_tiny

STAND_IN = """
import json, os, signal, sys
code = 7 if "fails" in sys.argv else 0
def end(*_):
    print("ended", flush=True)
    sys.exit(code)
signal.signal(signal.SIGTERM, end)
print(json.dumps({"stand-in": sys.argv[1:], "pid": os.getpid(), "key": os.environ.get("VLLM_API_KEY")}), flush=True)
if code:
    sys.exit(code)
while True:
    signal.pause()
"""


@pytest.fixture
def started(tmp_path: Path) -> Any:
    """Starts `diffprune serve` beside the stand-in, of a version of vLLM."""
    made: list[subprocess.Popen[str]] = []

    def start(*arguments: str, version: str = "0.32.0") -> subprocess.Popen[str]:
        root = tmp_path / version
        server = root / "vllm" / "entrypoints" / "openai" / "api_server.py"
        server.parent.mkdir(parents=True)
        for folder in (server.parent, *server.parent.parents[:2]):
            (folder / "__init__.py").touch()
        server.write_text(STAND_IN)
        about = root / f"vllm-{version}.dist-info" / "METADATA"
        about.parent.mkdir()
        about.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
        paths = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
        process = subprocess.Popen(
            [sys.executable, "-m", "diffprune", "serve", *arguments],
            env={**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        made.append(process)
        return process

    yield start
    for process in made:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_the_command_becomes_the_engine_and_ends_as_it_ends(tmp_path: Path, started: Any) -> None:
    folder = save_tiny(tmp_path / "tiny")
    given = ["--model", str(folder), "--method", "divprune", "--keep", "5", "--token", "secret"]
    process = started(*given, "--engine-args", "--max-model-len 1024")  # found without being asked for
    line, said = process.stdout.readline(), json.loads(process.stdout.readline())
    assert "vllm.entrypoints.openai.api_server" in line and "secret" not in line
    assert said["stand-in"][-2:] == ["--max-model-len", "1024"] and str(folder) in said["stand-in"]
    assert said["pid"] == process.pid and said["key"] == "secret"
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0 and process.stdout.read() == "ended\n"


def test_the_exit_code_is_the_engines(tmp_path: Path, started: Any) -> None:
    folder = save_tiny(tmp_path / "tiny")
    process = started("--model", str(folder), "--method", "divprune", "--keep", "5", "--name", "fails")
    assert process.wait(120) == 7


def test_an_engine_that_is_too_old_is_one_sentence(tmp_path: Path, started: Any) -> None:
    folder = save_tiny(tmp_path / "tiny")
    process = started("--model", str(folder), "--method", "divprune", "--keep", "5", version="0.31.0")
    out, error = process.communicate(timeout=120)
    assert process.returncode == 2 and out == "" and "vLLM 0.31.0 is too old" in error


@pytest.mark.parametrize("engine", ["own", "vllm"])
def test_a_pruner_of_another_base_is_refused_at_the_start(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    base = save_tiny(tmp_path / "base")
    dp.PrunedVLM(*tiny.build("llava"), method="diffprune", keep=5).save_pretrained(tmp_path / "p", base_id=str(base))
    other = dp.load(str(base)).base
    other.model.multi_modal_projector.linear_1.weight.data.mul_(2.0)
    other.save_pretrained(base)  # another model in the place of the pruner's base
    monkeypatch.setattr("diffprune.cli.serve.is_installed", lambda package: True)
    monkeypatch.setattr("diffprune.integrations.vllm.require_engine", lambda: None)
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("the engine is started"))
    assert _run(["serve", "--engine", engine, "--port", "0", "--pruner", str(tmp_path / "p")]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert "their vision weights differ; load its own base" in error


def test_options_of_one_engine_are_refused_by_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["serve", "--engine", "vllm", "--dry-run", "--batch", "4", "--fast"]) == 2
    assert "--batch, --fast of our own server are unknown to vLLM" in capsys.readouterr().err
    assert _run(["serve", "--engine", "own", "--dry-run", "--engine-args", "--seed 1"]) == 2
    assert "--engine-args '--seed 1' is for vLLM" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("version", "words", "code"), [("5.16.3", "is too old: 5.17", 2), ("5.23.0", "", 0), ("6.0.0", "was not tested", 0)]
)
def test_a_transformers_that_is_not_known_is_told(
    version: str,
    words: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(versions.importlib.metadata, "version", lambda name: version)
    assert _run(["serve", "--engine", "own", "--dry-run"]) == code
    told = capsys.readouterr().err + caplog.text
    assert words in told and ("transformers" in told) == bool(words)
