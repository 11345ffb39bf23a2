"""Which ranking the throttled loss asks for, at each temperature.

DiffPrune's gradient is exact for what is executed, but what is executed is no dropping: at a high temperature all
tokens weigh about the same. Here logits are noise plus a contrast between what captions speak of and the rest, so that
things stand at the bottom of the ranking or on top of it, and the loss of captions is taken for both. Where the bottom
is cheaper, the loss prefers the wrong ranking. Beside it stands what can be known where nobody says what matters: how
far throttled and hard loss agree about random rankings (`agreement.py`). The throttler is that of a run of
`diffprune train` on scenes, and a new one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from diffprune.config import RunConfig
from diffprune.evaluate.throttled import load_throttled, run_config
from diffprune.methods.options import build_method
from diffprune.model import PrunedVLM
from diffprune.ops.noise import draw_normal
from diffprune.train.feed import Feed
from diffprune.train.sampler import noise_generator
from diffprune.train.sources import open_feed
from diffprune_lab.probes.agreement import BATCH, RANKINGS, Captions, agreement
from diffprune_lab.probes.figures import figure, legend_below
from diffprune_lab.probes.store import Row, interval, rounded

NAME = "temperature"
NOTE = (
    "throttled loss of validation captions with logits of noise plus a contrast of 4 deviations between tokens of "
    "things and the others; slope: loss with things at the bottom minus loss with things on top, by batches of "
    "four captions, with its 95 % interval; below 0 the loss asks for the wrong ranking; agreement: correlation of "
    "throttled and hard loss over rankings by random directions of the features"
)
CONTRAST = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TemperatureSettings:
    """How much is done; the tiny size measures nothing."""

    captions: int
    taus: tuple[float, ...]
    keeps: tuple[float, ...] = (0.05, 0.25)
    rankings: int = RANKINGS


SIZES = {
    "full": TemperatureSettings(captions=32, taus=(2.0, 1.4, 1.0, 0.7, 0.5, 0.35, 0.25, 0.1)),
    "tiny": TemperatureSettings(captions=2 * BATCH, taus=(2.0, 0.1), rankings=4),
}


def run(weights: str | None, settings: TemperatureSettings, device: str, picture: Path) -> tuple[list[Row], str]:
    """(rows, notes) of the runs of `diffprune train` whose folders `weights` names, drawn in `picture`."""
    folders = [Path(name) for name in (weights or "").split(",") if name]
    if not folders:
        raise ValueError("no run was named; give the folders of runs of `diffprune train` on scenes with --weights")
    if len({folder.name for folder in folders}) < len(folders):
        raise ValueError(f"two of the runs {weights} have the same name; rename one folder")
    rows = [row for folder in folders for row in measure(folder, device, settings)]
    draw(rows, picture)
    return rows, f"{NOTE}; {settings.captions} captions"


def measure(folder: Path, device: str, settings: TemperatureSettings) -> list[Row]:
    """A row for each throttler, budget and temperature of a run's model."""
    config = run_config(folder)
    if config is None or config.data.name != "scenes" or config.method.name != "diffprune":
        raise ValueError(f"{folder} is no run of `diffprune train` with diffprune on scenes; give the folder of one")
    vlm = PrunedVLM.from_pretrained(folder)
    trained, _ = load_throttled(folder, vlm.method)
    torch.manual_seed(config.seed)
    new = build_method(trained.name, block=vlm.backbone.block, **config.method.options)
    noise = {name: value for name, value in trained.state_dict().items() if name.startswith("throttle_noise.")}
    new.load_state_dict(noise, strict=False)  # what it was calibrated to is no learning
    vlm.base.to(device)
    feed = open_feed(replace(config.data, validation=settings.captions), config.seed)
    samples = feed.validation()
    scenes = [Scenes.of(vlm, feed, samples[at : at + BATCH], config) for at in range(0, len(samples), BATCH)]
    rows: list[Row] = []
    for name, method in (("new", new), ("trained", trained)):
        throttled = PrunedVLM(vlm.base, vlm.processor, method=method.to(device).eval())
        for keep in settings.keeps:
            found = agreement(
                throttled, [one.captions for one in scenes], keep, settings.taus, rankings=settings.rankings
            )
            for tau, value in found:
                ends = [[one.loss(throttled, side, keep, tau) for side in (-CONTRAST, CONTRAST)] for one in scenes]
                key = {"run": folder.name, "throttler": name, "keep": keep, "tau": tau}
                rows.append({**key, **_compare(ends), "agreement": value})
    return rounded(rows)


@dataclass(frozen=True, slots=True)
class Scenes:
    """A few scenes with captions.

    Args:
        regions: Tokens of what the captions speak of.
        noise: Of the logits, the same for both rankings.
    """

    captions: Captions
    regions: Bool[Tensor, "B N"]
    noise: Float[Tensor, "B N"]

    @classmethod
    def of(cls, vlm: PrunedVLM, feed: Feed, samples: Sequence[Any], config: RunConfig) -> "Scenes":
        batch, tokens = feed.encode(vlm, samples)
        regions = feed.regions(vlm, tokens, samples)
        assert regions is not None  # scenes alone come here
        captions = Captions.of(samples, batch, tokens, config)
        generators = [noise_generator(tokens.x.device, config.seed, NAME, one) for one in captions.ids]
        noise = draw_normal(tokens.x[..., :1], tokens.mask, generators)[..., 0]
        return cls(captions, regions, noise)

    def loss(self, vlm: PrunedVLM, contrast: float, keep: float, tau: float) -> float:
        """The throttled loss with things so far above the rest."""
        return self.captions.loss(vlm, self.noise + contrast * self.regions, keep, tau)


def _compare(ends: Sequence[Sequence[float]]) -> Row:
    """Both losses, and how much lower it is with things on top, with its interval over batches."""
    bottom, top = zip(*ends, strict=True)
    slopes = [low - high for low, high in ends]
    return {"bottom": fmean(bottom), "top": fmean(top), "slope": fmean(slopes), "ci95": interval(slopes)}


SHADES = ("#8a8a8a", "#222222", "#f1b6a8", "#d9664f", "#8e2a1c")  # of the models, the Qwen kind from small to large


def draw(rows: Sequence[Row], path: Path) -> None:
    """The slope by temperature with its interval, a panel for each budget: where it is below 0 the loss misleads.

    A line for each model, with the throttler that was trained with it where there is one; new ones are in the table.
    """
    runs = list(dict.fromkeys(row["run"] for row in rows))
    trained = [row for row in rows if row["throttler"] == "trained"] or list(rows)
    budgets = list(dict.fromkeys(row["keep"] for row in trained))
    with figure(path, len(budgets), height=3.2, share_y=True) as axes:
        for panel, keep in zip(axes, budgets, strict=True):
            for run, colour in zip(runs, SHADES * len(runs), strict=False):
                line = [row for row in trained if (row["run"], row["keep"]) == (run, keep)]
                if line:
                    slopes = [row["slope"] for row in line]
                    bars = [[abs(row["slope"] - row["ci95"][end]) for row in line] for end in (0, 1)]
                    panel.errorbar(
                        [row["tau"] for row in line], slopes, bars, fmt="o-", color=colour, capsize=2.5, label=run
                    )
            panel.axhspan(-0.45, 0, color="#f6d5cf", alpha=0.6, linewidth=0)
            panel.set_xscale("log")
            shown = [tau for tau in sorted({row["tau"] for row in trained}) if tau in (0.1, 0.25, 0.5, 1.0, 2.0)]
            panel.set_xticks(shown, [f"{tau:g}" for tau in shown])
            panel.minorticks_off()
            panel.set_xlabel("temperature")
            panel.set_title(f"{100 * keep:g} % of the tokens kept")
        axes[0].set_ylabel("loss with things at the bottom\nminus with things on top")
        axes[0].set_ylim(bottom=-0.45)
        axes[-1].annotate("wrong ranking is rewarded", (0.03, 0.03), xycoords="axes fraction", fontsize=8)
        legend_below(axes)
