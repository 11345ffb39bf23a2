"""Answers as text while they are made: a streamer that takes a batch, and an iterator over what it is given."""

import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any

from torch import Tensor
from transformers.generation.streamers import BaseStreamer

UNFINISHED = "\ufffd"  # what a tokenizer writes for bytes that are not yet a whole character


class Cancelled(Exception):
    """Raised inside a generation whose listener has gone."""


class BatchStreamer(BaseStreamer):
    """Text of every row as its tokens come; the prompt is not repeated.

    transformers' own text streamers take one row; this one takes any number.

    Args:
        tokenizer: Of the model.
        on_text: Called with (row, text) for every new piece.
    """

    def __init__(self, tokenizer: Any, on_text: Callable[[int, str], None]) -> None:
        self.tokenizer, self.on_text = tokenizer, on_text
        self.rows: list[_Row] = []

    def put(self, value: Tensor) -> None:
        """Take the prompts, which come first, then the next token of each row."""
        if not self.rows:
            self.rows = [_Row() for _ in range(len(value) if value.ndim > 1 else 1)]
            return
        for number, (row, token) in enumerate(zip(self.rows, value.reshape(-1).tolist(), strict=True)):
            row.ids.append(token)
            if piece := row.take(self._decode):
                self.on_text(number, piece)

    def end(self) -> None:
        """What was held back, and then the next prompts may come."""
        for number, row in enumerate(self.rows):
            if piece := row.take(self._decode, last=True):
                self.on_text(number, piece)
        self.rows = []

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)


class _Row:
    """One answer: its ids, and how many of them are text already."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.first = self.said = 0  # a token is decoded behind the ones before it: a space may belong to either

    def take(self, decode: Callable[[Sequence[int]], str], *, last: bool = False) -> str:
        """The text that is new; none while its last character is not whole."""
        before, now = decode(self.ids[self.first : self.said]), decode(self.ids[self.first :])
        if len(now) <= len(before) or (now.endswith(UNFINISHED) and not last):
            return ""
        self.first, self.said = self.said, len(self.ids)
        return now[len(before) :]


def pieces(tokenizer: Any, run: Callable[[BatchStreamer], Any]) -> Iterator[tuple[int, str]]:
    """What a generation says, (row, text) piece by piece, while it runs in a thread of its own.

    An error of the generation is raised here. Where the iterator is closed before its end, the generation stops at its
    next token.

    Args:
        run: Generates with the streamer it is given.
    """
    queue: SimpleQueue[tuple[int, str] | BaseException | None] = SimpleQueue()
    gone = threading.Event()

    class Heard(BatchStreamer):
        def put(self, value: Tensor) -> None:
            if gone.is_set():
                raise Cancelled
            super().put(value)

    def work() -> None:
        try:
            run(Heard(tokenizer, lambda row, text: queue.put((row, text))))
            queue.put(None)
        except Cancelled:
            pass
        except BaseException as error:  # whatever it is, it belongs to the one who listens
            queue.put(error)

    thread = threading.Thread(target=work, name="diffprune-stream", daemon=True)
    thread.start()
    try:
        while (item := queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        gone.set()
        thread.join()
