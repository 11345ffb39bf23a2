"""How rough is the loss around a scorer's start? Figure 3: the executed loss along one direction and over a slice.

Every point is the loss on the same pictures with the same noise; only the scorer's weights move. Directions are random
and filter-normalised: each row of a weight matrix moves by its own norm at distance 1.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from diffprune_lab.probes.bench import LEARNED, PLAIN, Bench
from diffprune_lab.probes.figures import COLOURS, ORDER, backbones_of, figure, label, legend_below
from diffprune_lab.probes.store import SEEDS, Cell, Row, collect, interval, mean_and_spread
from diffprune_lab.probes.throttling import budget_counts, run_throttled

NAME = "landscape"
KEY = ("backbone", "method", "tau")
NOTE = (
    "variation: mean absolute change of the loss per step along a filter-normalised direction from -1 to 1, same noise "
    "and batch; ratio: Gumbel-STE's over DiffPrune's at that temperature, mean over seeds; diffprune_plain: without "
    "the bridge, as the paper's"
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
    surrogate = {row["backbone"]: row for row in rows if row["method"] == "gumbel_ste"}
    for row in sorted(rows, key=lambda row: (ORDER.index(row["backbone"]), row["method"], -row["tau"])):
        mean, spread = mean_and_spread(collect(row, "variation"))
        summary: Row = {"n_seeds": len(row[SEEDS]), "variation": mean, "variation_std": spread}
        other = surrogate.get(row["backbone"])
        if row["method"] != "gumbel_ste" and other is not None:
            shared = [seed for seed in row[SEEDS] if seed in other[SEEDS] and row[SEEDS][seed]["variation"] > 0]
            ratios = [other[SEEDS][seed]["variation"] / row[SEEDS][seed]["variation"] for seed in shared]
            if ratios:
                summary |= {"ratio": fmean(ratios), "ratio_std": mean_and_spread(ratios)[1], "ci95": interval(ratios)}
        done.append({**row, **summary})
    return done


def draw(rows: Sequence[Row], path: Path) -> None:
    """Both slices of the largest backbone, and both lines."""
    backbone = backbones_of(rows)[-1]
    start = max(row["tau"] for row in rows)
    chosen = {row["method"]: row for row in rows if row["backbone"] == backbone and row["tau"] == start}
    ours = PLAIN if PLAIN in chosen else "diffprune"
    # A seed with a slice, where there is one.
    seeds = sorted(chosen[ours][SEEDS], key=lambda seed: "slice" not in chosen[ours][SEEDS][seed]["curves"])
    seed = next(seed for seed in seeds if seed in chosen["gumbel_ste"][SEEDS])
    first = {name: chosen[name][SEEDS][seed]["curves"] for name in (ours, "gumbel_ste")}
    levels = [value for curves in first.values() for line in curves.get("slice", ()) for value in line]
    with figure(path, 3) as axes:
        for panel, name in zip(axes, first, strict=False):
            if "slice" in first[name]:
                across = list(zip(*first[name]["slice"], strict=True))  # direction 1 to the right
                shown = panel.imshow(across, extent=(-1, 1, -1, 1), origin="lower", vmin=min(levels), vmax=max(levels))
                panel.figure.colorbar(shown, ax=panel, shrink=0.8, label="loss")
            panel.set_title(label(name))
            panel.set_xlabel("direction 1")
            line = first[name]["line"]
            places = [2 * index / (len(line) - 1) - 1 for index in range(len(line))]
            axes[2].plot(places, line, color=COLOURS[name], linewidth=0.9, label=label(name))
        axes[0].set_ylabel("direction 2")
        ratio = chosen[ours].get("ratio")
        axes[2].set_title(label(backbone) if ratio is None else f"{label(backbone)}, ratio {ratio:.1f}")
        axes[2].set_xlabel("distance")
        axes[2].set_ylabel("loss")
        legend_below([axes[2]])
