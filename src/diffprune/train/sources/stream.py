"""Rows that come one after another, through a shuffling buffer."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path

from diffprune.config import DataConfig
from diffprune.rng import Rng
from diffprune.train.feed import Broken, Feed, Sample
from diffprune.train.sources.rows import Row, read_row
from diffprune.train.sources.table import choose_rows


class Stream(ABC):
    """Rows that come in a fixed order of their own."""

    config: DataConfig
    root: Path

    @abstractmethod
    def count(self) -> int | None:
        """How many rows there are, where that is known."""

    @abstractmethod
    def rows(self) -> Iterator[tuple[int, Row | ValueError]]:
        """Every row with its number; what is wrong with one that cannot be read stands in its place."""


class StreamFeed(Feed):
    """A stream through a shuffling buffer. Going back, or on after a break, reads it again from the start.

    The held-out samples are the first of the stream.
    """

    def __init__(self, stream: Stream, config: DataConfig, seed: int) -> None:
        self.stream, self.config, self.seed = stream, config, seed
        total = stream.count()
        if total is None and config.share < 1:
            raise ValueError(
                f"data.share={config.share} needs to know how many rows {config.name} has, which is not recorded; "
                "set data.share=1.0 and optim.steps"
            )
        self.chosen = None if total is None or config.share == 1 else frozenset(choose_rows(total, config))
        self.total = total if self.chosen is None else len(self.chosen)
        if self.total is not None and self.total <= config.validation:
            raise ValueError(
                f"{config.name} has {self.total} rows to use and {config.validation} are held out: nothing is left to "
                "train on; lower data.validation or raise data.share"
            )
        self.position, self.flow = 0, self._flow()

    @property
    def per_epoch(self) -> int | None:
        return None if self.total is None else self.total - self.config.validation

    def validation(self) -> list[Sample | Broken]:
        rows = zip(range(self.config.validation), self._rows(), strict=False)
        return [self._decode(item) for _, item in rows]

    def read(self, positions: range, wanted: Sequence[int]) -> dict[int, Sample | Broken]:
        if positions.start < self.position:
            self.position, self.flow = 0, self._flow()
        found = {}
        while self.position < positions.stop:
            item = next(self.flow)
            if self.position in wanted:
                found[self.position] = self._decode(item)
            self.position += 1
        return found

    def _decode(self, item: tuple[int, Row | ValueError]) -> Sample | Broken:
        return read_row(*item, self.config, self.stream.root)

    def _rows(self) -> Iterator[tuple[int, Row | ValueError]]:
        return (item for item in self.stream.rows() if self.chosen is None or item[0] in self.chosen)

    def _flow(self) -> Iterator[tuple[int, Row | ValueError]]:
        """Training rows without end, shuffled within a window."""
        epoch = 0
        while True:
            rng, held, seen = Rng(self.seed, "buffer", epoch), [], False
            for place, item in enumerate(self._rows()):
                if place < self.config.validation:
                    continue
                seen = True
                if len(held) < self.config.buffer:
                    held.append(item)
                    continue
                out = rng.below(len(held))
                yield held[out]
                held[out] = item
            if not seen:
                raise ValueError(f"{self.config.name} gave no row to train on; check data.name and data.split")
            yield from rng.shuffle(held)
            epoch += 1
