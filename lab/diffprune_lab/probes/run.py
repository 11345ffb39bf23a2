"""Runs probes seed by seed, keeps what each found at once, and stops in time."""

import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import torch

from diffprune_lab.probes.bench import Bench
from diffprune_lab.probes.store import SEEDS, Cell, Row, Store

PROBES = ("coherence", "landscape", "alignment", "relevance", "bias")
ON_BACKBONES = PROBES[:4]
OF_STARTS = "landscape"  # needs no trained scorer, and can wait until the others have all their seeds
ENDING = 8.0  # seconds that figures and tables take
UNTIMED = 20.0  # seconds that a probe is thought to take before one seed of it was timed
BACKBONES_FILE = "probe_backbones"
BACKBONES_NOTE = (
    "classifiers of the probes, trained from scratch for minutes on few small pictures: small-data models; top-1 and "
    "top-5 in percent of held-out pictures with every token there"
)


def probe_module(name: str) -> ModuleType:
    """The file of a probe, or an error that names them all."""
    if name not in PROBES:
        known = (*PROBES, "qualitative", "scaling", "temperature", "all")
        raise ValueError(f"there is no probe {name!r}; choose from {', '.join(known)}")
    return importlib.import_module(f"diffprune_lab.probes.{name}")


def open_store(name: str, bench: Bench, out: Path, *, commit: str | None = None) -> Store:
    """A probe's results file; its notes say how its numbers were made."""
    probe = probe_module(name)
    notes = f"{probe.NOTE}; {bench.settings.draws:,} draws" if name == "bias" else f"{probe.NOTE}; {bench.recipe}"
    return Store(
        path=out / f"{name}.json",
        notes=notes,
        summarise=probe.summarise,
        key_names=probe.KEY,
        commit=commit,
        device="cpu" if torch.device(bench.device).type == "cpu" and torch.cuda.is_available() else None,
    )


def run_probes(
    names: Sequence[str],
    bench: Bench,
    out: Path,
    *,
    figures: Path,
    deadline: float | None = None,
    commit: str | None = None,
    progress: Callable[[str, int, int], None] = lambda stage, done, total: None,
) -> tuple[dict[str, list[Row]], bool]:
    """Rows by probe, and whether everything asked for is there.

    What a results file already holds is not done again. Every (probe, seed) is written as soon as it is there.

    Args:
        deadline: On `time.monotonic`'s clock; what would probably end later is not begun.
        figures: Folder for `<probe>.png`, drawn from the rows.
    """
    stores = {name: open_store(name, bench, out, commit=commit) for name in names}
    todo = [
        (name, seed)
        for name, seed in in_order(names, bench.seeds)
        if not stores[name].is_done(None if name == "bias" else bench.backbone, seed)
    ]
    if any(name != "bias" for name, _ in todo):
        _record_backbone(bench, out, commit)
    longest: dict[str, float] = {}
    is_complete = True
    for number, (name, seed) in enumerate(todo):
        begun = time.monotonic()
        if deadline is not None and begun + longest.get(name, UNTIMED) + ENDING > deadline:
            is_complete = False
            continue
        progress(f"probe {name}", bench.seeds.index(seed), len(bench.seeds))
        cells = _measure(probe_module(name), bench, seed)
        stores[name].add(cells)
        longest[name] = max(longest.get(name, 0.0), time.monotonic() - begun)
        where = "" if name == "bias" else f"{bench.backbone} "
        bench.say(f"{where}{name} seed {seed}: {time.monotonic() - begun:.0f} s, {number + 1} of {len(todo)}")
        progress(f"probe {name}", bench.seeds.index(seed) + 1, len(bench.seeds))
    found = {name: store.rows() for name, store in stores.items()}
    for name, rows in found.items():
        if rows:
            probe_module(name).draw(rows, figures / f"{name}.png")
    return found, is_complete


def in_order(names: Sequence[str], seeds: Sequence[int]) -> list[tuple[str, int]]:
    """Every probe with every seed. A seed's scorers serve all probes that need them before the next are trained.

    The landscape comes last, its first seed at the very end, for that is the one with the slice.
    """
    scored = [(name, seed) for seed in seeds for name in names if name != OF_STARTS]
    return scored + [(OF_STARTS, seed) for seed in (*seeds[1:], seeds[0]) if OF_STARTS in names]


def _measure(probe: ModuleType, bench: Bench, seed: int) -> list[Cell]:
    try:
        return list(probe.measure(bench, seed))
    except torch.OutOfMemoryError:
        raise ValueError(
            f"{bench.backbone} with batches of {bench.settings.batch} does not fit on {bench.device}; "
            "give a smaller --backbone (what was measured so far is kept)"
        ) from None


def _record_backbone(bench: Bench, out: Path, commit: str | None) -> None:
    """How the classifier was trained, once, in a results file of its own; given weights have no such record."""
    try:
        training = bench.classifier.training
    except torch.OutOfMemoryError:
        raise ValueError(
            f"{bench.backbone} does not fit on {bench.device} to be trained; give a smaller --backbone, or --weights"
        ) from None
    if training is None:
        return
    store = Store(
        path=out / f"{BACKBONES_FILE}.json",
        notes=BACKBONES_NOTE,
        summarise=lambda rows: [{**row, **_plain(row)} for row in rows],
        key_names=("backbone", "trained_at"),
        commit=commit,
    )
    values = asdict(training)
    key = {"backbone": bench.backbone, "trained_at": values.pop("trained_at")}
    store.add([Cell(key, 42, values)])


def _plain(row: Row) -> Row:
    (values,) = row[SEEDS].values()
    return {name: value for name, value in values.items() if not isinstance(value, dict)}
