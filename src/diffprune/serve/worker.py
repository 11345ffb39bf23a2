"""One thread that owns the model: it takes what waits, answers it together, and tells each listener.

Nothing else touches the model. A batch is made of what waits when the last one is through: requests for one method,
with any budgets, lengths and temperatures. What a request does wrong is told to it alone: where a batch fails, its
requests are run one by one.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image

from diffprune.serve.answer import answer_rows
from diffprune.serve.errors import ApiError
from diffprune.serve.rows import Counts, Row, Wish
from diffprune.serve.settings import Settings

logger = logging.getLogger("diffprune")

CHARACTERS_PER_TOKEN = 64  # a text with more of them than that for each place of the context is too long for sure


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request is told at its end.

    Args:
        seconds: From the start of its batch to the last token; `first` to the first one.
        batch: Requests that were answered together.
        path: "fast" or "eager".
    """

    text: str
    finish: str
    num_tokens: int
    counts: Counts
    seconds: float
    first: float
    batch: int
    path: str
    ended: float = field(default_factory=time.monotonic)


@dataclass(eq=False, kw_only=True)
class Job:
    """A request that waits for the worker.

    Args:
        tell: Called from the worker's thread with each piece of text (a `str`, where `stream` is set), then once with
            an `Answer`, a result, or an `ApiError`.
        method: By which name the pictures are pruned; None: the server's own.
        prompt: Laid out, with a placeholder for each picture.
        keep: A budget, or one for each picture; None: the server's own.
        run: Instead of an answer: what to do with the model of the method, whose result is told.
    """

    tell: Callable[[Any], None]
    method: str | None = None
    prompt: str = ""
    pictures: list[Image.Image] = field(default_factory=list)
    keep: int | float | list[int | float] | None = None
    wish: Wish = field(default_factory=Wish)
    stream: bool = False
    run: Callable[[Any], Any] | None = None
    deadline: float = float("inf")
    started: float = field(default_factory=time.monotonic)
    cancelled: bool = False

    def cancel(self) -> None:
        """Nobody waits for it any more: it leaves the queue, or its row ends at the next token."""
        self.cancelled = True


class Meter:
    """Is told what the worker does; this one keeps nothing."""

    def batch(self, size: int) -> None:
        """So many requests are answered together."""

    def answered(self, job: Job, answer: Answer) -> None:
        """A request has its answer."""


class Worker:
    """The model's thread, and the requests that wait for it.

    Args:
        vlm: A `PrunedVLM`, from now on this thread's alone.
    """

    def __init__(self, vlm: Any, settings: Settings, meter: Meter | None = None) -> None:
        self.settings, self.meter = settings, meter or Meter()
        self.vlm, self.backbone = vlm, vlm.backbone
        self.models: dict[str, Any] = {vlm.method.name: vlm}
        text = vlm.base.config.get_text_config()
        self.context: int | None = getattr(text, "max_position_embeddings", None)
        self.seconds_each = 1.0  # of a request, in the mean of late
        self._waiting: deque[Job] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._last_size = 1
        self._thread = threading.Thread(target=self._run, name="diffprune-worker", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------- the other threads' side

    @property
    def num_waiting(self) -> int:
        with self._changed:
            self._leave()
            return len(self._waiting)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, job: Job) -> None:
        """Let a request wait for its turn; an `ApiError` where too many do."""
        with self._changed:
            if self._stopping:
                raise ApiError(503, "the server is shutting down; ask again in a moment", headers={"Retry-After": "5"})
            self._leave()
            if len(self._waiting) >= self.settings.queue:
                raise self.too_many()
            self._waiting.append(job)
            self._changed.notify()

    def _leave(self) -> None:
        """Requests that nobody waits for any more take no place until the batch under way is through."""
        self._waiting = deque(job for job in self._waiting if not job.cancelled)

    def too_many(self) -> ApiError:
        """What a request is told for which there is no room."""
        wait = min(60, max(1, round(self.seconds_each * (len(self._waiting) + self._last_size))))
        return ApiError(
            429,
            f"{self.settings.queue} requests wait already; ask again in {wait} s",
            code="queue_full",
            headers={"Retry-After": str(wait)},
        )

    def stop(self) -> None:
        """Finish what waits, then end the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    # ------------------------------------------------------------------------------------- the worker's side

    def _run(self) -> None:
        while (jobs := self._take()) is not None:
            if not jobs:
                continue
            start = time.monotonic()
            self.meter.batch(len(jobs))
            if jobs[0].run is not None:
                self._guard(jobs, lambda jobs=jobs: jobs[0].tell(jobs[0].run(self._model(jobs[0].method))))  # type: ignore[misc]
            else:
                self._answer(jobs)
            self._last_size = len(jobs)
            each = (time.monotonic() - start) / len(jobs)
            self.seconds_each += 0.2 * (each - self.seconds_each)

    def _take(self) -> list[Job] | None:
        """The next requests that can be answered together, the longest-waiting first; None at the end."""
        with self._changed:
            while not self._waiting:
                if self._stopping:
                    return None
                self._changed.wait()
            if self._last_size > 1:  # clients of the last batch come back one after the other
                until = time.monotonic() + self.settings.linger
                while len(self._waiting) < self.settings.batch and (left := until - time.monotonic()) > 0:
                    self._changed.wait(left)
            jobs: list[Job] = []
            rest: deque[Job] = deque()
            for job in self._waiting:
                if job.cancelled:
                    continue
                if time.monotonic() > job.deadline:
                    job.tell(timed_out(self.settings))
                elif not jobs or (
                    len(jobs) < self.settings.batch
                    and job.method == jobs[0].method
                    and job.run is None
                    and jobs[0].run is None
                ):
                    jobs.append(job)
                else:
                    rest.append(job)
            self._waiting = rest
            return jobs

    def _model(self, method: str | None) -> Any:
        """The model with that method around it, made when it is first asked for."""
        if method is None:
            return self.vlm
        if method not in self.models:
            self.models[method] = self.vlm.with_method(method, keep=1.0)
        return self.models[method]

    def _guard(self, jobs: list[Job], run: Callable[[], None]) -> bool:
        """Whether it ran; where it did not and it is one request's, that one is told why."""
        try:
            run()
            return True
        except Exception as error:
            told = as_api_error(error)
            if told.status >= 500:
                logger.exception("a batch of %d failed", len(jobs))
            if len(jobs) == 1:
                jobs[0].tell(told)
            return False

    def _answer(self, jobs: list[Job]) -> None:
        rows: list[tuple[Job, Row]] = []
        if self._guard(jobs, lambda: self._answer_together(jobs, rows)) or len(jobs) == 1:
            return
        begun = {id(job): row for job, row in rows}
        for job in jobs:
            row = begun.get(id(job))
            if row is not None and row.num_tokens and row.finish is None:  # its listener may have heard the beginning
                job.tell(ApiError(500, "the answer broke off; ask again"))
            elif row is None or row.finish is None:
                self._guard([job], lambda job=job: self._answer_together([job], []))

    def _answer_together(self, jobs: list[Job], rows: list[tuple[Job, Row]]) -> None:
        """Answer the jobs in one batch; `rows` is filled when their making begins."""
        start = time.monotonic()
        vlm = self._model(jobs[0].method)
        batch = self.backbone.prepare_prompts([job.prompt for job in jobs], [job.pictures for job in jobs])
        lengths = batch.features["attention_mask"].sum(-1).tolist()
        fitting = [job for job, length in zip(jobs, lengths, strict=True) if self._has_room(job, length)]
        if len(fitting) < len(jobs):
            if fitting:
                self._answer_together(fitting, rows)
            return
        rows += [
            (
                job,
                Row(
                    wish=job.wish,
                    max_tokens=self._new_tokens(job, length),
                    on_text=job.tell if job.stream else None,
                    on_end=lambda row, job=job: self._tell(job, row, start, len(jobs)),
                    is_wanted=lambda job=job: not job.cancelled,
                    deadline=job.deadline,
                ),
            )
            for job, length in zip(jobs, lengths, strict=True)
        ]
        answer_rows(vlm, batch, [row for _, row in rows], self._budgets(vlm, jobs))

    def _tell(self, job: Job, row: Row, start: float, size: int) -> None:
        """What the request is told at the end of its row; nothing where nobody waits."""
        if row.finish == "timeout":
            job.tell(timed_out(self.settings))
        elif row.finish in ("stop", "length"):
            seconds, first = time.monotonic() - start, (row.first or start) - start
            answer = Answer(row.text, row.finish, row.num_tokens, row.counts, seconds, first, size, row.path)
            self.meter.answered(job, answer)
            job.tell(answer)

    def _has_room(self, job: Job, length: int) -> bool:
        """Whether the context holds prompt and answer; the request is told where it does not."""
        new = job.wish.max_tokens or 1
        if self.context is None or length + new <= self.context:
            return True
        answer = "at least 1" if job.wish.max_tokens is None else f"up to {new}"
        job.tell(
            ApiError(
                400,
                f"the prompt has {length} tokens before pruning and its answer {answer}, and the model's context holds "
                f"{self.context}; shorten the messages, send fewer or smaller pictures, or ask for less",
                param="messages",
                code="context_length_exceeded",
            )
        )
        return False

    def _new_tokens(self, job: Job, length: int) -> int:
        if job.wish.max_tokens is not None:
            return job.wish.max_tokens
        room = self.settings.max_new_tokens if self.context is None else self.context - length
        return min(self.settings.max_new_tokens, room)

    def _budgets(self, vlm: Any, jobs: list[Job]) -> list[int | float] | None:
        """One budget for each picture of the jobs; None where none chooses anything."""
        if vlm.method.name == "full" or not any(job.pictures for job in jobs):
            return None
        out: list[int | float] = []
        for job in jobs:
            keep = self.vlm.budget.keep if job.keep is None else job.keep
            out += keep if isinstance(keep, list) else [keep] * len(job.pictures)
        return out


def timed_out(settings: Settings) -> ApiError:
    """What a request is told whose time is over."""
    return ApiError(504, f"the answer took more than {settings.timeout:g} s; ask for fewer tokens", code="timeout")


def as_api_error(error: Exception) -> ApiError:
    """What a request is told about an error of the model's side."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, torch.OutOfMemoryError):
        return ApiError(503, "the device has no memory left for this request; send fewer or smaller pictures")
    if isinstance(error, ValueError):
        return ApiError(400, " ".join(str(error).split()))
    return ApiError(500, "the server made a mistake, which stands in its log; ask again or leave the picture out")
