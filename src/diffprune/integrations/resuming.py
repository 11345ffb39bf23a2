"""What a harness was answered, written down batch by batch, so that a run that was killed asks nothing twice.

One journal (`evaluate.journal`) holds all measurements, one after the other, of each the rows of every task's data. Of
several processes each has its own file, since they write at the same time.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from diffprune.evaluate.journal import Journal, journal_file
from diffprune.evaluate.made_by import digest

Row = tuple[str, int]  # a task, and a row of its data
Said = tuple[str, int]  # an answer, and the length of its pruned prompt
MEDIA = re.compile(r"\b(Image|Video|Audio)\(")  # in the type of a column
PART = 1000  # rows that are read at a time


@dataclass(frozen=True, slots=True)
class Answered:
    """One measurement's part of a journal.

    Args:
        first: By task the place of its first row.
    """

    journal: Journal
    first: Mapping[str, int]

    def get(self, row: Row) -> Said | None:
        """What was said to a row, where it was asked before."""
        replies = self.journal.replies.get(self._place(row))
        return None if replies is None else (replies[0]["said"], int(replies[0]["prompt_tokens"]))

    def add(self, rows: Sequence[Row], said: Sequence[Said]) -> None:
        """What was said to a batch; on the disk when this returns."""
        texts, lengths = [text for text, _ in said], [length for _, length in said]
        self.journal.add([self._place(row) for row in rows], [{"said": texts, "prompt_tokens": lengths}])

    def _place(self, row: Row) -> int:
        return self.first[row[0]] + row[1]


def open_journal(
    path: Path | None, made_by: Mapping[str, str], rows: Mapping[str, int], *, runs: int
) -> list[Answered]:
    """Of each of `runs` measurements what was answered before, and where more is written down.

    Args:
        rows: By task how many rows its data has.
    """
    starts = dict(zip(rows, accumulate([0, *rows.values()]), strict=False))
    total = sum(rows.values())
    journal = Journal(path, made_by, runs=1, count=runs * total)
    return [Answered(journal, {task: run * total + start for task, start in starts.items()}) for run in range(runs)]


def answer_open(
    rows: Sequence[Row],
    answered: Answered | None,
    answer: Callable[[Sequence[int]], Iterable[tuple[Sequence[int], Sequence[Said]]]],
) -> list[Said]:
    """What is said to each row: what was written down, and the rest as it comes.

    Args:
        answer: Given the places of rows to ask; gives batches of them with what was said.
    """
    found = [None if answered is None else answered.get(row) for row in rows]
    for places, said in answer([place for place, one in enumerate(found) if one is None]):
        if answered is not None:
            answered.add([rows[place] for place in places], said)
        for place, one in zip(places, said, strict=True):
            found[place] = one
    assert None not in found, "every row is asked"
    return [one for one in found if one is not None]


def process_file(results: Path, rank: int) -> Path:
    """The journal of one of several processes."""
    return journal_file(results) if rank == 0 else results.with_suffix(f".answers.{rank}.jsonl")


# What the answers follow from ----------------------------------------------------------------------------------------


def questions_text(tasks: Sequence[Any], limit: int | None) -> str:
    """How many rows are asked, and a digest of them and of how the harness asks; pictures are not read for it."""
    counts = [len(task.eval_docs) if limit is None else min(limit, len(task.eval_docs)) for task in tasks]
    parts = [part for task, count in zip(tasks, counts, strict=True) for part in _described(task, count)]
    return f"{sum(counts)}, {digest(*parts)}"


def _described(task: Any, count: int) -> Iterator[str]:
    config, docs = task.config, task.eval_docs
    prompt = config.doc_to_text if isinstance(config.doc_to_text, str) else ""
    yield repr((config.task, count, prompt, config.generation_kwargs))
    docs = docs.select_columns([name for name, kind in docs.features.items() if not MEDIA.search(repr(kind))])
    for start in range(0, count, PART):
        yield repr(docs[start : min(count, start + PART)])
