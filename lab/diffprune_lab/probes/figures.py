"""One look for all figures of the probes."""

from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diffprune.atomic import replacing

LABELS = {
    "diffprune": "DiffPrune",
    "diffprune_plain": "DiffPrune, no bridge",
    "diffprune-diverse": "DiffPrune, diverse choice",
    "diffprune-paper": "DiffPrune, paper's recipe",
    "diffprune-joined": "DiffPrune, attention across tiles",
    "gumbel_ste": "Gumbel-STE",
    "random": "random",
    "box": "random in the box",
    "full": "all tokens",
    "centre": "centre square",
    "supervised": "supervised by the boxes",
    "deit-tiny": "DeiT-Tiny",
    "deit-small": "DeiT-Small",
    "deit-base": "DeiT-Base",
}
COLOURS = {
    "diffprune": "#c0392b",
    "diffprune_plain": "#e59866",
    "diffprune-diverse": "#7b241c",
    "gumbel_ste": "#2c6fbb",
    "random": "#8a8a8a",
    "full": "#222222",
    "centre": "#2e8b57",
    "supervised": "#b7950b",
    "box": "#8e7cc3",
}
ORDER = ("deit-tiny", "deit-small", "deit-base", "scenes-nano", "scenes-llava", "scarce-llava")
STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 3.5,
}


@contextmanager
def figure(path: Path, panels: int, *, height: float = 2.3, share_y: bool = False):
    """Axes side by side, as wide as a page's text; written to `path` at the end."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        sheet = Figure(figsize=(6.9 if panels > 1 else 3.4, height), layout="constrained")
        axes = sheet.subplots(1, panels, squeeze=False, sharey=share_y)
        yield axes.flatten().tolist()
        with replacing(path) as new:
            sheet.savefig(new, dpi=200)


def legend_below(axes: Sequence[Any], *, columns: int = 5) -> None:
    """One legend for several axes, below them all; each name once."""
    entries = unique_entries(axes)
    axes[0].figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=columns)


def unique_entries(axes: Sequence[Any]) -> dict[str, Any]:
    """What a legend of several axes says, each name once."""
    return {name: handle for panel in axes for handle, name in zip(*panel.get_legend_handles_labels(), strict=True)}


def label(name: str) -> str:
    return LABELS.get(name, name)


def backbones_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The backbones of some rows from small to large."""
    present = {row["backbone"] for row in rows}
    return [name for name in ORDER if name in present]


def budget_axis(axes: Any, keeps: Sequence[float]) -> None:
    """Budgets on a logarithmic scale, written as percent."""
    axes.set_xscale("log")
    axes.set_xticks(list(keeps), [f"{100 * keep:g}".removesuffix(".0") for keep in _short(keeps)])
    axes.minorticks_off()
    axes.set_xlabel("tokens kept (%)")


def _short(keeps: Sequence[float]) -> list[float]:
    return [round(keep, 3) if keep < 0.1 else round(keep, 2) for keep in keeps]
