"""How rough is the loss around a scorer's start? Figure 3: the executed loss along one direction and over a slice.

Every point is the loss on the same pictures with the same noise; only the scorer's weights move. Directions are random
and filter-normalised: each row of a weight matrix moves by its own norm at distance 1.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from diffprune_lab.probes.bench import LEARNED, PLAIN, Bench
from diffprune_lab.probes.figures import COLOURS, ORDER, backbones_of, figure, label
from diffprune_lab.probes.store import SEEDS, Cell, Row, collect, interval, mean_and_spread
from diffprune_lab.probes.throttling import budget_counts, run_throttled

NAME = "landscape"
KEY = ("backbone", "method", "tau")
NOTE = (
    "variation: mean absolute change of the loss per step along a filter-normalised direction from -1 to 1, same noise "
    "and batch; ratio: Gumbel-STE's over DiffPrune's at that temperature, geometric mean over seeds; diffprune_plain: "
    "without the bridge, as the paper's"
)


def measure(bench: Bench, seed: int) -> Iterator[Cell]:
    """The line for both methods, DiffPrune's also without the bridge and at its last temperature.

    The slice is for the first seed alone, and of DiffPrune without the bridge, as the paper's is.
    """
    settings, photos = bench.settings, bench.train_photos
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(photos), generator=generator)[: settings.pictures].to(bench.device)
    deit = bench.cut_open()
    with torch.no_grad():
        encoded = deit.encode(bench.classifier.pixel_values(photos.pixels[rows]))  # float32: bfloat16 is rough itself
    k = budget_counts(encoded, settings.keep)
    names = (PLAIN, *LEARNED)
    for name in names:
        method = bench.start(name, seed)
        weights = list(method.scorer.parameters())  # type: ignore[union-attr]
        start = [weight.detach().clone() for weight in weights]
        first, second = (filter_normalised(start, seed * 10 + number) for number in (1, 2))

        def loss(tau: float, method=method) -> Float[Tensor, ""]:
            noise = torch.Generator(bench.device).manual_seed(seed)
            with fast_float32(bench.device):
                logits, _ = run_throttled(deit.logits, method, encoded, k, tau, noise)
            return F.cross_entropy(logits, photos.labels[rows])

        # Gumbel-STE executes the same hard choice at every temperature.
        for tau in dict.fromkeys(settings.temperatures[:1] if name == "gumbel_ste" else settings.temperatures):
            line = walk(weights, start, [first], settings.line, lambda tau=tau: loss(tau))
            values = {"variation": stepwise_variation(line), "line": line.tolist()}
            if seed == bench.seeds[0] and tau == settings.temperatures[0] and name in (PLAIN, "gumbel_ste"):
                values["slice"] = walk(
                    weights, start, [first, second], settings.slice, lambda tau=tau: loss(tau)
                ).tolist()
            yield Cell(
                {"backbone": bench.backbone, "method": name, "tau": tau},
                seed,
                {"variation": values.pop("variation"), "curves": values},
            )


@contextmanager
def fast_float32(device: str) -> Iterator[None]:
    """Matrix products of float32 on a GPU's tensor cores, from ten bits of mantissa and so several times as fast.

    That is smooth enough, which bfloat16 with its seven bits is not: its rounding is a roughness of its own.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if device.startswith("cuda") else before)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def filter_normalised(weights: Sequence[Tensor], seed: int) -> list[Tensor]:
    """A random direction whose every filter (row of a matrix, whole vector) is as long as the weights' own."""
    generator = torch.Generator().manual_seed(seed)
    direction = []
    for weight in weights:
        drawn = torch.randn(weight.shape, generator=generator, dtype=torch.float32).to(weight)
        axes = tuple(range(1, weight.ndim)) if weight.ndim > 1 else (0,)
        length = drawn.norm(dim=axes, keepdim=True).clamp(min=1e-12)
        direction.append(drawn * weight.norm(dim=axes, keepdim=True) / length)
    return direction


@torch.no_grad()
def walk(
    weights: Sequence[Tensor],
    start: Sequence[Tensor],
    directions: Sequence[Sequence[Tensor]],
    points: int,
    loss: Callable[[], float | Tensor],
) -> Float[Tensor, "..."]:
    """The loss at equal steps from -1 to 1 along each direction: [points], or [points, points] for two of them."""
    places = torch.linspace(-1, 1, points, dtype=torch.float64).tolist()
    found = []
    for place in torch.cartesian_prod(*[torch.tensor(places)] * len(directions)).view(-1, len(directions)).tolist():
        for index, weight in enumerate(weights):
            weight.copy_(start[index] + sum(step * way[index] for step, way in zip(place, directions, strict=True)))
        found.append(torch.as_tensor(loss(), dtype=torch.float64))  # read at the end: a GPU need not wait for each
    for weight, value in zip(weights, start, strict=True):
        weight.copy_(value)
    return torch.stack(found).cpu().view([points] * len(directions))


def stepwise_variation(line: Float[Tensor, " points"]) -> float:
    """Mean absolute difference of neighbours."""
    return float(line.diff().abs().mean())


# --- from all seeds ---------------------------------------------------------------------------------------------------


def summarise(rows: Sequence[Row]) -> list[Row]:
    """Rows with mean and deviation over seeds; DiffPrune's with the ratio to Gumbel-STE's on the same seeds."""
    done: list[Row] = []
    surrogate = {(row["backbone"], row.get("moment")): row for row in rows if row["method"] == "gumbel_ste"}
    for row in sorted(
        rows, key=lambda row: (ORDER.index(row["backbone"]), row["method"], row.get("moment", 0), -row["tau"])
    ):
        mean, spread = mean_and_spread(collect(row, "variation"))
        summary: Row = {"n_seeds": len(row[SEEDS]), "variation": mean, "variation_std": spread}
        other = surrogate.get((row["backbone"], row.get("moment")))
        if row["method"] != "gumbel_ste" and other is not None:
            pairs = [
                (other[SEEDS].get(seed, {}).get("variation", 0), of["variation"]) for seed, of in row[SEEDS].items()
            ]
            ratios = [math.log(theirs / ours) for theirs, ours in pairs if min(theirs, ours) > 0]
            if ratios:  # in logs, where twice as much and half as much are as far from alike
                summary |= {"ratio": math.exp(fmean(ratios)), "ci95": [math.exp(end) for end in interval(ratios)]}
        done.append({**row, **summary})
    return done


def draw(rows: Sequence[Row], path: Path) -> None:
    """How rough the loss is: along one line of the largest backbone, and as a ratio of both methods for every one."""
    names = backbones_of(rows)
    taus = sorted({row["tau"] for row in rows}, reverse=True)
    ours = PLAIN if any(row["method"] == PLAIN for row in rows) else "diffprune"
    at_start = {row["method"]: row for row in rows if row["backbone"] == names[-1] and row["tau"] == taus[0]}
    seed = next(seed for seed in at_start[ours][SEEDS] if seed in at_start["gumbel_ste"][SEEDS])
    with figure(path, 2, height=2.9) as (left, right):
        for name in (ours, "gumbel_ste"):
            line = at_start[name][SEEDS][seed]["curves"]["line"]
            places = [2 * index / (len(line) - 1) - 1 for index in range(len(line))]
            middle = line[len(line) // 2]
            left.plot(places, [value - middle for value in line], color=COLOURS[name], label=label(name), linewidth=1.2)
        left.set_title(f"Loss along one direction, {label(names[-1])}, tau {taus[0]:g}")
        left.set_xlabel("distance")
        left.set_ylabel("loss, change from the middle")
        left.legend(loc="upper left", fontsize=7)
        for shift, tau, shade in zip((-0.2, 0.2), taus, (COLOURS["diffprune"], COLOURS[PLAIN]), strict=False):
            found = {
                row["backbone"]: row for row in rows if row["method"] == ours and row["tau"] == tau and "ratio" in row
            }
            shown = [(place, found[name]) for place, name in enumerate(names) if name in found]
            bars = [[abs(row["ratio"] - row["ci95"][end]) for _, row in shown] for end in (0, 1)]
            x, heights = [place + shift for place, _ in shown], [row["ratio"] for _, row in shown]
            right.bar(x, heights, 0.38, yerr=bars, capsize=3, color=shade, label=f"tau {tau:g}")
            for where, row in zip(x, (row for _, row in shown), strict=True):
                right.text(where, max(1.0, row["ci95"][1]) + 0.12, f"{row['ratio']:.1f}", ha="center", fontsize=8)
        right.axhline(1, color="#222222", linewidth=0.8)
        right.set_xticks(range(len(names)), [label(name) for name in names])
        right.set_ylabel("variation, Gumbel-STE's\nover DiffPrune's (95 % interval)")
        right.margins(y=0.12)
        right.set_title("Above 1 Gumbel-STE's is the rougher")
        right.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2)
