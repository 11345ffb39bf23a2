"""Answers written down as they come, so that a run that was killed goes on and asks nothing twice.

The journal lies beside the results file until the run is over: a first line that says what the answers follow from,
then one line for each batch, with what every measurement said to it. A line is whole or not there: the end of a file
that was cut off within a line is dropped. Once all is answered the sheet takes its place (`answers.write_sheet`).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diffprune.atomic import require_plain
from diffprune.evaluate.answers import answers_file
from diffprune.json_files import add_lines, keep_lines, read_lines, require_kind, require_same

SUFFIX = ".answers.jsonl"
WAY_OUT = "give another --out, or --fresh to answer anew"  # where the answers in the way are of another run
Reply = dict[str, Any]  # `said`, and whatever else was measured of each prompt of a batch, a list each


def journal_file(results: Path) -> Path:
    """Where a results file's answers are written down while they come."""
    return results.with_suffix(SUFFIX)


class Journal:
    """What every measurement answered to which prompts; in memory alone where there is no path.

    Args:
        path: Of the file; it may hold what an earlier run of the same kind answered.
        made_by: What the answers follow from; a file that follows from anything else is refused.
        runs: How many measurements there are.
        count: How many prompts.
    """

    def __init__(self, path: Path | None, made_by: Mapping[str, str], *, runs: int, count: int) -> None:
        self.path, self.made_by, self.runs, self.count = path, dict(made_by), runs, count
        self.replies: dict[int, list[Reply]] = {}  # by place of a prompt what each run said
        self.size = 0  # of the file, as this run left it
        if path is not None:
            require_plain(path)
            if path.exists():
                self._read(path)

    def _read(self, path: Path) -> None:
        with _reading(path):
            lines, size = read_lines(path)
            made_by = _made_by(lines[0]) if lines else self.made_by
        require_same(path, made_by, self.made_by, way_out=WAY_OUT)
        with _reading(path):
            for number, line in enumerate(lines[1:], start=2):
                self._take(*self._checked(line, f"line {number}"))
        keep_lines(path, size)  # the process may have been killed while it wrote
        self.size = size

    def _checked(self, line: Any, where: str) -> tuple[list[int], list[Reply]]:
        """Prompts and replies of a line; a `ValueError` where as many measurements and prompts do not write it."""
        require_kind(line, dict[str, Any], where)
        asked, runs = line.get("asked"), line.get("runs")
        require_kind(asked, list[int], f"{where}: asked")
        require_kind(runs, list[dict[str, list[Any]]], f"{where}: runs")
        if not all(0 <= place < self.count for place in asked):
            raise ValueError(f"{where}: asked is {asked}, and there are {self.count} prompts")
        if len(runs) != self.runs or any(len(values) != len(asked) for reply in runs for values in reply.values()):
            raise ValueError(f"{where}: an answer is missing or there is one too many")
        for number, reply in enumerate(runs):
            require_kind(reply.get("said"), list[str], f"{where}: said of run {number}")
            for key in reply.keys() - {"said"}:
                require_kind(reply[key], list[float | None], f"{where}: {key} of run {number}")
        return asked, runs

    def add(self, asked: Sequence[int], runs: Sequence[Reply]) -> None:
        """What every measurement said to a batch; on the disk when this returns."""
        assert len(runs) == self.runs, "one reply of each measurement"
        if self.path is not None:
            if (self.path.stat().st_size if self.path.exists() else 0) != self.size:
                raise ValueError(
                    f"another evaluation writes to {self.path} too, or has removed it; give each its own --out, and "
                    "start this one again"
                )
            first = [] if self.size else [{"made_by": self.made_by}]
            add_lines(self.path, [*first, {"asked": list(asked), "runs": list(runs)}])
            self.size = self.path.stat().st_size
        self._take(asked, runs)

    def missing(self, asked: Sequence[int]) -> list[int]:
        """Those of some prompts that are not answered yet."""
        return [place for place in asked if place not in self.replies]

    def keys(self, run: int) -> list[str]:
        """What was written down of a measurement's answers."""
        return list(dict.fromkeys(key for place in range(self.count) for key in self.replies[place][run]))

    def column(self, run: int, key: str) -> list[Any]:
        """One measurement's answers (or other values) to all prompts, in their order."""
        return [self.replies[place][run].get(key) for place in range(self.count)]

    def close(self) -> None:
        """The sheet has it all: the journal is no longer needed."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _take(self, asked: Sequence[int], runs: Sequence[Reply]) -> None:
        for index, place in enumerate(asked):
            self.replies[place] = [{key: values[index] for key, values in reply.items()} for reply in runs]


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Inside, what is wrong with the file becomes a sentence that names it and the way out."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); delete it, or start anew with --fresh") from error


def _made_by(line: Any) -> dict[str, str]:
    require_kind(line, dict[str, Any], "line 1")
    require_kind(line.get("made_by"), dict[str, str], "line 1: made_by")
    return line["made_by"]


def start_anew(results: Path) -> None:
    """Forget what was answered for a results file."""
    for path in (journal_file(results), answers_file(results)):
        path.unlink(missing_ok=True)
