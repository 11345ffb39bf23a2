"""`diffprune serve` by vLLM, with a stand-in in the engine's place: what it is started with, signals, exit codes.

The stand-in is a package called vllm that serves nothing; tests/integrations/test_vllm.py starts the engine itself.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import diffprune as dp
from diffprune import versions
from diffprune.cli.main import _run
from diffprune.extras import VERSIONS
from tests import tiny
from tests.serve.test_process import save_tiny

STAND_IN = """
import json, os, signal, sys
def end(*_):
    print("ended", flush=True)
    sys.exit(7)
signal.signal(signal.SIGTERM, end)
print(json.dumps({"stand-in": sys.argv[1:], "pid": os.getpid(), "key": os.environ.get("VLLM_API_KEY")}), flush=True)
while True:
    signal.pause()
"""


def install_stand_in(root: Path, version: str) -> Path:
    """A folder for Python's path that holds the stand-in as this version of vLLM."""
    server = root / "vllm" / "entrypoints" / "openai" / "api_server.py"
    server.parent.mkdir(parents=True)
    for folder in (server.parent, *server.parent.parents[:2]):
        (folder / "__init__.py").touch()
    server.write_text(STAND_IN)
    about = root / f"vllm-{version}.dist-info" / "METADATA"
    about.parent.mkdir()
    about.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return root


def test_the_command_becomes_the_engine_and_ends_as_it_ends(tmp_path: Path) -> None:
    folder, engine = save_tiny(tmp_path / "tiny"), install_stand_in(tmp_path / "engine", "0.32.0")
    given = ["--model", str(folder), "--method", "divprune", "--keep", "5", "--token", "secret"]
    process = subprocess.Popen(  # the engine is found without being asked for
        [sys.executable, "-m", "diffprune", "serve", *given, "--engine-args", "--max-model-len 1024"],
        env={**os.environ, "PYTHONPATH": f"{engine}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line, said = process.stdout.readline(), json.loads(process.stdout.readline())
        assert "vllm.entrypoints.openai.api_server" in line and "secret" not in line
        assert said["stand-in"][-2:] == ["--max-model-len", "1024"] and str(folder) in said["stand-in"]
        assert said["pid"] == process.pid and said["key"] == "secret"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 7 and process.stdout.read() == "ended\n"  # the engine's own exit code
    finally:
        process.kill()
        process.communicate()


def test_an_engine_that_is_too_old_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(install_stand_in(tmp_path / "engine", "0.31.0"))
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("the engine is started"))
    model = str(save_tiny(tmp_path / "tiny"))
    assert _run(["serve", "--model", model, "--method", "divprune", "--keep", "5"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "vLLM 0.31.0 is too old" in printed.err


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


def test_an_engine_that_is_not_there_is_told_with_the_versions_that_are_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in ("cli.serve", "extras"):
        monkeypatch.setattr(f"diffprune.{module}.is_installed", lambda package: False)
    assert _run(["serve", "--engine", "vllm"]) == 2
    assert f"run pip install 'vllm{VERSIONS['vllm']}', or leave --engine vllm out" in capsys.readouterr().err


def test_options_of_one_engine_are_refused_by_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["serve", "--engine", "vllm", "--dry-run", "--batch", "4", "--fast"]) == 2
    assert "--batch, --fast of our own server are unknown to vLLM" in capsys.readouterr().err
    assert _run(["serve", "--engine", "own", "--dry-run", "--engine-args", "--seed 1"]) == 2
    assert "--engine-args '--seed 1' is for vLLM" in capsys.readouterr().err
    assert _run(["serve", "--engine", "vllm", "--dry-run", "--engine-args", "--seed '1"]) == 2
    assert "cannot be split (No closing quotation); close every quote" in capsys.readouterr().err


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
