"""The figure of the scaling probe: what is left by pruning rate, a panel for each size of the model."""

from collections.abc import Sequence
from pathlib import Path

from diffprune_lab.probes import scaling
from diffprune_lab.probes.figures import COLOURS, figure, label, legend_below
from diffprune_lab.probes.store import Row

DRAWN_AS = {
    scaling.LEARNED: ("o-", COLOURS["diffprune"], label(scaling.LEARNED)),
    scaling.DIVERSE: ("s-", COLOURS["diffprune-diverse"], label(scaling.DIVERSE)),
    "random": ("^--", COLOURS["random"], "random"),
}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Retention by pruning rate with its deviation over seeds."""
    summary = [row for row in rows if "retention" in row]
    names = [name for name in scaling.BACKBONES if any(row["backbone"] == name for row in rows)]
    with figure(path, len(names), height=2.9, share_y=True) as axes:
        for panel, backbone in zip(axes, names, strict=True):
            for place, (method, (style, colour, name)) in enumerate(DRAWN_AS.items()):
                own = [row for row in summary if (row["backbone"], row["method"]) == (backbone, method)]
                if own:
                    own.sort(key=lambda row: row["pruned"])
                    panel.errorbar(
                        [0.0, *(row["pruned"] + place - 1 for row in own)],  # beside each other
                        [100.0, *(row["retention"] for row in own)],
                        [0.0, *(row.get("retention_std", 0.0) for row in own)],
                        fmt=style,
                        color=colour,
                        capsize=2.5,
                        label=name,
                    )
            panel.set_title(backbone)
            panel.set_xlabel("tokens pruned (%)")
        axes[0].set_ylabel("retention (%), bars:\ndeviation over seeds")
        legend_below(axes, columns=3)
