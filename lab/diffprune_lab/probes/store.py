"""A probe's results file as it grows: one write per (backbone, seed), merged with what other runs wrote before."""

import fcntl
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import safetensors.torch
from torch import Tensor

from diffprune.atomic import replacing
from diffprune.results import command_line, read_results, source_commit, write_results

Row = dict[str, Any]
SEEDS = "by_seed"
NORMAL = 1.95996  # 95 % of a normal variable lie within so many deviations
# Of Student's t, by degrees of freedom.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass(frozen=True, slots=True)
class Cell:
    """What one seed found: `key` says of what (backbone, method, keep, ...), `values` are the numbers."""

    key: Mapping[str, Any]
    seed: int
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Store:
    """A results file whose rows hold a key, every seed's values under `by_seed`, and a summary of them.

    Args:
        path: The file.
        notes: How the numbers were made; a file made otherwise is not added to.
        summarise: Adds to the rows what follows from all of them.
        key_names: Entries that identify a row.
        marks: What every row bears, such as the digest of a frozen world; rows with others are not added to.
        commit: Recorded where there is no git checkout.
        device: Recorded where it is not the one torch would take.
    """

    path: Path
    notes: str
    summarise: Callable[[Sequence[Row]], list[Row]]
    key_names: tuple[str, ...]
    marks: Mapping[str, str] = field(default_factory=dict)
    commit: str | None = None
    device: str | None = None

    def rows(self) -> list[Row]:
        """What is there; none where the file is not."""
        if not self.path.exists():
            return []
        found = read_results(self.path)
        if found.notes != self.notes:
            raise ValueError(
                f"{self.path} was made with other settings ({found.notes}); give another folder with --out, "
                "or --fresh to start anew"
            )
        for name, mark in self.marks.items():
            if odd := {row.get(name) for row in found.rows} - {mark}:
                raise ValueError(
                    f"{self.path} has rows whose {name} is {', '.join(map(str, odd))} and not {mark}; give another "
                    "folder with --out, or --fresh to start anew"
                )
        return found.rows

    def is_done(self, backbone: str | None, seed: int) -> bool:
        """Whether the file holds this seed of this backbone (None: the probe has none)."""
        return any(row.get("backbone") == backbone and str(seed) in row[SEEDS] for row in self.rows())

    def add(self, cells: Sequence[Cell]) -> list[Row]:
        """All rows after the cells were merged in and written."""
        origin = {"commit": self.commit or source_commit(), "command": command_line()}  # every seed's own
        with locked(self.path):
            merged: dict[tuple[Any, ...], Row] = {}
            for row in self.rows():
                merged[self._place(row)] = {name: row[name] for name in (*self.key_names, SEEDS) if name in row}
            for cell in cells:
                row = merged.setdefault(self._place(cell.key), {**cell.key, SEEDS: {}})
                row[SEEDS][str(cell.seed)] = {**rounded(cell.values), **origin}
            rows = [{**row, **self.marks} for row in self.summarise(list(merged.values()))]
            seeds = sorted({int(seed) for row in rows for seed in row[SEEDS]})
            write_results(
                self.path,
                name=self.path.stem,
                rows=[{**{k: v for k, v in row.items() if k != SEEDS}, SEEDS: row[SEEDS]} for row in rows],
                commit=self.commit,
                device=self.device,
                seeds=seeds,
                notes=self.notes,
            )
        return rows

    def _place(self, row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(row.get(name) for name in self.key_names)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time: backbones may run side by side and write to the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / f".{path.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def save_tensors(path: Path, values: Mapping[Any, Tensor]) -> None:
    """Tensors by name, or by a tuple of plain values, as a safetensors file."""
    plain = {json.dumps(key): value.detach().to("cpu", copy=True).contiguous() for key, value in values.items()}
    with replacing(path) as unfinished:
        unfinished.write_bytes(safetensors.torch.save(plain))


def load_tensors(path: Path, device: str) -> dict[Any, Tensor]:
    """What `save_tensors` wrote."""
    found: dict[Any, Tensor] = {}
    for text, value in safetensors.torch.load_file(path, device).items():
        key = json.loads(text)
        found[tuple(key) if isinstance(key, list) else key] = value
    return found


def rounded(value: Any) -> Any:
    """`value` with floats cut to seven digits: more would only make files longer."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list | tuple) else value


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation over seeds; one seed has deviation 0."""
    return fmean(values), stdev(values) if len(values) > 1 else 0.0


def interval(values: Sequence[float], errors: Sequence[float] = ()) -> list[float]:
    """A 95 % interval of the mean over seeds; `errors` are the standard errors within each seed.

    Seeds share their pictures, so the error within a seed does not shrink with their number: both parts are added. The
    deviation of so few values as there are seeds is itself uncertain, so their part is as wide as Student's t makes it.
    """
    mean, spread = mean_and_spread(values)
    within = fmean(error**2 for error in errors) if errors else 0.0
    over_seeds = student(len(values) - 1) * spread / math.sqrt(len(values)) if len(values) > 1 else 0.0
    half = math.hypot(over_seeds, NORMAL * math.sqrt(within))
    return [mean - half, mean + half]


def student(freedom: int) -> float:
    """Within how many deviations 95 % of Student's t lie, to 0.2 %."""
    if freedom <= len(STUDENT):
        return STUDENT[freedom - 1]
    return NORMAL + (NORMAL**3 + NORMAL) / (4 * freedom) + 2.8 / freedom**2  # its expansion


def collect(row: Row, name: str) -> list[float]:
    """One value of every seed of a row."""
    return [values[name] for values in row[SEEDS].values() if name in values]
