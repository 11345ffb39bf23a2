"""`diffprune serve` as a process of its own: it starts, serves, finishes what runs when it is told to end."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from diffprune.serve.run import listen
from tests import tiny
from tests.serve.running import question


def save_tiny(folder: Path) -> Path:
    """A small LLaVA in a folder, as the stock classes save it."""
    model, processor = tiny.build("llava")
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


class Process:
    """`diffprune serve`, its address and its messages."""

    def __init__(self, *arguments: str, module: str = "diffprune") -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, "serve", "--engine", "own", "--port", "0", *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        )
        assert self.process.stderr is not None
        self.url = ""
        for line in self.process.stderr:
            self.lines.append(line)
            if found := re.search(r"served at (http://\S+)/v1", line):
                self.url = found[1]
                break
        self._rest = threading.Thread(target=lambda: self.lines.extend(self.process.stderr or ()), daemon=True)
        self._rest.start()

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def end(self) -> int:
        """Its exit code, after SIGTERM."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(60)
        self._rest.join(10)
        return code

    def close(self) -> None:
        """Leave nothing behind, however the test went."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(60)
        assert self.process.stderr is not None
        self.process.stderr.close()


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    made = Process("--model", str(save_tiny(tmp_path / "tiny")), "--method", "divprune", "--keep", "5", "--name", "t")
    assert made.url, "".join(made.lines)
    try:
        yield made
    finally:
        made.close()


def test_what_runs_is_answered_when_the_process_is_told_to_end(process: Process) -> None:
    client, other = process.client(), process.client()
    asked: dict[str, Any] = {"model": "t", "messages": [question("what is it?", tiny.picture(1))]}
    stream = iter(client.chat.completions.create(**asked, max_tokens=500, stream=True))
    chunks = [next(stream)]
    whole: list[Any] = []
    waits = threading.Thread(target=lambda: whole.append(other.chat.completions.create(**asked, max_tokens=20)))
    waits.start()
    while not whole and num_open(process) < 2:  # one runs, the other waits for it
        waits.join(0.05)
    assert process.end() == 0, "".join(process.lines)
    chunks += list(stream)
    waits.join(60)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length" and len(said) > 100
    assert whole[0].usage.completion_tokens == 20 and whole[0].choices[0].message.content[:5] == said[:5]
    with pytest.raises(openai.APIConnectionError):
        client.models.list()
    client.close()
    other.close()


def num_open(process: Process) -> float:
    """Requests under way, as the server counts them."""
    with urllib.request.urlopen(f"{process.url}/metrics") as answer:
        text = answer.read().decode()
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith("diffprune_open "))


def test_a_taken_port_and_wrong_limits_are_one_sentence(tmp_path: Path) -> None:
    from diffprune.cli.main import _run

    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"cannot listen on 127.0.0.1:{port}"):
            listen("127.0.0.1", port)
        assert _run(["serve", "--engine", "own", "--port", str(port)]) == 2
    assert _run(["serve", "--engine", "own", "--batch", "0"]) == 2
    assert _run(["serve", "--engine", "quick"]) == 2


def test_the_engine_command_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from diffprune.cli.main import _run

    folder = save_tiny(tmp_path / "tiny")
    arguments = [
        "serve",
        "--engine",
        "vllm",
        "--dry-run",
        "--model",
        str(folder),
        "--method",
        "divprune",
        "--keep",
        "5",
    ]
    assert _run(arguments) == 0
    line = capsys.readouterr().out
    assert "vllm" in line and str(folder) in line and json.dumps("divprune") in line
    assert " --served-model-name tiny " in line  # as of our own server, so that clients ask alike
    assert _run(["serve", "--engine", "own", "--dry-run", "--model", str(folder)]) == 0
    assert "our own server would serve tiny on" in capsys.readouterr().out
