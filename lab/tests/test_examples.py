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
    "4_train": "4 steps, held-out loss",
    "5_chat": "Which word does the sign show?  WOLF",
}


def test_every_example_is_tried():
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == sorted(SAYS)


RUN = """
import runpy, sys
paths = sys.argv[1:]
del sys.argv[1:]
for path in paths:
    print(f"== {path}", flush=True)
    runpy.run_path(path, run_name="__main__")
"""


@pytest.fixture(scope="module")
def printed(tmp_path_factory, root) -> dict[str, str]:
    """What the README's lines and each example print, one after the other in one process: imports cost the most."""
    folder = tmp_path_factory.mktemp("examples")
    readme = folder / "readme.py"
    code = (root / "README.md").read_text().split("```python\n")[1].split("```")[0]
    readme.write_text(f"import os\nos.chdir({str(root)!r})\n{code}\nos.chdir({str(folder)!r})\n")
    files = [readme, *(EXAMPLES / f"{name}.py" for name in sorted(SAYS))]
    run = subprocess.run([sys.executable, "-c", RUN, *files], capture_output=True, text=True, cwd=folder)
    assert run.returncode == 0, run.stderr
    parts = (part.partition("\n") for part in run.stdout.split("== ")[1:])
    return {Path(path).stem: text for path, _, text in parts}


@pytest.mark.parametrize("name", sorted(SAYS))
def test_an_example_runs_as_it_is_printed(name, printed):
    assert SAYS[name] in printed[name]


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


def test_the_three_lines_of_the_readme_run_as_printed(printed):
    assert printed["readme"].strip() == "WOLF"
