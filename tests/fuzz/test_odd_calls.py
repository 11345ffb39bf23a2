"""Every public call with odd values, but for those named as left: answered, or refused in one sentence of ours."""

import json
import subprocess
import sys
from pathlib import Path

from tests.fuzz.odd_calls import LEFT


def test_an_odd_argument_is_taken_or_refused_in_a_sentence(root: Path) -> None:
    # in a process without the checks of types that the tests have
    run = [sys.executable, "-W", "ignore", "-m", "tests.fuzz.odd_calls"]
    done = subprocess.run(run, cwd=root, capture_output=True, text=True)
    assert "Traceback" not in done.stderr, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one for one in found if one["call"] not in LEFT] == []
    assert {one["call"] for one in found} == LEFT  # one that is mended leaves the list
