"""`runs/serving_own.py` in small: rows are saved, seconds shared out, and a server that cannot load is gone without."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "runs" / "serving_own.py"


def load() -> Any:
    spec = importlib.util.spec_from_file_location("serving_own", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_answers_that_come_by_batches_are_counted_from_end_to_end_of_a_batch() -> None:
    period = 0.5

    def ask(number: int) -> tuple[float, float, str]:
        now = time.perf_counter()
        time.sleep(period - now % period)  # all clients are answered at once
        return 0.1, time.perf_counter() - now, "fast" if number % 2 else "eager"

    found = load().closed_loop(ask, clients=4, seconds=1.7, warm_up=0.3)  # 1.7 s hold three batches or four
    assert found["requests_s"] == pytest.approx(4 / period, rel=0.15)
    assert found["ttft_ms"] == pytest.approx(100) and found["errors"] == 0
    assert found["on_fast_path"] == 0.5


def test_seconds_are_shared_out_among_the_rows_that_are_left() -> None:
    module = load()
    clock = module.Clock(100.0, 4)
    module.STARTED = time.monotonic() - 40.0
    assert clock.seconds(50.0, 1.0) == pytest.approx(60 / 4 - 1.0 - module.OVERHEAD, abs=0.5)
    assert clock.seconds(5.0, 1.0) == 5.0
    module.STARTED = time.monotonic() - 99.0
    assert clock.seconds(5.0, 1.0) is None
    assert module.Clock(0.0, 4).seconds(5.0, 1.0) == 5.0


@pytest.mark.slow
@pytest.mark.parametrize("path", ["server", "loop"])
def test_rows_are_saved_with_and_without_a_server(path: str, tmp_path: Path) -> None:
    own = {**os.environ}
    if path == "loop":  # a package that is there and does not load
        (tmp_path / "broken" / "pydantic").mkdir(parents=True)
        (tmp_path / "broken" / "pydantic" / "__init__.py").write_text("raise ImportError('built for another Python')")
        own["PYTHONPATH"] = os.pathsep.join([str(tmp_path / "broken"), own.get("PYTHONPATH", "")])
    out = tmp_path / "serving.json"
    line = [sys.executable, str(SCRIPT), "--tiny", "--seconds", "2", "--warm-up", "0.5", "--clients", "1,2"]
    done = subprocess.run([*line, "--within", "200", "--out", str(out)], env=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    rows = json.loads(out.read_text())["rows"]
    assert [row["path"] for row in rows] == [path] * 6
    assert [(row["engine"], row["clients"]) for row in rows[::2]] == [("all tokens", 1), ("keep 64", 1), ("mixed", 1)]
    assert all(row["errors"] == 0 and row["on_fast_path"] == 1.0 for row in rows)
    assert ("cannot be imported: ImportError: built for another Python" in done.stdout) == (path == "loop")


def test_the_run_is_over_when_its_seconds_are(tmp_path: Path) -> None:
    line = [sys.executable, str(SCRIPT), "--tiny", "--within", "1", "--out", str(tmp_path / "serving.json")]
    start = time.monotonic()
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 3 and "time is up" in done.stdout
    assert time.monotonic() - start < 30
