"""Rows that can be read in any order, in an order of their own in every epoch."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from diffprune.config import DataConfig
from diffprune.rng import hash_key
from diffprune.train.feed import Broken, Feed, Sample


class Table(ABC):
    """Rows that can be read in any order."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, number: int) -> Sample | Broken: ...


class TableFeed(Feed):
    """Another order in every epoch, drawn from the run's seed."""

    def __init__(self, table: Table, config: DataConfig, seed: int) -> None:
        rows = choose_rows(len(table), config)
        self.table, self.seed = table, seed
        self.held_out, self.rows = sorted(rows[: config.validation]), sorted(rows[config.validation :])
        self.epoch, self.order = -1, self.rows
        if not self.rows:
            raise ValueError(
                f"{config.name} has {len(rows)} rows to use and {config.validation} are held out: nothing is left to "
                "train on; lower data.validation or raise data.share"
            )

    @property
    def per_epoch(self) -> int:
        return len(self.rows)

    def validation(self) -> list[Sample | Broken]:
        return [self.table.read(number) for number in self.held_out]

    def read(self, positions: range, wanted: Sequence[int]) -> dict[int, Sample | Broken]:
        found = {}
        for position in wanted:
            epoch, place = divmod(position, len(self.rows))
            if epoch != self.epoch:
                self.epoch = epoch
                self.order = sorted(self.rows, key=lambda number: hash_key(self.seed, "order", epoch, number))
            found[position] = self.table.read(self.order[place])
        return found


def choose_rows(num_rows: int, config: DataConfig) -> list[int]:
    """The rows in use: exactly the configured share, in an order drawn by `data.seed` alone."""
    order = sorted(range(num_rows), key=lambda number: hash_key(config.seed, "share", number))
    return order[: int(config.share * num_rows + 0.5)]
