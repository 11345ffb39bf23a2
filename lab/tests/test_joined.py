"""How the lab joins the library: by what it declares, and by hand where it is not installed."""

import subprocess
import sys
import tomllib

import diffprune_lab


def test_what_is_declared_is_what_is_joined_by_hand(root):
    declared = tomllib.loads((root / "lab/pyproject.toml").read_text())["project"]["entry-points"]
    assert declared == diffprune_lab.DOORS


def test_the_library_never_names_the_lab(root):
    named = [path for path in (root / "src").rglob("*.py") if "diffprune_lab" in path.read_text()]
    assert named == []


def test_the_lab_on_the_path_runs_without_being_installed(root):
    """`python -m diffprune_lab` opens the doors by hand."""
    code = (
        "import importlib.metadata; importlib.metadata.entry_points = lambda **_: ()\n"
        "import sys, runpy; sys.argv = ['diffprune', 'demo', '--help']\n"
        "runpy.run_module('diffprune_lab', run_name='__main__')"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0 and "Train a scorer on a frozen model" in run.stdout, run.stderr
