"""The table of hand-made faults: every text still occurs where it is said to, and a bad table is refused."""

import pytest

from tools.mutants.__main__ import TABLE, read_table, stale


@pytest.mark.slow  # `make mutants` says so too; here it would stop whoever rewrites one of those lines
def test_every_fault_can_still_be_made() -> None:
    faults = read_table(TABLE.read_text(encoding="utf-8"))
    assert len(faults) >= 100 and stale(faults) == []


def test_a_text_that_is_gone_is_named() -> None:
    (sentence,) = stale(read_table("@ schedules.py | tests/test_schedules.py\n- no such text\n+ other"))
    assert "no such text -> other' occurs 0 times" in sentence


@pytest.mark.parametrize("text", ["- a\n+ b", "@ a.py | t.py\n+ b", "@ a.py | t.py\n- a\n- b"])
def test_a_line_out_of_place_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="out of place"):
        read_table(text)
