"""The rows of a batch while they are answered: each with its own length, stops, temperature and listener."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.generation.logits_process import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper
from transformers.generation.stopping_criteria import StoppingCriteria

from diffprune.streaming import BatchStreamer

GREEDY_BELOW = 1e-4  # a temperature at which the likeliest token is drawn anyway


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """How an answer is to be made.

    Args:
        max_tokens: Of the answer at most; None: as many as are allowed.
        stop: Texts at which it ends; they are not part of it.
        temperature: 0 takes the likeliest token.
        top_p: Share of the probability from which a token is drawn.
        seed: Of the draws; the same seed gives the same answer in any company.
    """

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Counts:
    """Tokens of one prompt: of its pictures before and after pruning, and all that the language model was given."""

    visual: int = 0
    kept: int = 0
    prompt: int = 0


@dataclass(kw_only=True)
class Row:
    """One answer while it is made.

    Args:
        wish: What was asked for.
        max_tokens: Of the answer.
        on_text: Called with each new piece of text; None where only the whole answer is wanted.
        on_end: Called with the row when it has ended, before the rows beside it have.
        is_wanted: Whether somebody still waits for it.
        deadline: Of `time.monotonic`.

    Attributes:
        text: What was said, without white space around it once the row is finished.
        finish: Why it ended: "stop", "length", "gone" (nobody waits), "timeout"; None while it goes on.
        num_tokens: Said so far.
        counts: Of the prompt, known when the making begins.
        path: On which it is made: "fast" or "eager".
        first: When the first token came, of `time.monotonic`.
    """

    wish: Wish
    max_tokens: int
    on_text: Callable[[str], None] | None = None
    on_end: Callable[["Row"], None] = lambda row: None
    is_wanted: Callable[[], bool] = lambda: True
    deadline: float = float("inf")
    text: str = ""
    finish: str | None = None
    num_tokens: int = 0
    counts: Counts = Counts()
    path: str = "eager"
    first: float | None = None
    _said: int = 0
    _warpers: Any = field(default=None, repr=False)
    _generator: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.draws:
            self._warpers = LogitsProcessorList([TemperatureLogitsWarper(self.wish.temperature)])
            if self.wish.top_p < 1.0:
                self._warpers.append(TopPLogitsWarper(self.wish.top_p))
            self._generator = torch.Generator()
            if self.wish.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(self.wish.seed % 2**63)

    @property
    def draws(self) -> bool:
        """Whether tokens are drawn, not chosen."""
        return self.wish.temperature >= GREEDY_BELOW

    def draw(self, scores: Float[Tensor, " V"]) -> int:
        """A token drawn from the scores, by this row's own generator."""
        assert self._warpers is not None
        warped = self._warpers(torch.zeros(1, 0, dtype=torch.int64), scores[None].float().cpu())
        return int(torch.multinomial(warped.softmax(-1), 1, generator=self._generator))

    def add(self, piece: str) -> None:
        """Take new text; ends the row where a stop is complete."""
        longest = max(map(len, self.wish.stop), default=0)
        start = max(0, len(self.text) - longest)
        self.text += piece
        found = [at for stop in self.wish.stop if (at := self.text.find(stop, start)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.end("stop")
        else:
            self._tell(len(self.text) - self._held())

    def end(self, reason: str) -> None:
        """Nothing more is said."""
        if self.finish is None:
            self.finish = reason
            self._tell(len(self.text))
            self.text = self.text.strip()
            self.on_end(self)

    def look(self) -> None:
        """End the row where nobody waits any more or its time is over."""
        if not self.is_wanted():
            self.end("gone")
        elif time.monotonic() > self.deadline:
            self.end("timeout")

    def _held(self) -> int:
        """Characters at the end that may yet turn out to be the beginning of a stop."""
        for length in range(max(map(len, self.wish.stop), default=1) - 1, 0, -1):
            if any(len(stop) > length and self.text.endswith(stop[:length]) for stop in self.wish.stop):
                return length
        return 0

    def _tell(self, end: int) -> None:
        """Say what is new before `end`, but for white space at either end of the answer."""
        if self.on_text is None:
            return
        end = len(self.text[:end].rstrip())
        start = self._said or len(self.text) - len(self.text.lstrip())
        if end > start:
            self._said = end
            self.on_text(self.text[start:end])


class RowStreamer(BatchStreamer):
    """Hands each row its text, counts its tokens and ends it where it has to."""

    def __init__(self, tokenizer: Any, answers: Sequence[Row], ends: Sequence[int]) -> None:
        super().__init__(tokenizer, lambda number, text: answers[number].add(text))
        self.answers, self.ends = list(answers), frozenset(ends)

    def put(self, value: Tensor) -> None:
        if not self.rows:
            super().put(value)
            return
        now = time.monotonic()
        for number, token in enumerate(value.reshape(-1).tolist()):
            row, heard = self.answers[number], self.rows[number]
            row.look()
            if row.finish is not None:
                continue
            if row.first is None:
                row.first = now
                if row.on_text is not None:
                    row.on_text("")  # the answer has begun, whether or not its first token is text already
            row.num_tokens += 1
            is_end, is_full = token in self.ends, row.num_tokens >= row.max_tokens
            if not is_end:
                heard.ids.append(token)
            if piece := heard.take(self._decode, last=is_end or is_full):
                row.add(piece)
            if is_end or is_full:
                row.end("stop" if is_end else "length")

    def end(self) -> None:
        """Whatever the model's own `generate` stopped for, nothing more comes."""
        for heard, row in zip(self.rows, self.answers, strict=True):
            if row.finish is None:
                if piece := heard.take(self._decode, last=True):
                    row.add(piece)
                row.end("stop")
        self.rows = []

    @property
    def is_over(self) -> bool:
        """Whether every row has ended."""
        return all(row.finish is not None for row in self.answers)


class EndedRows(StoppingCriteria):
    """Tells the model's own `generate` which rows have ended; it stops when all have."""

    def __init__(self, answers: Sequence[Row]) -> None:
        self.answers = answers

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Bool[Tensor, " B"]:
        return torch.tensor([row.finish is not None for row in self.answers], device=input_ids.device)


class DrawnTokens:
    """Leaves a row that draws its tokens one choice, the one it drew, so rows of any temperature share a batch."""

    def __init__(self, answers: Sequence[Row]) -> None:
        self.answers = answers

    def __call__(self, input_ids: Int[Tensor, "B T"], scores: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        drawing = [number for number, row in enumerate(self.answers) if row.draws and row.finish is None]
        if drawing:
            scores = scores.clone()
        for number in drawing:
            token = self.answers[number].draw(scores[number])
            scores[number] = -torch.inf
            scores[number, token] = 0.0
        return scores
