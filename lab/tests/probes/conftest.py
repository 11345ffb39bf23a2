"""One tiny backbone and one measurement of each probe for all tests of a worker: they are what costs."""

from collections.abc import Callable
from types import ModuleType

import pytest

from diffprune_lab.probes.bench import Bench
from diffprune_lab.probes.settings import SIZES
from diffprune_lab.probes.store import Cell


@pytest.fixture(scope="session")
def bench() -> Bench:
    return Bench(backbone="deit-tiny", settings=SIZES["tiny"], seeds=(42, 123))


@pytest.fixture(scope="session")
def measured(bench: Bench) -> Callable[[ModuleType], list[Cell]]:
    """What a probe finds with seed 42."""
    return lambda probe: bench.once(f"measured {probe.NAME}", lambda: list(probe.measure(bench, 42)))
