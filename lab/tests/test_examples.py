"""Every example runs as it is printed."""

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


def test_the_three_lines_of_the_readme_run_as_printed(root):
    page = (root / "README.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root)
    assert run.returncode == 0 and run.stdout.strip() == "WOLF", run.stderr
