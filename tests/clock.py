"""A clock that moves only when it is told to, in place of the module `time`."""


class FakeClock:
    """`monkeypatch.setattr(module, "time", FakeClock())`; `advance` is the only thing that takes time."""

    def __init__(self) -> None:
        self.now = 0.0

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def perf_counter(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now
