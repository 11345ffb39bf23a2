"""The table of hand-made faults: every text still occurs where it is said to, and a bad table is refused."""

import pytest

from tools.mutants.__main__ import TABLE, read_table, seen_by, stale


@pytest.mark.slow  # `make mutants` says so too; here it would stop whoever rewrites one of those lines
def test_every_fault_can_still_be_made() -> None:
    faults = read_table(TABLE.read_text(encoding="utf-8"))
    assert len(faults) >= 100 and stale(faults) == []


def test_a_text_that_is_gone_is_named() -> None:
    (sentence,) = stale(read_table("@ schedules.py | tests/test_schedules.py\n- no such text\n+ other"))
    assert "no such text -> other' occurs 0 times" in sentence


def test_a_fault_is_named_by_the_fix_that_it_undoes() -> None:
    text = "@ a.py | t.py\n- a\n+ b\n# undoes: the lock\n- c\n+ d\n- e\n+ f\n@ b.py | t.py\n- g\n+ h"
    assert [fault.undoes for fault in read_table(text)] == ["", "the lock", "the lock", ""]
    assert read_table(text)[1].name == "a.py: c -> d (undoes: the lock)"


def test_a_fault_may_name_one_test_of_a_file() -> None:
    (fault,) = read_table("@ schedules.py | tests/a.py::test_b tests/a.py::test_c tests/d.py\n- a\n+ b")
    assert fault.tests == ("tests/a.py::test_b", "tests/a.py::test_c", "tests/d.py")
    assert fault.test_files == ("tests/a.py", "tests/d.py")


def test_the_test_that_saw_a_fault_is_read_from_what_pytest_says() -> None:
    said = ["FAILED tests/a.py::test_b[c] - assert 1 == 2", "!!! stopping after 1 failures !!!", "1 failed in 2s"]
    assert seen_by(said) == "tests/a.py::test_b[c]"
    assert seen_by(["3 passed in 2s"]) == ""


@pytest.mark.parametrize("text", ["- a\n+ b", "@ a.py | t.py\n+ b", "@ a.py | t.py\n- a\n- b"])
def test_a_line_out_of_place_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="out of place"):
        read_table(text)
