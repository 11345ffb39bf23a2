"""Sources of questions: found behind their door by name, and refused in a sentence where there is none."""

from typing import ClassVar

import pytest

from diffprune import doors
from diffprune.evaluate.sources import Questions, TaskSource, find_tasks
from tests.evaluate import memory as memory_module
from tests.evaluate.memory import MEMORY, Memory


@pytest.fixture(autouse=True)
def memory_alone(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What packages bring that happen to be installed is no part of these tests."""
    monkeypatch.setattr(doors, "_installed", lambda group: {})


def test_a_source_s_name_is_all_of_its_tasks_and_each_comes_once() -> None:
    assert isinstance(MEMORY, TaskSource)
    assert find_tasks("memory") == (MEMORY, ("letters", "words"))
    assert find_tasks("words,memory,words") == (MEMORY, ("words", "letters"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("letters,wrds", r"there is no task 'wrds'; choose memory \(all\) or from letters, words"),
        (",", r"no task was named; choose memory \(all\) or from letters, words"),
    ],
)
def test_a_wrong_name_is_answered_with_what_there_is(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        find_tasks(text)


def test_tasks_of_two_sources_are_measured_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(Memory):
        tasks: ClassVar = {"others": memory_module.words}

    monkeypatch.setattr(memory_module, "OTHER", Other(), raising=False)
    doors.join(doors.TASKS, "other", "tests.evaluate.memory:OTHER")
    with pytest.raises(ValueError, match=r"tasks 'letters,other' come from memory, other; measure them in turn"):
        find_tasks("letters,other")


def test_without_any_source_the_way_to_get_one_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "_joined", {})
    with pytest.raises(ValueError, match="no source of tasks is installed; install a package") as error:
        find_tasks("scenes")
    assert "pip install -e . -e lab" in str(error.value)


def test_a_source_that_does_not_know_what_matters_has_no_oracle() -> None:
    with pytest.raises(ValueError, match="there is no oracle"):
        Questions(()).oracle([], [])
