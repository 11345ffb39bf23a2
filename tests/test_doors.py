"""Other packages join by entry points, and a user's own file by --plugin."""

import logging
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from diffprune import doors
from diffprune.cli import main as cli
from diffprune.registry import BACKBONES, METHODS
from tests.train.runs import save_model

METHOD = '''
"""Keep the first K tokens."""

import torch

import diffprune as dp
from diffprune.methods.base import Card, ScoringPruner


@dp.register("{name}")
class First(ScoringPruner):
    """The first tokens of the raster order."""

    card = Card(idea="keeps the first K tokens")

    def score(self, tokens):
        return -torch.arange(tokens.x.shape[1]).expand(tokens.x.shape[:2]).float()
'''


@pytest.fixture
def door(monkeypatch):
    """A door with nothing behind it but what a test puts there."""
    monkeypatch.setattr(doors, "_installed", lambda group: {})
    monkeypatch.setattr(doors, "_joined", {})
    return doors


def test_an_entry_is_imported_when_it_is_asked_for_and_not_before(door):
    door.join("diffprune.tasks", "json", "json:dumps")
    assert door.entries("diffprune.tasks")["json"].value == "json:dumps"
    assert door.load("diffprune.tasks", "json")([1]) == "[1]"
    assert door.load("diffprune.tasks", "xml") is None


def test_an_entry_that_cannot_be_imported_is_named_once_and_takes_nothing_down(door, caplog):
    door.join("diffprune.models", "broken", "no_such_package.models:SOURCE")
    door.join("diffprune.models", "fine", "json:loads")
    with caplog.at_level(logging.WARNING, "diffprune"):
        assert list(door.load_all("diffprune.models")) == ["fine"]
        assert list(door.load_all("diffprune.models")) == ["fine"]
    (record,) = caplog.records
    assert "'broken' of diffprune.models is skipped" in record.getMessage()
    assert "no_such_package" in record.getMessage() and "install its package again" in record.getMessage()


def test_a_broken_command_of_another_package_leaves_the_others(door, capsys, caplog):
    door.join("diffprune.commands", "broken", "no_such_package.cli")
    assert cli._run(["methods", "--json"]) == 0
    assert "fastv" in capsys.readouterr().out and caplog.text == ""  # nothing else is imported for one command
    assert cli._run(["--help"]) == 0
    assert "methods" in capsys.readouterr().out
    assert "'broken' of diffprune.commands is skipped" in caplog.text


@pytest.mark.parametrize("name", ["demo", "probe"])
def test_a_command_of_the_lab_without_the_lab_says_how_to_get_it(door, capsys, name):
    assert cli._run([name]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "comes with the lab" in said and "pip install -e . -e lab" in said


def test_a_method_behind_a_door_is_a_method(door, tmp_path, monkeypatch):
    (tmp_path / "behind_a_door.py").write_text(METHOD.format(name="behind_a_door"))
    monkeypatch.syspath_prepend(str(tmp_path))
    METHODS.names()  # all are there before: what is first imported below would be forgotten with the copy
    monkeypatch.setattr(METHODS, "_found", dict(METHODS._found))
    door.join("diffprune.methods", "behind_a_door", "behind_a_door:First")
    assert METHODS.get("behind_a_door").card.idea == "keeps the first K tokens"
    assert "behind_a_door" in METHODS.names()


def test_entries_are_plain_entry_points(door):
    door.join("diffprune.methods", "x", "a.b:C")
    assert door.entries("diffprune.methods")["x"] == EntryPoint("x", "a.b:C", "diffprune.methods")


@pytest.mark.parametrize("where", ["before", "behind"])
def test_a_file_of_ones_own_joins_by_plugin(tmp_path, where):
    path = tmp_path / "mine.py"
    path.write_text(METHOD.format(name="mine"))
    plugin = ["--plugin", str(path)]
    arguments = [*plugin, "methods", "--json"] if where == "before" else ["methods", "--json", f"--plugin={path}"]
    run = subprocess.run([sys.executable, "-m", "diffprune", *arguments], capture_output=True, text=True)
    assert run.returncode == 0 and '"mine"' in run.stdout, run.stderr


def test_a_plugin_does_not_take_the_name_of_a_method_of_the_library(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(METHOD.format(name="divprune"))
    command = [sys.executable, "-m", "diffprune", "--plugin", str(path), "methods"]  # where nothing is imported yet
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 2 and "'divprune' is registered twice, by diffprune.methods.divprune and by" in run.stderr


@pytest.mark.parametrize(
    "content, words",
    [(None, "is no file; give a Python file"), ("1 +", "cannot be imported: SyntaxError"), ("import nope", "nope")],
)
def test_a_plugin_that_cannot_be_read_is_one_sentence(tmp_path, capsys, content, words):
    path = tmp_path / "odd.py"
    if content is not None:
        path.write_text(content)
    assert cli._run(["methods", "--plugin", str(path)]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1 and str(path) in said


def test_a_plugin_without_a_file_is_one_sentence(capsys):
    assert cli._run(["methods", "--plugin"]) == 2
    assert "--plugin has no file" in capsys.readouterr().err


def test_a_loaded_model_imports_one_method_and_one_family(tmp_path):
    code = (
        "import sys; import diffprune as dp\n"
        f"dp.load({str(save_model(tmp_path))!r}, method='divprune', keep=4)\n"
        "print(*sorted(name for name in sys.modules if name.startswith('diffprune.')))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found = run.stdout.split()
    families = {f"diffprune.backbones.{name}" for name in BACKBONES.known()}
    assert families & set(found) == {"diffprune.backbones.llava"}
    assert {f"diffprune.methods.{name}" for name in METHODS.known()} & set(found) == {"diffprune.methods.divprune"}
    parts = {name.split(".")[1] for name in found}
    assert not parts & {"train", "evaluate", "speed", "fast", "serve", "integrations", "report", "cli"}


def test_a_second_name_of_a_class_imports_its_file_alone():
    code = (
        "import sys; from diffprune.registry import METHODS\n"
        "assert METHODS.get('sparsevlm-plus') is METHODS.get('sparsevlm') and 'diffprune-diverse' in METHODS\n"
        "print(*(name for name in sys.modules if name.startswith('diffprune.methods.')))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found = {name.removeprefix("diffprune.methods.") for name in run.stdout.split()}
    assert found & set(METHODS.known()) == {"sparsevlm"} and "diffprune_diverse" in found


def test_a_name_that_moved_to_a_package_that_is_not_there_says_so(door):
    import diffprune as dp

    with pytest.raises(AttributeError, match="PrunedClassifier has moved to the lab"):
        _ = dp.PrunedClassifier
