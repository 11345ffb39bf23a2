"""Every example runs as it is printed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SAYS = {
    "1_ask": "WOLF\n32 tokens kept",
    "2_folder": "wolf.png\t",
    "3_own_method": "WOLF",
    "4_train": "20 steps, held-out loss",
    "5_chat": "Which word does the sign show?  WOLF",
}


def test_every_example_is_tried():
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == sorted(SAYS)


@pytest.mark.parametrize("name", sorted(SAYS))
def test_an_example_runs_as_it_is_printed(name, tmp_path):
    run = subprocess.run([sys.executable, EXAMPLES / f"{name}.py"], capture_output=True, text=True, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert SAYS[name] in run.stdout


@pytest.mark.slow  # `make first-hour` runs it as well
def test_three_users_come_through_their_first_hour(tmp_path):
    environment = os.environ | {"DIFFPRUNE": f"{sys.executable} -m diffprune_lab", "PYTHON": sys.executable}
    script = ["bash", EXAMPLES / "first_hour.sh", tmp_path / "out"]
    run = subprocess.run(script, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert run.returncode == 0, run.stderr
    assert "12 answers added" in run.stdout and "0 answers added" in run.stdout
    assert len((tmp_path / "out/answers.jsonl").read_text().splitlines()) == 12
    assert all(
        (tmp_path / "out" / name).exists() for name in ("scorer/model.safetensors", "kept.png", "demo/index.html")
    )


def test_the_three_lines_of_the_readme_run_as_printed(root):
    page = (root / "README.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert run.returncode == 0 and run.stdout.strip() == "WOLF", run.stderr
