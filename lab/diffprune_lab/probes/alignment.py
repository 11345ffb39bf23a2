"""Does the ranking survive the hand-over? Figure 5: the same scorer, scores and budgets, throttled and hard.

Throttled is the path of training at its last temperature, all tokens there and weakened; hard is deployment, the K
largest kept and nothing else. Nothing is trained in between.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from diffprune.ops import hard_mask
from diffprune_lab.deit import Encoded
from diffprune_lab.probes.bench import Bench
from diffprune_lab.probes.coherence import dropping
from diffprune_lab.probes.figures import ORDER, backbones_of, budget_axis, figure, label
from diffprune_lab.probes.store import SEEDS, Cell, Row, collect, interval, mean_and_spread
from diffprune_lab.probes.throttling import run_throttled

NAME = "alignment"
KEY = ("backbone", "keep")
READ = ("top1", "top5")
NOTE = (
    "top-1 and top-5 in percent of held-out pictures; gap: throttled minus hard in points, paired by picture; weight: "
    "share of the soft weights that lies on the K tokens kept"
)


def measure(bench: Bench, seed: int) -> Iterator[Cell]:
    """Both operators at every budget."""
    method = bench.scorer("diffprune", seed)
    _, tau = bench.settings.temperatures
    deit, remove_below = bench.cut_open(), bench.recipe_of("diffprune")[1]  # throttled as in training
    for keep in bench.settings.keeps:
        weights: list[Tensor] = []
        noise = torch.Generator(bench.device).manual_seed(seed)

        def throttled(encoded: Encoded, k: Tensor, weights=weights, noise=noise) -> Tensor:
            logits, restricted = run_throttled(deit.logits, method, encoded, k, tau, noise, remove_below)
            on_kept = restricted.alpha * hard_mask(restricted.logits, k)
            weights.append(on_kept.sum(-1) / k)
            return logits

        soft = 100 * bench.right_when(throttled, keep).double()
        hard = 100 * bench.right_when(dropping(bench, method), keep).double()
        yield Cell({"backbone": bench.backbone, "keep": keep}, seed, side_by_side(READ, soft, hard, torch.cat(weights)))


def side_by_side(
    names: Sequence[str], soft: Float64[Tensor, "M C"], hard: Float64[Tensor, "M C"], weights: Float[Tensor, " M"]
) -> Row:
    """Means over pictures of what was read both ways, of each gap with its error, and of the weight on kept tokens."""
    values: Row = {"weight": float(weights.double().mean())}
    for column, name in enumerate(names):
        gap = (soft - hard)[:, column]
        values |= {
            f"throttled_{name}": float(soft[:, column].mean()),
            f"hard_{name}": float(hard[:, column].mean()),
            f"gap_{name}": float(gap.mean()),
            f"gap_{name}_error": float(gap.std() / len(gap) ** 0.5),
        }
    return values


def summarise(rows: Sequence[Row], names: Sequence[str] = READ) -> list[Row]:
    """Rows with means over seeds and the interval of each gap."""
    done: list[Row] = []
    for row in sorted(rows, key=lambda row: (ORDER.index(row["backbone"]), row.get("method", ""), -row["keep"])):
        summary: Row = {"n_seeds": len(row[SEEDS]), "weight": mean_and_spread(collect(row, "weight"))[0]}
        for name in names:
            for path in ("throttled", "hard"):
                mean, spread = mean_and_spread(collect(row, f"{path}_{name}"))
                summary |= {f"{path}_{name}": mean, f"{path}_{name}_std": spread}
            gaps = collect(row, f"gap_{name}")
            summary[f"gap_{name}"] = mean_and_spread(gaps)[0]
            summary[f"gap_{name}_ci95"] = interval(gaps, collect(row, f"gap_{name}_error"))
        done.append({**row, **summary})
    return done


# --- figure -----------------------------------------------------------------------------------------------------------


def draw(rows: Sequence[Row], path: Path) -> None:
    """Accuracy of both operators by budget, one panel per backbone."""
    names = backbones_of(rows)
    with figure(path, len(names) + 1, height=2.4) as axes:  # the last one is for the legend
        for panel, backbone in zip(axes, names, strict=False):
            chosen = sorted((row for row in rows if row["backbone"] == backbone), key=lambda row: row["keep"])
            keeps = [row["keep"] for row in chosen]
            for name, marker in (("top1", "o"), ("top5", "s")):
                for kind, style, colour in (("throttled", "--", "#888888"), ("hard", "-", "#c0392b")):
                    panel.errorbar(
                        keeps,
                        [row[f"{kind}_{name}"] for row in chosen],
                        [row[f"{kind}_{name}_std"] for row in chosen],
                        linestyle=style,
                        color=colour,
                        marker=marker,
                        capsize=2,
                        label=f"{kind}, {name.replace('top', 'top-')}",
                    )
            budget_axis(panel, keeps)
            panel.set_title(label(backbone))
        axes[0].set_ylabel("accuracy (%)")
        axes[-1].axis("off")
        axes[-1].legend(*axes[0].get_legend_handles_labels(), loc="center left")
