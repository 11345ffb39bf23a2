"""The first cases of every campaign, and that a case is the same each time and a fault would be found."""

import random

import pytest

from diffprune.backbones import splice
from tests.fuzz import differential
from tests.fuzz.search import CAMPAIGNS, attempt


@pytest.mark.parametrize("name", list(CAMPAIGNS))
def test_the_first_cases_break_nothing(name: str) -> None:
    count = 20 if name in ("pictures", "files") else 3
    ended = [attempt(name, 0, case) for case in range(count)]
    assert not [sentence for outcome, sentence in ended if outcome == "broke"]
    assert any(outcome == "held" for outcome, _ in ended) or name == "commands"


def test_a_case_is_the_same_each_time() -> None:
    one, other = (differential.prompts(random.Random("0:before:1")) for _ in range(2))
    assert one[1] == other[1] and [[image.tobytes() for image in row or []] for row in one[0]] == [
        [image.tobytes() for image in row or []] for row in other[0]
    ]


def test_a_fault_in_the_splice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        splice,
        "positions_of",
        lambda columns, mask, unpruned, *, packed: original(columns, mask, 2 * unpruned, packed=packed),
    )
    found = [attempt("before", 0, case)[0] for case in range(4)]
    assert "broke" in found


original = splice.positions_of
