"""Answers written down as they come, so that a run that was killed goes on and asks nothing twice.

The journal lies beside the results file until the run is over: a first line that says what the answers follow from,
then one line for each batch, with what every measurement said to it. A line is whole or not there: the end of a file
that was cut off within a line is dropped. Once all is answered the sheet takes its place (`answers.write_sheet`).
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diffprune.evaluate.answers import answers_file

SUFFIX = ".answers.jsonl"
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
        if path is not None and path.exists():
            self._read(path)

    def _read(self, path: Path) -> None:
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        lines = whole.decode("utf-8").splitlines()
        if not lines:
            path.unlink()
            return
        try:
            first, *rest = map(json.loads, lines)
            require_same(path, first["made_by"], self.made_by)
            for line in rest:
                self._take(line["asked"], line["runs"])
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is damaged; delete it, or start anew with --fresh") from error
        if len(whole) < len(content):  # the process was killed while it wrote
            with path.open("r+b") as file:
                file.truncate(len(whole))

    def add(self, asked: Sequence[int], runs: Sequence[Reply]) -> None:
        """What every measurement said to a batch; on the disk when this returns."""
        assert len(runs) == self.runs, "one reply of each measurement"
        self._append({"asked": list(asked), "runs": list(runs)})
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

    def _append(self, line: Mapping[str, Any]) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            if file.tell() == 0:
                file.write(json.dumps({"made_by": self.made_by}, ensure_ascii=False).encode("utf-8") + b"\n")
            file.write(json.dumps(line, ensure_ascii=False).encode("utf-8") + b"\n")
            file.flush()
            os.fsync(file.fileno())


def require_same(path: Path, theirs: Mapping[str, str], ours: Mapping[str, str]) -> None:
    """A `ValueError` that names what differs where answers were made otherwise."""
    for key in dict.fromkeys([*ours, *theirs]):
        if theirs.get(key) != ours.get(key):
            raise ValueError(
                f"{path} holds answers with other {key} ({theirs.get(key, 'not known')}; now "
                f"{ours.get(key, 'not known')}); give another --out, or --fresh to answer anew"
            )


def start_anew(results: Path) -> None:
    """Forget what was answered for a results file."""
    for path in (journal_file(results), answers_file(results)):
        path.unlink(missing_ok=True)
