"""What commands put on a terminal: tables that fit its width, bars with the time left, and a header before the work.

Tables go to stdout, everything else to stderr, so that a pipe gets the result alone. torch and transformers are
imported inside the functions that need them: a first line appears before they are loaded.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from diffprune.results import Row, format_value

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

WIDE = 10_000  # columns of a table whose lines may be as long as they are
GAP = 2  # between two columns
READABLE = 16  # columns below which text is not squeezed


def terminal_width() -> int:
    """Columns of the terminal (`COLUMNS` where that is set), 80 where there is none."""
    return shutil.get_terminal_size((80, 24)).columns


# --- tables -----------------------------------------------------------------------------------------------------------


def print_table(rows: Sequence[Row], columns: Sequence[str], *, wide: bool = False) -> None:
    """Rows as a plain table that fits the terminal: text wraps between words, a number is never split.

    Columns are named most important first: where they do not fit, the last ones are left out and named below the table.

    Args:
        wide: Every column and long lines, for a wide screen or a file.
    """
    lines, hidden = table_lines(rows, columns, width=WIDE if wide else terminal_width())
    print("\n".join(lines))
    if hidden:
        print_note(f"not shown at this width: {', '.join(hidden)} (--wide, --json)")


def print_note(text: str) -> None:
    """A sentence about a table, on lines that fit the terminal."""
    print(textwrap.fill(text, terminal_width(), break_long_words=False, break_on_hyphens=False))


def table_lines(rows: Sequence[Row], columns: Sequence[str], *, width: int) -> tuple[list[str], list[str]]:
    """Lines of the table at most `width` long, and the columns that found no place; the first one always stays."""
    made = [_Column.of(name, [row.get(name) for row in rows], is_first=name == columns[0]) for name in columns]
    made = [column for column in made if any(column.cells)] or made[:1]
    shown = list(made)
    while len(shown) > 1 and sum(column.least for column in shown) + GAP * (len(shown) - 1) > width:
        shown.pop()
    widths = [column.least for column in shown]
    free = width - sum(widths) - GAP * (len(shown) - 1)
    for index, column in enumerate(shown):  # what is left over goes to the first that can use it
        more = max(0, min(free, column.most - column.least))
        widths[index] += more
        free -= more
    header = [textwrap.wrap(column.heading, size) for column, size in zip(shown, widths, strict=True)]
    deepest = max(map(len, header))
    lines = _set_row([[""] * (deepest - len(words)) + words for words in header], shown, widths)
    lines.append(" ".join(["-" * size for size in widths]).replace(" ", " " * GAP))
    for index in range(len(rows)):
        cells = [
            textwrap.wrap(column.cells[index], size, break_on_hyphens=False)
            for column, size in zip(shown, widths, strict=True)
        ]
        lines += _set_row(cells, shown, widths)
    return lines, [column.name for column in made[len(shown) :]]


@dataclass(frozen=True, slots=True)
class _Column:
    """One column: the least width at which no number is split and text is readable, and the most it can use."""

    name: str
    cells: list[str]
    is_right: bool
    least: int
    most: int

    @property
    def heading(self) -> str:
        return self.name.replace("_", " ")  # so that a long name may stand on two lines

    @classmethod
    def of(cls, name: str, values: Sequence[object], *, is_first: bool) -> _Column:
        # A share is told from a count by its point: 1.0 is all tokens, 1 is one.
        is_keep = [name == "keep" and isinstance(value, float) for value in values]
        cells = [str(value) if plain else format_value(value) for value, plain in zip(values, is_keep, strict=True)]
        numbers = [_is_number(value) for value in values]
        longest = max(map(len, cells), default=0)
        is_text = not is_first and not any(numbers)
        parts = [*name.replace("_", " ").split(), *(word for cell in cells for word in cell.split() if is_text)]
        least = max([*map(len, parts), min(longest, READABLE) if is_text else longest])
        is_right = any(numbers) and all(found or value is None for found, value in zip(numbers, values, strict=True))
        return cls(name, cells, is_right, least, max(longest, len(name)))


def _set_row(cells: Sequence[Sequence[str]], columns: Sequence[_Column], widths: Sequence[int]) -> list[str]:
    """Cells of several lines each, side by side; numbers end at the same place."""
    lines = []
    for level in range(max([1, *map(len, cells)])):
        parts = [cell[level] if level < len(cell) else "" for cell in cells]
        padded = [
            part.rjust(size) if column.is_right else part.ljust(size)
            for part, column, size in zip(parts, columns, widths, strict=True)
        ]
        lines.append((" " * GAP).join(padded).rstrip())
    return lines


def _is_number(value: object) -> bool:
    """Whether a cell is a number, or an interval of numbers."""
    if isinstance(value, list | tuple):
        return bool(value) and all(map(_is_number, value))
    return isinstance(value, int | float) and not isinstance(value, bool)


# --- progress ---------------------------------------------------------------------------------------------------------


def clock(seconds: int | float | None) -> str:
    """Seconds as a person reads them: 0:09, 1:09, 2:00:05; a question mark for what is not known yet."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def time_column() -> ProgressColumn:
    """The column of a bar that says how long it has taken and how long it will: `0:09, 1:09 left`."""
    from rich.progress import ProgressColumn, Task
    from rich.text import Text

    class TimeColumn(ProgressColumn):
        def render(self, task: Task) -> Text:
            spent = task.finished_time if task.finished else task.elapsed
            left = "" if task.finished else f", {clock(task.time_remaining)} left"
            return Text(f"{clock(spent or 0)}{left}", style="progress.elapsed")

    return TimeColumn()


@contextmanager
def progress_bars(*, quiet: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """A function to call with (stage, done, total); every stage is a bar on stderr with its time left.

    Where stderr is no terminal, a line is written when a stage is done.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn

    hush_loader()
    bars: dict[str, TaskID] = {}
    console = Console(stderr=True, quiet=quiet)
    columns = (
        TextColumn("{task.description:<24}"),
        BarColumn(bar_width=24),
        TextColumn("{task.percentage:>3.0f} %"),
        time_column(),
    )
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal) as progress:

        def update(stage: str, done: int, total: int) -> None:
            if stage not in bars:
                bars[stage] = progress.add_task(stage, total=total)
            progress.update(bars[stage], completed=done, total=total)
            if done == total and not console.is_terminal:
                console.print(f"{stage}: done", highlight=False)

        yield update


# --- header -----------------------------------------------------------------------------------------------------------


def announce(sentence: str, *, quiet: bool = False) -> None:
    """A line on stderr at once: what a command is about to do, or has just loaded."""
    if not quiet:
        print(sentence, file=sys.stderr, flush=True)


def announce_loading(sentence: str, *, quiet: bool = False) -> None:
    """A first line for whoever waits at a terminal while torch is imported; a pipe does not get it."""
    announce(f"{sentence}: loading", quiet=quiet or not sys.stderr.isatty())


def describe_model(name: str, base: Any, *, method: str = "", keep: object = None) -> str:
    """One line of a loaded model: its name, size, type and device, and what prunes it.

    Args:
        base: The Hugging Face model.
        keep: The budget.
    """
    parts = [name, f"{count_text(sum(one.numel() for one in base.parameters()))} parameters"]
    parts.append(f"{str(base.dtype).removeprefix('torch.')} on {base.device}")
    if method:
        parts.append(method if keep is None or method == "full" else f"{method}, keep {keep}")
    return ", ".join(parts)


def count_text(number: int) -> str:
    """A large count in three digits: 1.83 M, 7.06 B."""
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return str(number)


def first_line(error: Exception) -> str:
    """What an error says, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def hush_loader() -> None:
    """No bar of transformers while it reads weights, which every command says in its header; downloads keep theirs."""
    from huggingface_hub.utils import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils.logging import disable_progress_bar

    was_off = are_progress_bars_disabled()
    disable_progress_bar()  # of the hub too
    if not was_off:
        enable_progress_bars()
