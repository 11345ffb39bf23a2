"""The questions of these tests: a source of their own, joined by the door that packages use."""

import pytest

from diffprune import doors
from tests.evaluate.memory import MEMORY, Memory


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    """The source `memory`, joined for one test."""
    monkeypatch.setattr(doors, "_joined", {})
    doors.join(doors.TASKS, "memory", "tests.evaluate.memory:MEMORY")
    return MEMORY
