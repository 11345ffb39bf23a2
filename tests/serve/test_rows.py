"""One row of a batch: its text, its stops and its end."""

import pytest

from diffprune.serve.rows import Row, Wish


@pytest.mark.parametrize("size", [1, 2, 3, 50])
@pytest.mark.parametrize(
    ("stop", "wanted", "finish"),
    [
        ((), "one two  three END four", "length"),
        (("END",), "one two  three", "stop"),
        (("EN D", "three"), "one two", "stop"),
        (("END four!",), "one two  three END four", "length"),
        (("o", "one"), "", "stop"),
    ],
)
def test_pieces_join_to_the_answer_and_hold_back_what_may_be_a_stop(
    size: int, stop: tuple[str, ...], wanted: str, finish: str
) -> None:
    said: list[str] = []
    ended: list[Row] = []
    row = Row(wish=Wish(stop=stop), max_tokens=99, on_text=said.append, on_end=ended.append)
    text = "  one two  three END four \n"
    for start in range(0, len(text), size):
        if row.finish is None:
            row.add(text[start : start + size])
    row.end("length")
    assert "".join(said) == row.text == wanted and row.finish == finish and ended == [row]


def test_a_row_ends_when_nobody_waits_or_its_time_is_over() -> None:
    gone = Row(wish=Wish(), max_tokens=9, is_wanted=lambda: False)
    late = Row(wish=Wish(), max_tokens=9, deadline=0.0)
    kept = Row(wish=Wish(), max_tokens=9)
    for row in (gone, late, kept):
        row.look()
    assert [gone.finish, late.finish, kept.finish] == ["gone", "timeout", None]
