"""Do gradients of different batches agree? Figure 2: DiffPrune against Gumbel-STE on the same scorer.

Left: the mean cosine between the scorer's gradients on disjoint batches. Middle and right: accuracy at each budget with
tokens really dropped, after both were trained alike.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from diffprune.methods.base import Pruner, TrainablePruner
from diffprune.methods.options import build_method, deployed_as
from diffprune.ops import hard_topk, take_tokens
from diffprune_lab.deit import Encoded
from diffprune_lab.probes.bench import DIVERSE, LEARNED, PLAIN, Bench
from diffprune_lab.probes.data import inside_box
from diffprune_lab.probes.figures import COLOURS, ORDER, backbones_of, budget_axis, figure, label, legend_below
from diffprune_lab.probes.store import SEEDS, Cell, Row, collect, interval, mean_and_spread
from diffprune_lab.probes.throttling import budget_counts, run_throttled

NAME = "coherence"
KEY = ("backbone", "method", "keep", "moment")
NOTE = (
    "cosine: mean over pairs of batches of the cosine between scorer gradients, error by jackknife over batches; "
    "ratio: DiffPrune's over Gumbel-STE's, only where the intervals of both lie above 0, and at least the lower end of "
    "the former over the upper end of the latter; diffprune_plain: without the bridge, as the paper's; box: random "
    "tokens of the object's box"
)


def measure(bench: Bench, seed: int) -> Iterator[Cell]:
    """Cosines along both trainings, then accuracy of both, of random choice, in the box or anywhere, and of all tokens.

    Cosines at the start also without the bridge, which is how the paper's own is. What tokens of the object's box are
    worth to the classifier says how much a scorer can gain by finding the object.
    """
    settings = bench.settings
    for keep in (0.1111, settings.keep, 0.5):
        tau = settings.temperatures[0]
        yield _cosine(bench, bench.start(PLAIN, seed), PLAIN, seed, keep=keep, moment=0.0, tau=tau)
    for name in LEARNED:
        method, snapshots = bench.trained(name, seed)
        final = snapshots[-1].state
        for snapshot in snapshots:
            method.load_state_dict(snapshot.state)
            keeps = (0.1111, settings.keep, 0.5) if snapshot.moment == 0 else (settings.keep,)
            for keep in keeps:
                yield _cosine(bench, method, name, seed, keep=keep, moment=snapshot.moment, tau=snapshot.tau)
        method.load_state_dict(final)
        for keep in settings.keeps:
            yield _accuracy(bench, dropping(bench, method), name, keep, seed)
            if name == "diffprune":
                yield _accuracy(bench, dropping(bench, deployed_as(method, asked=DIVERSE)), DIVERSE, keep, seed)
    random = build_method("random", seed=seed)
    for keep in settings.keeps:
        yield _accuracy(bench, dropping(bench, random), "random", keep, seed)
        yield _accuracy(bench, keeping_the_box(bench, seed), "box", keep, seed)
    yield _accuracy(bench, dropping(bench, build_method("full")), "full", 1.0, seed)


def _cosine(
    bench: Bench, method: TrainablePruner, name: str, seed: int, *, keep: float, moment: float, tau: float
) -> Cell:
    cosine, error = pairwise_cosine(batch_gradients(bench, method, seed, keep=keep, tau=tau))
    key = {"backbone": bench.backbone, "method": name, "keep": keep, "moment": moment}
    return Cell(key, seed, {"cosine": cosine, "error": error, "tau": tau})


def batch_gradients(
    bench: Bench, method: TrainablePruner, seed: int, *, keep: float, tau: float
) -> Float[Tensor, "batches parameters"]:
    """The scorer's gradient on each of several disjoint batches of plain training pictures, each with its own noise."""
    settings, photos, deit, read = bench.settings, bench.train_photos, bench.cut_open(), bench.read
    needed = settings.batches * settings.pictures
    if len(photos) < needed:
        raise ValueError(
            f"{settings.batches} batches of {settings.pictures} need {needed} training pictures, there are "
            f"{len(photos)}; give more with --data, or try --size tiny"
        )
    order = torch.randperm(len(photos), generator=torch.Generator().manual_seed(seed))[:needed].to(bench.device)
    weights = list(method.scorer.parameters())  # type: ignore[union-attr]
    found = []
    for number, rows in enumerate(order.split(settings.pictures)):
        generator = torch.Generator(bench.device).manual_seed(seed * 1_000_003 + number)
        with bench.autocast():
            encoded = deit.encode(bench.classifier.pixel_values(photos.pixels[rows]))
            logits, _ = run_throttled(read, method, encoded, budget_counts(encoded, keep), tau, generator)
        gradient = torch.autograd.grad(F.cross_entropy(logits.float(), photos.labels[rows]), weights)
        found.append(torch.cat([part.flatten() for part in gradient]))
    return torch.stack(found)


def pairwise_cosine(gradients: Float[Tensor, "batches parameters"]) -> tuple[float, float]:
    """Mean cosine over all pairs of rows, and its standard error by leaving out one row at a time."""
    unit = F.normalize(gradients, dim=-1)
    cosines = (unit @ unit.T).double()
    count = len(cosines)
    sums = cosines.sum(-1) - cosines.diagonal()  # of each row with all others
    total = sums.sum() / 2
    mean = total / (count * (count - 1) / 2)
    without = (total - sums) / ((count - 1) * (count - 2) / 2)
    error = ((count - 1) / count * (without - without.mean()).square().sum()).sqrt()
    return float(mean), float(error)


def dropping(bench: Bench, method: Pruner) -> Callable[[Encoded, Tensor], Tensor]:
    """Class logits from the tokens a method keeps."""
    deit = bench.cut_open()

    def answer(encoded: Encoded, k: Tensor) -> Tensor:
        keep = method.select(encoded.tokens, k)
        return deit.logits(encoded.prefix, take_tokens(encoded.tokens.x, keep))

    return answer


def keeping_the_box(bench: Bench, seed: int) -> Callable[[Encoded, Tensor], Tensor]:
    """Class logits from random tokens of the object's box, and from others where it has too few."""
    deit, photos = bench.cut_open(), bench.photos
    inside = inside_box(photos.boxes, deit.side).cpu()
    ranks = inside + torch.rand(inside.shape, generator=torch.Generator().manual_seed(seed))
    left = [ranks.to(bench.device)]

    def answer(encoded: Encoded, k: Tensor) -> Tensor:  # pictures come in order
        here, left[0] = left[0].tensor_split([len(k)])
        return deit.logits(encoded.prefix, take_tokens(encoded.tokens.x, hard_topk(here, k)))

    return answer


def _accuracy(bench: Bench, answer: Callable[[Encoded, Tensor], Tensor], name: str, keep: float, seed: int) -> Cell:
    right = bench.right_when(answer, keep).float().mean(0).mul(100)
    key = {"backbone": bench.backbone, "method": name, "keep": keep}
    return Cell(key, seed, {"top1": float(right[0]), "top5": float(right[1])})


# --- from all seeds ---------------------------------------------------------------------------------------------------


def summarise(rows: Sequence[Row]) -> list[Row]:
    """Rows with mean, deviation and interval over seeds, and the ratio where both cosines are known to be above 0."""
    done: list[Row] = []
    for row in sorted(rows, key=lambda row: ("moment" not in row, ORDER.index(row["backbone"]), row["method"])):
        summary: Row = {"n_seeds": len(row[SEEDS])}
        if "moment" in row:
            cosines = collect(row, "cosine")
            summary["cosine"], summary["cosine_std"] = mean_and_spread(cosines)
            summary["ci95"] = interval(cosines, collect(row, "error"))
        else:
            for name in ("top1", "top5"):
                summary[name], summary[f"{name}_std"] = mean_and_spread(collect(row, name))
        done.append({**row, **summary})
    surrogate = {place_of(row): row for row in done if row["method"] == "gumbel_ste" and "moment" in row}
    for row in done:
        other = surrogate.get(place_of(row)) if row["method"] in ("diffprune", PLAIN) and "moment" in row else None
        if other is not None:
            row |= compare(row, other)
    return done


def compare(ours: Row, theirs: Row) -> dict[str, float]:
    """What the ratio of cosines is at least, where ours is above 0; and the ratio, where theirs is too."""
    (low, _), (least, most) = ours["ci95"], theirs["ci95"]
    if low <= 0 or most <= 0:
        return {}
    found = {"ratio_at_least": low / most, "ratio": ours["cosine"] / theirs["cosine"] if least > 0 else math.inf}
    return {name: value for name, value in found.items() if math.isfinite(value)}


def place_of(row: Row) -> tuple[str, float, float]:
    return row["backbone"], row["keep"], row.get("moment", -1.0)


def main_keep(cosines: Sequence[Row]) -> float:
    """The budget that was measured at all moments; the others have the start alone."""
    return max({row["keep"] for row in cosines}, key=[row["keep"] for row in cosines].count)


STYLES = ("-", "--", ":")  # of the backbones


def draw(rows: Sequence[Row], path: Path) -> None:
    """Cosines at the start by backbone, cosines along training, and accuracy on the smallest and largest backbone."""
    names = backbones_of(rows)
    cosines = [row for row in rows if "moment" in row]
    main = main_keep(cosines)
    shown = [row for row in cosines if row["keep"] == main]
    ends = [names[0], names[-1]] if len(names) > 1 else names
    with figure(path, 2 + len(ends), height=2.7) as (left, along, *right):
        bars = [name for name in (PLAIN, *LEARNED) if any(row["method"] == name for row in shown)]
        for place, name in enumerate(bars):
            width = 0.72 / len(bars)
            offset = width * (place - (len(bars) - 1) / 2)
            chosen = {row["backbone"]: row for row in shown if row["method"] == name and row["moment"] == 0}
            places = [index + offset for index, backbone in enumerate(names) if backbone in chosen]
            values = [chosen[backbone] for backbone in names if backbone in chosen]
            errors = [
                [row["cosine"] - row["ci95"][0] for row in values],
                [row["ci95"][1] - row["cosine"] for row in values],
            ]
            left.bar(places, [row["cosine"] for row in values], 0.94 * width, color=COLOURS[name], label=label(name))
            left.errorbar(places, [row["cosine"] for row in values], errors, fmt="none", ecolor="black", capsize=2)
            for index, backbone in enumerate(names if name in LEARNED else ()):
                line = sorted(
                    (row for row in shown if row["method"] == name and row["backbone"] == backbone),
                    key=lambda row: row["moment"],
                )
                along.plot(
                    [100 * row["moment"] for row in line],
                    [row["cosine"] for row in line],
                    STYLES[index],
                    color=COLOURS[name],
                    marker="o",
                )
        left.set_xticks(range(len(names)), [label(name) for name in names], rotation=20)
        left.axhline(0, color="black", linewidth=0.6)
        left.set_ylabel("cosine between batches")
        left.set_title("at the start")
        along.axhline(0, color="black", linewidth=0.6)
        along.set_xlabel("training (%)")
        along.set_title("along training")
        for index, backbone in enumerate(names):  # colours are methods' everywhere; here lines are backbones'
            along.plot([], [], STYLES[index], color="black", label=label(backbone))
        for axes, backbone in zip(right, ends, strict=True):
            _draw_accuracy(axes, [row for row in rows if row["backbone"] == backbone and "top1" in row])
            axes.set_title(label(backbone))
        right[0].set_ylabel("top-1 (%)")
        legend_below([left, right[-1], along])


def _draw_accuracy(axes, rows: Sequence[Row]) -> None:
    keeps = sorted({row["keep"] for row in rows if row["method"] != "full"})
    for name in (*LEARNED, DIVERSE, "random", "box"):
        line = sorted((row for row in rows if row["method"] == name), key=lambda row: row["keep"])
        if not line:
            continue
        axes.errorbar(
            [row["keep"] for row in line],
            [row["top1"] for row in line],
            [row["top1_std"] for row in line],
            color=COLOURS[name],
            marker="o",
            capsize=2,
            label=label(name),
        )
    for row in rows:
        if row["method"] == "full":
            axes.axhline(row["top1"], color=COLOURS["full"], linewidth=0.8, linestyle="--", label=label("full"))
    budget_axis(axes, keeps)
