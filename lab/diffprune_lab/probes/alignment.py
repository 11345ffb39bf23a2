"""Does the ranking survive the hand-over? Figure 5: the same scorer, scores and budgets, throttled and hard.

Throttled is the path of training at its last temperature, all tokens there and weakened; hard is deployment, the K
largest kept and nothing else. Nothing is trained in between.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from diffprune.ops import hard_mask, soft_topk, vp_noise
from diffprune_lab.deit import Encoded
from diffprune_lab.probes.bench import Bench
from diffprune_lab.probes.coherence import dropping
from diffprune_lab.probes.figures import ORDER, backbones_of, budget_axis, figure, label
from diffprune_lab.probes.store import SEEDS, Cell, Row, collect, interval, mean_and_spread
from diffprune_lab.probes.throttling import run_throttled

NAME = "alignment"
KEY = ("backbone", "keep")
NOTE = (
    "top-1 and top-5 in percent of held-out pictures; gap: throttled minus hard in points, paired by picture; weight: "
    "share of the soft weights that lies on the K tokens kept"
)
GRID, CELL = 7, 12  # of the illustration: cells a side, pixels a cell
PANELS = 4  # in each row of the figure: below, one per backbone and one for the legend


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

        soft = bench.right_when(throttled, keep).double()
        hard = bench.right_when(dropping(bench, method), keep).double()
        values = {"weight": float(torch.cat(weights).double().mean())}
        for column, name in enumerate(("top1", "top5")):
            gap = 100 * (soft - hard)[:, column]
            values |= {
                f"throttled_{name}": float(100 * soft[:, column].mean()),
                f"hard_{name}": float(100 * hard[:, column].mean()),
                f"gap_{name}": float(gap.mean()),
                f"gap_{name}_error": float(gap.std() / len(gap) ** 0.5),
            }
        yield Cell({"backbone": bench.backbone, "keep": keep}, seed, values)


def summarise(rows: Sequence[Row]) -> list[Row]:
    """Rows with means over seeds and the interval of each gap."""
    done: list[Row] = []
    for row in sorted(rows, key=lambda row: (ORDER.index(row["backbone"]), -row["keep"])):
        summary: Row = {"n_seeds": len(row[SEEDS]), "weight": mean_and_spread(collect(row, "weight"))[0]}
        for name in ("top1", "top5"):
            for path in ("throttled", "hard"):
                mean, spread = mean_and_spread(collect(row, f"{path}_{name}"))
                summary |= {f"{path}_{name}": mean, f"{path}_{name}_std": spread}
            gaps = collect(row, f"gap_{name}")
            summary[f"gap_{name}"] = mean_and_spread(gaps)[0]
            summary[f"gap_{name}_ci95"] = interval(gaps, collect(row, f"gap_{name}_error"))
        done.append({**row, **summary})
    return done


# --- figure -----------------------------------------------------------------------------------------------------------


def illustration(kept: int = 12, tau: float = 0.25) -> dict[str, Float[np.ndarray, "..."]]:
    """A drawn picture on a 7 x 7 grid, its weights, and what both operators leave of it (nan where nothing is left)."""
    side = GRID * CELL
    place = torch.arange(side, dtype=torch.float64)
    x, y = place[None, :] - 0.55 * side, place[:, None] - 0.45 * side
    ball = (x.square() + y.square()).sqrt() < 0.27 * side
    sky = torch.stack([0.55 + 0.25 * place / side] * side, 1)[..., None] * torch.tensor([0.75, 0.9, 1.0]).double()
    light = 0.5 + 0.5 * (-(x + 0.1 * side).square() - (y + 0.12 * side).square()).div((0.25 * side) ** 2).exp()
    picture = torch.where(ball[..., None], light[..., None] * torch.tensor([0.95, 0.35, 0.2]).double(), sky)
    patches = picture.view(GRID, CELL, GRID, CELL, 3).transpose(1, 2).reshape(1, GRID**2, -1)
    logits = ball.double().view(GRID, CELL, GRID, CELL).mean((1, 3)).reshape(1, -1)  # how much of the ball a cell holds
    logits = logits + 0.02 * torch.arange(GRID**2).flip(0) / GRID**2  # no ties
    alpha, z = soft_topk(logits, kept, tau=tau * 0.4, return_z=True)
    noise = torch.randn(patches.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    throttled = vp_noise(patches, z, noise=noise, mu=patches.mean((0, 1)), sigma=patches.std((0, 1)))
    keep = hard_mask(logits, kept)
    hard = patches.masked_fill(~keep[..., None], torch.nan)

    def whole(tokens: Tensor) -> np.ndarray:
        return tokens.view(GRID, GRID, CELL, CELL, 3).transpose(1, 2).reshape(side, side, 3).clamp(0, 1).numpy()

    return {
        "picture": whole(patches),
        "weights": alpha.view(GRID, GRID).numpy(),
        "throttled": whole(throttled),
        "kept": keep.view(GRID, GRID).double().numpy(),
        "hard": np.nan_to_num(whole(hard), nan=1.0),
    }


def draw(rows: Sequence[Row], path: Path) -> None:
    """The illustration above, accuracy of both operators on each backbone below."""
    names = backbones_of(rows)
    with figure(path, PANELS, rows=2, height=1.9) as axes:
        drawn = illustration()
        titles = {"picture": "tokens", "weights": "weights", "throttled": "throttled", "hard": "hard top-K"}
        for panel, (name, title) in zip(axes, titles.items(), strict=False):
            panel.imshow(drawn[name], cmap="gray", vmin=0, vmax=1)
            panel.set_title(title)
            panel.set_xticks([])
            panel.set_yticks([])
        for panel, backbone in zip(axes[PANELS:], names, strict=False):
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
        axes[PANELS].set_ylabel("accuracy (%)")
        for panel in axes[PANELS + len(names) :]:
            panel.axis("off")
        axes[-1].legend(*axes[PANELS].get_legend_handles_labels(), loc="center")
