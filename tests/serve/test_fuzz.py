"""A search over the server's own schema: whatever is sent, no mistake of ours, and answers as documented."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny
from tests.serve.running import NAME, question
from tests.serve.test_process import Process, save_tiny

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


@pytest.mark.slow
def test_nothing_that_fits_or_misses_the_schema_breaks_the_server(tmp_path: Path) -> None:
    limits = ("--max-new-tokens", "4", "--timeout", "30")
    server = Process("--model", str(save_tiny(tmp_path / "tiny")), "--method", "divprune", "--name", NAME, *limits)
    try:
        assert server.url, "".join(server.lines)
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", "--checks", CHECKS]
        options = [
            "--mode",
            "all",
            "--max-examples",
            "150",
            "--seed",
            "1",
            "--no-color",
            "--generation-database",
            "none",
        ]
        run = subprocess.run([*command, *options], capture_output=True, text=True, cwd=tmp_path, timeout=900)
        assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
        with server.client() as client:  # and it lives on
            asked = [question("what is it?", tiny.picture(1))]
            answer = client.chat.completions.create(model=NAME, messages=asked, max_tokens=3)
        assert answer.usage.completion_tokens == 3
        assert server.end() == 0 and not [line for line in server.lines if "Traceback" in line]
    finally:
        server.close()
