"""What commands put on a terminal: tables, times, and what is refused before torch is imported."""

import gc
import re
import subprocess
import sys

import pytest
from PIL import Image

from diffprune import terminal
from diffprune.cli import collector_at_rest
from diffprune.cli import main as cli
from diffprune.methods.naming import check_names
from diffprune.registry import BACKBONES, METHODS

ROWS = [
    {
        "method": f"method_{index}",
        "keep": 64,
        "retention": 99.5 - index,
        "ci95": [98.25, 99.75],
        "note": "a sentence of several words that may go on the next line",
        "ttft_ms": 1234567.0 + index,
        "decode_tok_s": 220.5,
        "largest_batch": 1_000_000,
        "requests_s": 12345.6,
    }
    for index in range(3)
]
COLUMNS = list(ROWS[0])


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_a_table_fits_and_never_splits_a_number(width: int) -> None:
    lines, hidden = terminal.table_lines(ROWS, COLUMNS, width=width)
    assert max(map(len, lines)) <= width
    shown = [column for column in COLUMNS if column not in hidden]
    assert [*shown, *hidden] == COLUMNS  # the last ones give way first
    text = "\n".join(lines)
    for row in ROWS:
        for column in shown:
            if column != "note":
                assert terminal.format_value(row[column]) in text
    assert "…" not in text and (not hidden) == (width >= 120)


def test_what_has_no_place_is_named_and_wide_shows_it(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    terminal.print_table(ROWS, COLUMNS)
    out = capsys.readouterr().out
    assert "not shown at this width: " in out and "requests_s" in out and "12,346" not in out
    terminal.print_table(ROWS, COLUMNS, wide=True)
    out = capsys.readouterr().out
    assert "not shown" not in out and "12,346" in out


def test_a_column_without_any_value_takes_no_place() -> None:
    lines, hidden = terminal.table_lines([{"a": 1, "b": None}], ["a", "b"], width=80)
    assert hidden == [] and "b" not in "".join(lines)


def test_a_share_of_all_is_not_shown_as_one_token() -> None:
    lines, _ = terminal.table_lines(
        [{"method": "full", "keep": 1.0}, {"method": "x", "keep": 1}], ["method", "keep"], width=80
    )
    assert lines[2].endswith("1.0") and lines[3].endswith(" 1")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (9.4, "0:09"), (69, "1:09"), (59.6, "1:00"), (3599.7, "1:00:00"), (7205, "2:00:05"), (None, "?")],
)
def test_times_read_like_a_clock(seconds: float | None, text: str) -> None:
    assert terminal.clock(seconds) == text


def test_a_bar_says_how_long_it_took_and_will_take() -> None:
    from rich.progress import Progress

    now = 0.0
    column = terminal.time_column()
    progress = Progress(column, get_time=lambda: now, auto_refresh=False)
    task = progress.add_task("work", total=78)
    for done in range(1, 10):
        now = float(done)
        progress.update(task, completed=done)
    assert str(column(progress.tasks[0])) == "0:09, 1:09 left"
    now = 78.0
    progress.update(task, completed=78)
    assert str(column(progress.tasks[0])) == "1:18"


@pytest.mark.parametrize(("number", "text"), [(999, "999"), (1_834_000, "1.83 M"), (7_063_000_000, "7.06 B")])
def test_large_counts_have_three_digits(number: int, text: str) -> None:
    assert terminal.count_text(number) == text


# --- names ------------------------------------------------------------------------------------------------------------


def test_declared_names_are_those_that_importing_finds() -> None:
    for registry in (METHODS, BACKBONES):
        assert registry.declared <= set(registry.names())
        ours = {name for name in registry.names() if registry.get(name).__module__.startswith("diffprune.")}
        assert ours <= registry.declared


def test_a_misspelled_method_is_refused_with_the_near_ones() -> None:
    check_names("full, fastv[layer=3;budget=average],sparsevlm-plus,mine", also=["mine"])
    with pytest.raises(ValueError, match="unknown method 'divprun'; did you mean divprune"):
        check_names("full,divprun[native=true]")


IMPORTED = re.compile(r"^import time:.*\| +(torch|transformers|matplotlib|rich)$", re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--help"], 0, ""),
        (["plan", "--help"], 0, ""),
        (["plan", "--gpuu", "h200"], 2, "No such option"),
        (["show", "--method", "divprun", "--image", "a.png", "--out", "b.png"], 2, "unknown method 'divprun'"),
        (["profile", "--methods", "full,divprun"], 2, "unknown method 'divprun'"),
        (["eval", "--methods", "full,oracle,divprun"], 2, "unknown method 'divprun'"),
        (["ask", "--method", "divprun", "--image", "a.png", "what?"], 2, "unknown method 'divprun'"),
        (["ask", "--method", "divprune", "what?"], 2, "no picture is named"),
    ],
)
def test_help_and_wrong_names_need_neither_torch_nor_rich(arguments: list[str], code: int, words: str) -> None:
    """Importing torch is seconds of CPU time; without it these are tenths of a second."""
    run = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "diffprune", *arguments], capture_output=True, text=True
    )
    assert run.returncode == code and words in run.stderr
    assert IMPORTED.findall(run.stderr) == []


def test_a_picture_that_cannot_be_read_needs_no_transformers(tmp_path) -> None:
    arguments = ["ask", "--image", str(tmp_path / "none.png"), "what?"]
    run = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "diffprune", *arguments], capture_output=True, text=True
    )
    assert run.returncode == 2 and "there is no image file" in run.stderr
    assert "transformers" not in IMPORTED.findall(run.stderr)


@pytest.mark.parametrize("arguments", [["ask", "what?", "--image", "{}"], ["show", "--image", "{}", "--out", "{}"]])
def test_a_model_is_loaded_with_the_collector_at_rest(arguments: list[str], tmp_path, capsys, monkeypatch) -> None:
    """Its passes over what imports and weights leave behind are a tenth of the CPU time of a first answer."""
    picture, seen = tmp_path / "a.png", []
    Image.new("RGB", (8, 8)).save(picture)

    def load(*_: object, **__: object) -> None:
        seen.append(gc.isenabled())
        raise ValueError("far enough")

    monkeypatch.setattr("diffprune.api.load_vlm", load)
    assert cli._run([part.format(picture) for part in arguments]) == 2
    assert "far enough" in capsys.readouterr().err
    assert seen == [False] and gc.isenabled()


def test_what_is_made_with_the_collector_at_rest_is_old_behind_it() -> None:
    code = (  # in a process of its own: that of the tests may have set objects aside
        "import gc; from diffprune.cli import collector_at_rest\n"
        "with collector_at_rest(): made = []\n"
        "assert gc.isenabled() and gc.get_freeze_count() == 0\n"
        "assert any(one is made for one in gc.get_objects(generation=2))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        with collector_at_rest():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_the_end_of_a_command_looks_for_no_garbage() -> None:
    code = (
        "import atexit, gc, sys; atexit.register(lambda: print(gc.get_freeze_count() > 0, file=sys.stderr))\n"
        "sys.argv = ['diffprune', '--version']\n"
        "from diffprune.cli.main import main; main()"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0 and run.stderr == "True\n"


def test_bad_input_is_code_2_and_our_own_mistake_1(capsys, monkeypatch) -> None:
    def fail(error: Exception) -> None:
        raise error

    for error, code in ((ValueError("no"), 2), (OSError("no"), 2), (RuntimeError("no"), 1)):
        monkeypatch.setattr("diffprune.cli.doctor.inspect_installation", lambda error=error: fail(error))
        assert cli._run(["doctor"]) == code
    assert capsys.readouterr().err.count("\n") == 3
