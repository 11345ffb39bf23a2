"""The figure of the scaling probe: score by pruning rate, a line for each size of the model."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from diffprune_lab.probes import scaling
from diffprune_lab.probes.figures import COLOURS, figure, label
from diffprune_lab.probes.store import Row


def task_retention(rows: Sequence[Row], backbone: str, method: str, task: str) -> dict[float, float]:
    """Percent of the full model's score that is left, by pruning rate, as a mean over seeds."""
    found: dict[float, list[float]] = {}
    for row in rows:
        if (row["backbone"], row["method"], row.get("task")) == (backbone, method, task) and row["full_score"] > 0:
            found.setdefault(row["pruned"], []).append(100 * row["score"] / row["full_score"])
    return {rate: statistics.fmean(values) for rate, values in sorted(found.items())}


DRAWN_AS = {
    scaling.LEARNED: ("o-", COLOURS["diffprune"], label("diffprune")),
    f"{scaling.LEARNED}[tau.start=0.25]": ("s-", COLOURS["centre"], "from tau 0.25"),
    "random": ("--", COLOURS["random"], "random"),
}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Retention by pruning rate, a panel for each kind of task, a line for each size; random choice is dashed."""
    shades = dict(zip(scaling.BACKBONES, (0.4, 0.7, 1.0), strict=True))
    with figure(path, len(scaling.DRAWN), height=2.4) as axes:
        for panel, task in zip(axes, scaling.DRAWN, strict=True):
            for method, (style, colour, name) in DRAWN_AS.items():
                for backbone, shade in shades.items():
                    line = task_retention(rows, backbone, method, task)
                    if line:
                        points = {0.0: 100.0, **line}
                        panel.plot(
                            list(points),
                            list(points.values()),
                            style,
                            color=colour,
                            alpha=shade,
                            label=f"{name}, {backbone.rpartition('-')[2]}",
                        )
            panel.set_title(task)
            panel.set_xlabel("tokens pruned (%)")
        axes[0].set_ylabel("score (% of the full model's)")
        if axes[1].get_legend_handles_labels()[0]:
            axes[1].legend(fontsize=5, loc="center right", bbox_to_anchor=(1.0, 0.36))
