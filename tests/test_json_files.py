"""JSON from outside and files of JSON lines: read, gone on from, or one sentence."""

from pathlib import Path
from typing import Any

import pytest

from diffprune.json_files import add_lines, keep_lines, parse_json, read_json, read_lines, require_kind


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": "\\ud800"}', "half a surrogate pair"),
        (b"9" * 5000, "4300"),
        (b"\xff", "utf-8"),
        (b"{", "Expecting"),
        (b"", "Expecting"),
    ],
)
def test_what_is_wrong_with_a_text_is_one_line(content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        parse_json(content)
    assert "\n" not in str(caught.value)


def test_a_whole_pair_and_any_character_are_read(tmp_path: Path) -> None:
    assert parse_json('"\\ud83d\\ude00 \u2028"') == "\U0001f600 \u2028"
    (tmp_path / "a.json").write_text('{"é": [1, null]}', encoding="utf-8")
    assert read_json(tmp_path / "a.json") == {"é": [1, None]}


def test_lines_are_added_and_read_back_whatever_they_hold(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "a.jsonl"
    texts = ["a", "line\nbreak", "\u2028 \u0085 \r", "\x1c", "\U0001f600"]  # some end a line for `str.splitlines`
    add_lines(path, texts[:2])
    add_lines(path, [{"said": text} for text in texts[2:]])
    assert read_lines(path) == ([*texts[:2], *({"said": text} for text in texts[2:])], path.stat().st_size)


def test_a_line_that_was_cut_off_is_left_out_and_taken_off_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    add_lines(path, [{"a": 1}, {"b": 2}])
    whole = path.read_bytes()
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        values, size = read_lines(path)
        assert values == [{"a": 1}, {"b": 2}][: whole[:length].count(b"\n")]
        assert path.read_bytes() == whole[:length]  # whose file it is is not known yet
        keep_lines(path, size)
        assert path.read_bytes() == whole[: whole.rfind(b"\n", 0, length) + 1]


def test_a_line_that_is_no_json_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": \n')
    with pytest.raises(ValueError, match=r"^line 2 of .*a\.jsonl is no JSON \(Expecting"):
        read_lines(path)


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        ({"a": [1, "x"]}, dict[str, list[int]], r"^it\.a\[1\] is 'x', no whole number$"),
        ([True], list[int], r"^it\[0\] is True, no whole number$"),
        (float("nan"), float, "^it is nan, no number$"),
        (10**400, float, "no number$"),
        ([1.5, "x"], list[float | None], r"^it\[1\] is 'x', no number or null$"),
        ({"a": None}, dict[str, str], r"^it\.a is None, no text$"),
        ("x" * 500, list[Any], r"^it is 'x{76}\.\.\., no list$"),
        ([], dict[str, Any], r"^it is \[\], no object$"),
        (1, bool, "^it is 1, no true or false$"),
    ],
)
def test_a_value_of_another_type_is_named_with_its_place(value: Any, kind: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        require_kind(value, kind, "it")


def test_values_of_a_type_are_taken() -> None:
    require_kind({"a": [1, 2.5, None]}, dict[str, list[float | None]], "it")
    require_kind([{"x": object()}], list[dict[str, Any]], "it")
    require_kind(None, str | None, "it")
