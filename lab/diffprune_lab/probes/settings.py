"""How much a run of the probes on image classifiers does, at its full size and as a trial."""

from dataclasses import dataclass, field, replace
from typing import Any

from diffprune.config import TauConfig
from diffprune_lab.probes.deit import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSettings:
    """How much a run does; what was tried beside these values is in docs/log.md.

    Args:
        steps: Of a scorer's training; `batch` pictures each, every step with a budget of its own between `train_keep`,
            which are those that are judged, at temperatures that fall from the first of `temperatures` to the second.
        moments: Shares of that training at which gradients are compared.
        keep: Budget at which gradients and losses are looked at.
        keeps: Budgets at which accuracy is measured; `box_keeps` those of relevance.
        cut: Blocks that run before tokens are dropped.
        min_area: Least share of a picture that a crop leaves in a scorer's training.
        later_cuts: Further places for methods without training.
        batches: Of `pictures` pictures whose gradients are compared.
        line: Points along one direction of the scorer's weights; `slice` along each of two.
        draws: Samples of the straight-through gradient.
        shape: Of the classifier; `epochs` and `train_batch` are of its training, and `hide` the share of it that sees
            a part of the patches, a quarter or a sixteenth, near each other.
    """

    name: str
    steps: int = 200
    batch: int = 128
    moments: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    train_keep: tuple[float, float] = (0.0556, 0.7)
    temperatures: tuple[float, float] = (2.0, 0.1)
    keep: float = 0.25
    keeps: tuple[float, ...] = (0.0556, 0.1111, 0.2222, 0.3333, 0.5, 0.7)
    box_keeps: tuple[float, ...] = (0.0556, 0.1111, 0.2222, 0.3333)
    cut: int = 0
    min_area: float = 0.8
    later_cuts: tuple[int, ...] = (6, 9, 12)
    batches: int = 32
    pictures: int = 64
    line: int = 101
    slice: int = 15
    draws: int = 100_000
    shape: Shape = field(default_factory=Shape)
    epochs: int = 300
    train_batch: int = 256
    hide: float = 0.75

    def changed(self, **options: Any) -> "ProbeSettings":
        """These settings with some of them replaced."""
        return replace(self, **options)

    @property
    def tau(self) -> TauConfig:
        """How the temperature of a scorer's training falls."""
        start, end = self.temperatures
        return TauConfig(start=start, end=end, anneal_steps=0.8)

    @property
    def recipe(self) -> str:
        """What of it changes a number, in one sentence; the classifier's part is `Bench.recipe`'s."""
        place = f"after block {self.cut}" if self.cut else "before the first block"
        return (
            f"size {self.name}; tokens dropped {place}; scorers trained for {self.steps} steps of "
            f"{self.batch} pictures, at least {self.min_area:g} of each, with budgets drawn from "
            f"{self.train_keep[0]} to {self.train_keep[1]}, temperature {self.temperatures[0]} to "
            f"{self.temperatures[1]}, matched noise, DiffPrune with the bridge"
        )


SIZES = {
    "full": ProbeSettings(name="full"),
    "tiny": ProbeSettings(
        name="tiny",
        steps=8,
        batch=16,
        moments=(0.0, 1.0),
        keeps=(0.0556, 0.1111, 0.5),
        box_keeps=(0.0556, 0.1111),
        cut=1,
        later_cuts=(3,),
        batches=4,
        pictures=8,
        line=21,
        slice=4,
        draws=20_000,
        shape=Shape(side=32, patch=4, depth=3, width=32, head_width=16),
        epochs=3,
        train_batch=32,
        hide=0.0,
    ),
}
