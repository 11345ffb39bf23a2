"""Requests per second: a closed loop of many requests through the fast path, full against pruned.

`batch` clients each send a request, wait for its answer and send the next; the requests of one round run as one batch.
Every round has other pictures and other text. A request ends with its first token, so the loop is bound by what pruning
shortens.

diffprune profile --throughput --backbone llava-1.5-7b --random-weights --paths fast --out results/throughput.json
"""

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

from diffprune.backbones.prompts import Batch
from diffprune.model import PrunedVLM
from diffprune.speed.profile import FastWeights, ProfileSettings, Report, cases, eager_first, first_line, release
from diffprune.speed.stages import EagerRequest
from diffprune.speed.subject import deployed, make_batch
from diffprune.speed.timing import synchronize

NOTES = (
    "A closed loop: batch clients, each sends its next request when it has the first token of the last one. requests_s "
    "over the whole loop; ttft_ms is the median and ttft_p99_ms the 99th percentile over requests, from pixels on the "
    "device to token id on the host. speedup is requests_s over the full model's on the same path, batch and text."
)
COLUMNS = (
    "method",
    "path",
    "batch",
    "num_text",
    "num_kept",
    "requests_s",
    "speedup",
    "ttft_ms",
    "ttft_p99_ms",
    "error",
)
POOL = 4  # batches of different pictures that the loop goes through in turn
ROUNDS = 100
LOOP_SECONDS = 4.0  # of one loop, where a hundred rounds take longer
FEWEST_ROUNDS = 10


def throughput(settings: ProfileSettings, report: Report = lambda rows: None) -> list[dict[str, Any]]:
    """One row per method, budget, path, batch and text length, as far as time allows."""
    deadline = time.monotonic() + settings.seconds
    subject = settings.load()
    rows: list[dict[str, Any]] = []
    full: dict[tuple[str, int, int], float] = {}
    weights = FastWeights(settings)
    for path in eager_first(settings.paths):
        for method, keep in cases(settings):
            if not settings.runs_on(path, method):
                continue
            head = {"method": method, "keep": keep, "backbone": settings.backbone, "path": path}
            vlm, size = None, settings.image
            for batch in settings.batches:
                for num_text in settings.texts:
                    if time.monotonic() > deadline:
                        break
                    row = {**head, "batch": batch, "num_text": num_text}
                    try:
                        if vlm is None:
                            vlm, size = deployed(subject, method, keep=keep, dtype=settings.dtype, size=settings.image)
                            if path == "fast":
                                shapes = {"batches": settings.batches, "texts": settings.texts}
                                weights.compile(vlm, **shapes, size=size, decode=False)
                        row |= measure_loop(vlm, size, path, batch, num_text)
                        if method == "full":
                            full[path, batch, num_text] = row["requests_s"]
                        if (path, batch, num_text) in full:
                            row["speedup"] = row["requests_s"] / full[path, batch, num_text]
                    except Exception as error:
                        row["error"] = first_line(error)
                    rows.append(row)
                    report(rows)
            del vlm
            release(settings.device)
    return rows


def measure_loop(vlm: PrunedVLM, size: tuple[int, int], path: str, batch: int, num_text: int) -> dict[str, Any]:
    """Requests per second and percentiles of the time to first token, for pictures of (width, height)."""
    pool = [make_batch(vlm, size=size, num_text=num_text, batch=batch, seed=turn * batch) for turn in range(POOL)]
    request = EagerRequest(vlm, pool[0])
    rounds = closed_loop(answer_with(vlm, path), pool, str(vlm.base.device))
    waits = sorted(rounds)
    return {
        "num_visual": request.num_visual,
        "num_kept": request.num_kept,
        "requests": batch * len(rounds),
        "requests_s": batch * len(rounds) / (sum(rounds) / 1e3),
        "ttft_ms": statistics.median(waits),
        "ttft_p99_ms": percentile(waits, 0.99),
    }


def answer_with(vlm: PrunedVLM, path: str) -> Callable[[Batch], object]:
    """A call that gives the first token of each prompt of a batch, on the host."""
    if path == "fast":
        fast: Any = vlm.fast
        return lambda batch: fast.ttft(batch)
    requests: dict[int, EagerRequest] = {}

    def answer(batch: Batch) -> list[int]:
        if id(batch) not in requests:
            requests[id(batch)] = EagerRequest(vlm, batch)
        return requests[id(batch)].ttft()

    return answer


def closed_loop(answer: Callable[[Batch], object], pool: list[Batch], device: str) -> list[float]:
    """Milliseconds of each round, after every batch of the pool was answered once."""
    for batch in pool:
        answer(batch)
    synchronize(device)
    rounds: list[float] = []
    stop = time.perf_counter() + LOOP_SECONDS
    while len(rounds) < FEWEST_ROUNDS or (len(rounds) < ROUNDS and time.perf_counter() < stop):
        start = time.perf_counter()
        answer(pool[len(rounds) % len(pool)])
        rounds.append((time.perf_counter() - start) * 1e3)
    return rounds


def percentile(ordered: list[float], share: float) -> float:
    """The least of the sorted values that this share of them does not exceed (nearest rank)."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
