"""How long a stack of layers takes on a card, from its operations, the bytes it reads and a measured curve.

    time = max(operations / (rate * efficiency(tokens)), bytes / (bandwidth * share)) + launch * layers
    efficiency(tokens) = most * tokens / (tokens + half)

Rate and bandwidth are the datasheet's. Small products do not fill a card, so the share of its rate that is reached
grows with the tokens that run at once and levels off. The four constants of a curve are fitted to measured rows by
`fit_curve`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from diffprune.speed.gpus import Gpu

CURVES = Path(__file__).with_name("curves.json")  # what `refit` writes


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is run: operations, bytes read, tokens that run at once, and layers."""

    flops: int | float
    read: int | float
    tokens: int
    layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The constants of one kind of work on one path.

    Args:
        most: Share of the datasheet's matrix rate that many tokens reach.
        half: Tokens at which half of that is reached.
        bandwidth: Share of the datasheet's bandwidth that reading weights reaches.
        launch_us: Time of each layer that neither hides, in microseconds.
    """

    most: float
    half: float
    bandwidth: float
    launch_us: float

    def efficiency(self, tokens: int) -> float:
        """Share of the datasheet's matrix rate at so many tokens."""
        return self.most * tokens / (tokens + self.half)

    def ms(self, work: Work, gpu: Gpu) -> float:
        """Predicted milliseconds."""
        compute = work.flops / (gpu.tflops * 1e12 * self.efficiency(work.tokens))
        read = work.read / (gpu.bandwidth * 1e9 * self.bandwidth)
        return max(compute, read) * 1e3 + self.launch_us * 1e-3 * work.layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What a prediction of one path rests on.

    Args:
        prefill, vision: Curves of the language model and of the tower.
        towers, scorers: How many times as long as the tower's curve says a family's own tower and its scorer take; a
            family that is not among them takes the mean of those.
        host_ms: What no stage accounts for.
        source: Where the numbers come from, printed beside every prediction.
        card: What they were fitted on; None where they were assumed.
    """

    prefill: Curve
    vision: Curve
    host_ms: float
    source: str
    card: Gpu | None = None
    towers: dict[str, float] = field(default_factory=dict[str, float])
    scorers: dict[str, float] = field(default_factory=dict[str, float])

    def tower_ms(self, family: str, work: Work, gpu: Gpu) -> float:
        """Predicted milliseconds of a family's tower."""
        return self.vision.ms(work, gpu) * _of_family(self.towers, family)

    def scorer_ms(self, family: str, work: Work, gpu: Gpu) -> float:
        """Predicted milliseconds of a scorer made of the family's blocks."""
        return self.vision.ms(work, gpu) * _of_family(self.scorers, family)

    def basis(self, gpu: Gpu) -> str:
        """What times on a card are: "fitted" on the very card, "extrapolated" from another, or "assumed"."""
        if self.card is None:
            return "assumed"
        return "fitted" if gpu == self.card else "extrapolated"


def read_calibration(path: Path) -> Calibration:
    """A calibration that was fitted and written."""
    values = json.loads(path.read_text(encoding="utf-8"))
    curves = {part: Curve(**values[part]) for part in ("prefill", "vision")}
    return Calibration(**{**values, **curves, "card": Gpu(**values["card"])})


def _of_family(times: dict[str, float], family: str) -> float:
    return times[family] if family in times else mean_of(list(times.values()))


def mean_of(ratios: Sequence[float]) -> float:
    """The geometric mean; 1 of none."""
    return float(np.exp(np.mean(np.log(ratios)))) if ratios else 1.0


FEWEST_POINTS = 4  # as many as a curve has constants
_START = ((0.2, 1.0), (4.0, 1024.0), (0.4, 1.0), (0.0, 1000.0))  # where constants are looked for
_STEPS, _ROUNDS = 11, 8


def fit_curve(points: Sequence[tuple[Work, float]], gpu: Gpu) -> Curve:
    """The curve with the least squared logarithmic error over (work, measured ms), found on a grid that closes in."""
    if len(points) < FEWEST_POINTS:
        raise ValueError(
            f"{len(points)} measured rows cannot fix a curve of {FEWEST_POINTS} constants; profile more text lengths, "
            "batches or budgets"
        )
    work = [item for item, _ in points]
    flops, read, tokens, layers = (
        np.array([getattr(item, name) for item in work], dtype=np.float64)
        for name in ("flops", "read", "tokens", "layers")
    )
    measured = np.log([ms for _, ms in points])
    ranges = _START
    best = np.zeros(4)
    for _ in range(_ROUNDS):
        axes = [np.linspace(low, high, _STEPS) for low, high in ranges]
        most, half, bandwidth, launch = (
            axis.reshape(-1, 1) for axis in np.meshgrid(*axes, indexing="ij")
        )  # each [candidates, 1]
        compute = flops * (tokens + half) / (gpu.tflops * 1e12 * most * tokens)
        seconds = np.maximum(compute, read / (gpu.bandwidth * 1e9 * bandwidth)) + launch * 1e-6 * layers
        error = np.square(np.log(seconds * 1e3) - measured).mean(1)
        winner = int(error.argmin())
        best = np.array([float(item[winner, 0]) for item in (most, half, bandwidth, launch)])
        ranges = tuple(
            (max(first, centre - 0.3 * (high - low)), min(last, centre + 0.3 * (high - low)))
            for centre, (low, high), (first, last) in zip(best, ranges, _START, strict=True)
        )
    most, half, bandwidth, launch = (float(value) for value in best)
    return Curve(most=most, half=half, bandwidth=bandwidth, launch_us=launch)
