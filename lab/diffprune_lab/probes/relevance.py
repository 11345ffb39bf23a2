"""Are the kept tokens on the object? Share of them inside its box, as lift over chance (not in the paper).

Only pictures whose box covers less than 40 % count. Objects sit in the middle, so a plain `centre` square is the one to
beat. Methods without training are also tried at later blocks, where their attention means more; DiffPrune and
Gumbel-STE stand where they were trained. A classifier has no projector: methods that ask for projected tokens get the
tokens.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from diffprune.methods.base import Pruner, TrainablePruner
from diffprune.methods.options import build_method, deployed_as
from diffprune.registry import METHODS
from diffprune_lab.deit import DeiT
from diffprune_lab.probes.agreement import fixed_logits
from diffprune_lab.probes.bench import DIVERSE, LEARNED, SUPERVISED, Bench
from diffprune_lab.probes.data import Photos, inside_box
from diffprune_lab.probes.figures import COLOURS, ORDER, backbones_of, figure, label
from diffprune_lab.probes.store import SEEDS, Cell, Row, collect, interval
from diffprune_lab.probes.throttling import budget_counts, run_throttled

NAME = "relevance"
KEY = ("backbone", "method", "keep")
NOTE = (
    "inside: percent of kept tokens whose centre lies in the object's box, pictures whose box covers less than 40 %; "
    "lift: that over the percent of all tokens; lead: DiffPrune's inside minus this method's in points, by picture; "
    "methods without training at the block (cut) where they do best on these very pictures; supervised: an "
    "upper bound, DiffPrune's scorer trained on the boxes of the training pictures; preference_first, preference_last: "
    "how much more the gradient of the throttled loss at random logits raises a token of the box than one outside it, "
    "in deviations over pictures, at the first and the last temperature of training"
)
LARGEST_BOX = 0.4
SAMPLED = 640  # pictures whose gradients are looked at
BROKEN = 0.05  # share of them that may have no finite one
MOMENTS = ("preference_first", "preference_last")  # of a training's two temperatures
PROVIDED = frozenset({*DeiT.provides, "projected"})
BLIND = frozenset({"random", "uniform_grid", "centre", "average_pool"})  # the same at every cut


def untrained_methods() -> frozenset[str]:
    """Methods without training that an image classifier can feed."""
    return frozenset(
        name
        for name, method in ((name, METHODS.get(name)) for name in METHODS.names())
        if not method.trained and not method.is_inside and method.needs <= PROVIDED and name != "full"
    )


def small_boxes(photos: Photos, side: int) -> Photos:
    """The pictures whose box covers less than 40 % and holds the centre of a token of the side x side grid at least."""
    is_hit = inside_box(photos.boxes, side).any(-1)
    rows = ((photos.box_shares < LARGEST_BOX) & is_hit).nonzero().squeeze(-1)
    if len(rows) < 2:
        raise ValueError(
            f"{len(rows)} of {len(photos)} pictures have a box that covers less than {LARGEST_BOX:.0%} and holds a "
            "token; relevance needs at least 2"
        )
    return replace(
        photos,
        pixels=photos.pixels[rows],
        labels=photos.labels[rows],
        boxes=photos.boxes[rows],
        seeds=tuple(photos.seeds[row] for row in rows.tolist()),
    )


@torch.no_grad()
def shares_inside(
    bench: Bench, photos: Photos, methods: Mapping[str, Pruner], cut: int
) -> dict[tuple[str, float], Float[Tensor, " M"]]:
    """Percent of each picture's kept tokens that lie in its box, by method and budget."""
    needs = frozenset().union(*(method.needs for method in methods.values()))
    found: dict[tuple[str, float], list[Tensor]] = {}
    for rows, encoded in bench.encoded(photos, cut, needs & DeiT.provides):
        tokens = encoded.tokens
        inside = inside_box(photos.boxes[rows], tokens.grid[0][0]).double()
        for name, method in methods.items():
            given = replace(tokens, projected=tokens.x) if "projected" in method.needs else tokens
            for keep in bench.settings.box_keeps:
                kept = method.select(given, budget_counts(encoded, keep))
                on = inside.gather(1, kept.clamp(min=0)) * (kept >= 0)
                found.setdefault((name, keep), []).append(100 * on.sum(-1) / (kept >= 0).sum(-1))
    return {key: torch.cat(parts) for key, parts in found.items()}


def measure(bench: Bench, seed: int) -> Iterator[Cell]:
    """DiffPrune and Gumbel-STE of this seed, and DiffPrune's lead over every method without training, at every cut.

    A scorer of this kind that is trained on the boxes is an upper bound.
    """
    photos = small_boxes(bench.photos, bench.cut_open().side)
    chance = 100 * inside_box(photos.boxes, bench.cut_open().side).double().mean(-1)
    own_cut = bench.cut_open().cut
    trained = {name: bench.scorer(name, seed) for name in LEARNED}
    scorers: dict[str, Pruner] = {**trained, DIVERSE: deployed_as(trained["diffprune"], asked=DIVERSE)}
    if (supervised := bench.supervised(seed)) is not None:
        scorers[SUPERVISED] = supervised
    learned = shares_inside(bench, photos, scorers, own_cut)
    cuts = dict.fromkeys((own_cut, *(bench.cut_open(later).cut for later in bench.settings.later_cuts)))
    found = {own_cut: learned | _untrained(bench, photos, own_cut, BLIND)}
    for cut in cuts:
        found.setdefault(cut, {}).update(_untrained(bench, photos, cut, untrained_methods() - BLIND))
    keeps, taus = bench.settings.box_keeps, bench.settings.temperatures
    preferences = box_preference(bench, trained["diffprune"], photos, seed, keeps=keeps, taus=taus)
    for name in (*scorers, *sorted(untrained_methods())):
        for keep in keeps:
            ours = learned["diffprune", keep]
            values = {
                str(cut): compare(inside[name, keep], chance, None if name == "diffprune" else ours)
                for cut, inside in found.items()
                if (name, keep) in inside
            }
            preferred: dict[str, float] = {}
            if name == "diffprune":
                preferred = {moment: preferences[keep, tau] for moment, tau in zip(MOMENTS, taus, strict=True)}
            key = {"backbone": bench.backbone, "method": name, "keep": keep}
            yield Cell(key, seed, {"cuts": values, **preferred})


def box_preference(
    bench: Bench, method: TrainablePruner, photos: Photos, seed: int, *, keeps: Sequence[float], taus: Sequence[float]
) -> dict[tuple[float, float], float]:
    """How much more the throttled loss prefers a token of the box to one outside it, at logits of noise.

    It prefers a token where its gradient by that token's logit is negative. Of each picture: the mean over the tokens
    in the box minus that over the others. Of all: the mean in deviations, 0 where the loss is indifferent; times the
    root of the number of pictures it is a t-value. By budget and temperature.
    """
    deit, batch, remove_below = bench.cut_open(), bench.settings.batch, bench.recipe_of("diffprune")[1]
    # Every budget and temperature has the same noise.
    generators = {pair: torch.Generator(bench.device).manual_seed(seed) for pair in product(keeps, taus)}
    found: dict[tuple[float, float], list[Tensor]] = {pair: [] for pair in generators}
    order = torch.randperm(len(photos), generator=torch.Generator().manual_seed(seed))[:SAMPLED]
    for rows in order.to(photos.labels.device).split(batch):
        inside = inside_box(photos.boxes[rows], deit.side).float()
        outside = 1 - inside
        with bench.autocast():
            encoded = deit.encode(bench.classifier.pixel_values(photos.pixels[rows]))
        for (keep, tau), generator in generators.items():
            noise = torch.randn(inside.shape, generator=generator, device=bench.device).requires_grad_()
            with torch.enable_grad(), bench.autocast(), fixed_logits(method, noise):
                k = budget_counts(encoded, keep)
                logits, _ = run_throttled(deit.logits, method, encoded, k, tau, generator, remove_below)
            loss = F.cross_entropy(logits.float(), photos.labels[rows], reduction="sum")
            (gradient,) = torch.autograd.grad(loss, noise)
            within, beyond = (-(gradient * part).sum(-1) / part.sum(-1) for part in (inside, outside))
            found[keep, tau].append(within - beyond)
    return {pair: _in_deviations(bench, torch.cat(parts)) for pair, parts in found.items()}


def _in_deviations(bench: Bench, differences: Float[Tensor, " M"]) -> float:
    """The mean in deviations; pictures without a finite gradient do not count, as steps without one are not taken."""
    finite = differences[differences.isfinite()]
    if left_out := len(differences) - len(finite):
        count = f"{left_out} of {len(differences)} pictures had no finite gradient"
        if left_out > BROKEN * len(differences):
            raise ValueError(f"{count}; the classifier cannot be probed")
        bench.say(f"{bench.backbone}: {count}")
    return float(finite.mean() / finite.std().clamp(min=1e-12))


def _untrained(bench: Bench, photos: Photos, cut: int, names: frozenset[str]) -> dict[tuple[str, float], Tensor]:
    """Shares inside by methods without training; equal for every seed, so made once."""

    def run() -> dict[tuple[str, float], Tensor]:
        block = bench.cut_open().block
        methods = {name: build_method(name, block=block).to(bench.device) for name in sorted(names)}
        if cut == 0:  # before the first block there is no attention
            methods = {name: method for name, method in methods.items() if not method.needs & DeiT.provides}
        agile: Any = methods.get("agilepruner")
        if agile is not None:  # its spectrum costs more than all else, and is the same at every budget
            agile._growth = once_per_tokens(agile._growth)
        begun = time.perf_counter()
        inside = shares_inside(bench, photos, methods, cut)
        bench.say(f"{bench.backbone} untrained methods after block {cut}: {time.perf_counter() - begun:.0f} s")
        return inside

    name = f"inside at {cut} by {', '.join(sorted(names))}"
    return bench.once(name, lambda: bench.remembered(name, run))


def once_per_tokens(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`call` with its last answer kept: asked again about the very same tokens, it does not compute again."""
    last: list[Any] = [None, None]

    def run(tokens: Any) -> Any:
        if last[0] is not tokens:
            last[:] = tokens, call(tokens)
        return last[1]

    return run


def compare(
    inside: Float[Tensor, " M"], chance: Float[Tensor, " M"], ours: Float[Tensor, " M"] | None
) -> dict[str, float]:
    """Means over pictures with their standard errors: the share inside, its lift over chance, and our lead over it."""
    lift = float(inside.mean() / chance.mean())
    residual = (inside - lift * chance) / chance.mean()  # of a ratio of two means
    found = {
        "inside": float(inside.mean()),
        "chance": float(chance.mean()),
        "lift": lift,
        "lift_error": _error(residual),
        "pictures": len(inside),
    }
    if ours is not None:
        found |= {"lead": float((ours - inside).mean()), "lead_error": _error(ours - inside)}
    return found


def _error(values: Float[Tensor, " M"]) -> float:
    """Standard error of the mean."""
    return float(values.std() / len(values) ** 0.5)


# --- from all seeds ---------------------------------------------------------------------------------------------------


def summarise(rows: Sequence[Row]) -> list[Row]:
    """Rows at their best cut, with means over seeds, the interval of the lift and of DiffPrune's lead."""
    done: list[Row] = []
    for row in sorted(rows, key=lambda row: (ORDER.index(row["backbone"]), row["keep"])):
        seeds = list(row[SEEDS].values())
        means = {cut: fmean(values["cuts"][cut]["lift"] for values in seeds) for cut in seeds[0]["cuts"]}
        best = max(means, key=lambda cut: means[cut])
        chosen: Row = {SEEDS: {seed: values["cuts"][best] for seed, values in row[SEEDS].items()}}
        lifts = collect(chosen, "lift")
        summary: Row = {
            "cut": int(best),
            "n_seeds": len(lifts),
            "inside": fmean(collect(chosen, "inside")),
            "chance": fmean(collect(chosen, "chance")),
            "lift": fmean(lifts),
            "ci95": interval(lifts, collect(chosen, "lift_error")),
        }
        for moment in MOMENTS:
            if values := collect(row, moment):
                summary[moment] = fmean(values)
        if leads := collect(chosen, "lead"):
            summary |= {"lead": fmean(leads), "lead_ci95": interval(leads, collect(chosen, "lead_error"))}
        done.append({**row, **summary})
    return done


SHOWN = 0.1111  # the budget of the figure; the others are in the table
SAME = ("cls_attention",)  # fastervlm by another name


def draw(rows: Sequence[Row], path: Path) -> None:
    """Lift over chance at one budget, a bar for each method with its interval, a panel for each backbone."""
    names = backbones_of(rows)
    keep = min({row["keep"] for row in rows}, key=lambda keep: abs(keep - SHOWN))
    chosen = [row for row in rows if row["keep"] == keep and row["method"] not in SAME]
    lifts: dict[str, list[float]] = {}
    for row in chosen:
        lifts.setdefault(row["method"], []).append(row["lift"])
    order = sorted(lifts, key=lambda name: fmean(lifts[name]))
    with figure(path, len(names), height=1.2 + 0.19 * len(order), share_y=True) as axes:
        for panel, backbone in zip(axes, names, strict=True):
            for row in chosen:
                if row["backbone"] == backbone:
                    place, (low, high) = order.index(row["method"]), row["ci95"]
                    bar = [[row["lift"] - low], [high - row["lift"]]]
                    panel.barh(
                        place, row["lift"], 0.75, xerr=bar, color=COLOURS.get(row["method"], "#b9c4d0"),
                        error_kw={"elinewidth": 0.8, "capsize": 1.5},
                    )  # fmt: skip
                    panel.text(high + 0.05, place, f"{row['lift']:.2f}", va="center", fontsize=7)
            panel.axvline(1, color="#222222", linewidth=0.8)
            panel.margins(x=0.14)
            panel.set_title(label(backbone))
            panel.set_xlabel("lift over chance (1)")
        axes[0].set_yticks(range(len(order)), [label(name) for name in order], fontsize=8)
        axes[0].figure.suptitle(
            f"Kept tokens on the object at {100 * keep:.0f} % kept; bars: 95 % interval", fontsize=9
        )
