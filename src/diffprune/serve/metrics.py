"""What the server counts, in the form that Prometheus reads."""

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from diffprune.serve.worker import Answer, Job, Meter

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
SIZES = (1, 2, 4, 8, 16, 32, 64)


class Metrics(Meter):
    """Counters of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        make: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter("diffprune_requests", "Requests by path and status", ["path", "status"], **make)
        self.tokens = Counter("diffprune_tokens", "Tokens: prompt, completion, visual, visual_kept", ["kind"], **make)
        self.waiting = Gauge("diffprune_waiting", "Requests that wait for the model", **make)
        self.open = Gauge("diffprune_open", "Requests under way", **make)
        self.rows = Histogram("diffprune_batch_rows", "Requests answered together", buckets=SIZES, **make)
        self.first = Histogram(
            "diffprune_first_token_seconds", "From the request to its first token", buckets=SECONDS, **make
        )
        self.whole = Histogram(
            "diffprune_answer_seconds", "From the request to its last token", buckets=SECONDS, **make
        )

    def batch(self, size: int) -> None:
        self.rows.observe(size)

    def answered(self, job: Job, answer: Answer) -> None:
        counts = answer.counts
        for kind, number in (
            ("prompt", counts.prompt),
            ("completion", answer.num_tokens),
            ("visual", counts.visual),
            ("visual_kept", counts.kept),
        ):
            self.tokens.labels(kind).inc(number)
        waited = answer.ended - job.started
        self.whole.observe(waited)
        self.first.observe(waited - answer.seconds + answer.first)

    def text(self) -> bytes:
        """Everything, as /metrics gives it."""
        return generate_latest(self.registry)
