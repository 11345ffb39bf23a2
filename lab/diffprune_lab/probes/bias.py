"""Is the straight-through gradient biased, and by how much? Eq. 2, where everything can be counted.

Six tokens, two are kept. The top-K of Gumbel-perturbed logits is a Plackett-Luce sample, so the expected loss is a sum
over all 15 subsets and its gradient is exact. Beside it: the mean straight-through gradient over many draws, the mean
score-function gradient as a control that must come out unbiased, and DiffPrune's own gradient against finite
differences. The loss is a small frozen reader of the tokens, in float64 on the CPU.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Float64
from torch import Tensor
from torch.nn import functional as F

from diffprune.ops import gumbel_topk, linear_gate, soft_topk, vp_noise
from diffprune_lab.probes.bench import Bench
from diffprune_lab.probes.figures import COLOURS, figure
from diffprune_lab.probes.store import SEEDS, Cell, Row, collect, interval, mean_and_spread

NAME = "bias"
KEY = ("estimator", "tau")
NUM_TOKENS, KEPT, WIDTH, CLASSES = 6, 2, 8, 5
TAUS = (2.0, 1.0, 0.5)
STEP = 1e-5  # of central differences
NOTE = (
    f"N = {NUM_TOKENS}, K = {KEPT}, float64; each seed is another problem (tokens, logits, reader). straight_through "
    "and score_function: mean gradient over the draws against the exact gradient of the expected loss; relative_bias: "
    "length of their difference over the exact gradient's; errors_away: largest component of it in standard errors; "
    "finite_difference_error: relative error of a gradient against central differences of the loss that was executed"
)


class Problem(NamedTuple):
    """A loss of which tokens are kept: tokens, what replaces them, logits, and a frozen reader."""

    x: Float64[Tensor, "1 N D"]
    noise: Float64[Tensor, "1 N D"]
    logits: Float64[Tensor, "1 N"]
    reader: Float64[Tensor, "D C"]
    label: int

    def read(self, x: Float64[Tensor, "B N D"]) -> Float64[Tensor, " B"]:
        """The loss of each row of tokens: all of them are read together, and not linearly."""
        answers = (x @ self.reader).tanh().sum(1) * 1.5  # [B, C]
        return F.cross_entropy(answers, torch.full((len(x),), self.label), reduction="none")

    def masked(self, m: Float64[Tensor, "B N"]) -> Float64[Tensor, " B"]:
        """The loss with the tokens of each mask kept and the others replaced by noise."""
        size = (len(m), -1, -1)
        return self.read(linear_gate(self.x.expand(size), m, noise=self.noise.expand(size)))


def make_problem(seed: int) -> Problem:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    size = (1, NUM_TOKENS, WIDTH)
    return Problem(normal(*size), normal(*size), normal(1, NUM_TOKENS), normal(WIDTH, CLASSES), label=0)


def subset_masks(num_tokens: int, kept: int) -> Float64[Tensor, "subsets N"]:
    """One row of 0 and 1 for each subset of `kept` tokens."""
    masks = torch.zeros(math.comb(num_tokens, kept), num_tokens, dtype=torch.float64)
    for row, subset in enumerate(itertools.combinations(range(num_tokens), kept)):
        masks[row, list(subset)] = 1.0
    return masks


def plackett_luce(logits: Float64[Tensor, "1 N"], kept: int) -> Float64[Tensor, " subsets"]:
    """Probability that each subset is the top-K of logits + Gumbel noise: a sum over the orders it may come in."""
    weights = logits[0].softmax(-1)
    found = []
    for subset in itertools.combinations(range(len(weights)), kept):
        ways = []
        for order in itertools.permutations(subset):
            left, chance = torch.ones((), dtype=logits.dtype), torch.ones((), dtype=logits.dtype)
            for token in order:
                chance = chance * weights[token] / left
                left = left - weights[token]
            ways.append(chance)
        found.append(torch.stack(ways).sum())
    return torch.stack(found)


def exact_gradient(problem: Problem) -> tuple[float, Float64[Tensor, " N"]]:
    """The expected loss over Gumbel noise and its gradient in the logits, by enumeration."""
    logits = problem.logits.clone().requires_grad_()
    losses = problem.masked(subset_masks(NUM_TOKENS, KEPT))
    expected = (plackett_luce(logits, KEPT) * losses).sum()
    (gradient,) = torch.autograd.grad(expected, logits)
    return float(expected.detach()), gradient[0]


def draw_gumbel(count: int, seed: int) -> Float64[Tensor, "count N"]:
    waits = torch.empty(count, NUM_TOKENS, dtype=torch.float64)
    return -waits.exponential_(generator=torch.Generator().manual_seed(seed)).log()


def straight_through(problem: Problem, gumbel: Float64[Tensor, "B N"], tau: float) -> tuple[Tensor, Tensor]:
    """Executed loss and straight-through gradient of each draw: [B], [B, N]."""
    logits = problem.logits.repeat(len(gumbel), 1).requires_grad_()
    losses = problem.masked(gumbel_topk(logits, KEPT, tau=tau, noise=gumbel))
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    return losses.detach(), gradient


def score_function(problem: Problem, gumbel: Float64[Tensor, "B N"]) -> Float64[Tensor, "B N"]:
    """loss * grad log P(subset) of each draw: unbiased, whatever the loss."""
    masks = subset_masks(NUM_TOKENS, KEPT)
    logits = problem.logits.clone().requires_grad_()
    log_chances = plackett_luce(logits, KEPT).log()
    slopes = torch.stack([torch.autograd.grad(value, logits, retain_graph=True)[0][0] for value in log_chances])
    losses = problem.masked(masks)
    place = (1 << torch.arange(NUM_TOKENS)).double()
    codes = {int(code): row for row, code in enumerate((masks @ place).tolist())}
    chosen = torch.zeros_like(gumbel).scatter(1, (problem.logits + gumbel).topk(KEPT).indices, 1.0)
    rows = torch.tensor([codes[int(code)] for code in (chosen @ place).tolist()])
    return (losses[:, None] * slopes)[rows]


def throttled_loss(problem: Problem, logits: Float64[Tensor, "1 N"], tau: float) -> Float64[Tensor, ""]:
    """DiffPrune's executed loss at fixed noise."""
    _, z = soft_topk(logits, KEPT, tau=tau, return_z=True)
    return problem.read(vp_noise(problem.x, z, noise=problem.noise))[0]


def hard_loss(problem: Problem, logits: Float64[Tensor, "1 N"], gumbel: Float64[Tensor, "1 N"], tau: float) -> Tensor:
    """Gumbel-STE's executed loss at fixed noise."""
    return problem.masked(gumbel_topk(logits, KEPT, tau=tau, noise=gumbel))[0]


def finite_difference_error(
    loss: Callable[[Float64[Tensor, "1 N"]], Float[Tensor, ""]], logits: Float64[Tensor, "1 N"]
) -> float:
    """|autograd - central differences| / |autograd| of a loss in its logits; 1 where the loss is flat."""
    at = logits.clone().requires_grad_()
    (claimed,) = torch.autograd.grad(loss(at), at)
    moves = torch.eye(logits.shape[1], dtype=torch.float64).unsqueeze(1) * STEP
    found = torch.stack([(loss(logits + move) - loss(logits - move)) / (2 * STEP) for move in moves]).detach()
    return float((claimed[0] - found).norm() / claimed.norm())


def against_exact(gradients: Float64[Tensor, "B N"], exact: Float64[Tensor, " N"]) -> dict[str, float | list[float]]:
    """How far the mean of many gradients is from the exact one."""
    mean, error = gradients.mean(0), gradients.std(0) / math.sqrt(len(gradients))
    away = mean - exact
    return {
        "relative_bias": float(away.norm() / exact.norm()),
        "relative_error": float(error.norm() / exact.norm()),
        "errors_away": float((away.abs() / error).max()),
        "cosine": float(F.cosine_similarity(mean, exact, dim=0)),
        "mean": mean.tolist(),
        "error": error.tolist(),
        "exact": exact.tolist(),
    }


def measure(bench: Bench, seed: int) -> Iterator[Cell]:
    """Both estimators against the exact gradient, both methods against finite differences."""
    problem = make_problem(seed)
    expected, exact = exact_gradient(problem)
    gumbel = draw_gumbel(bench.settings.draws, seed + 1)
    for tau in TAUS:
        losses, gradients = straight_through(problem, gumbel, tau)
        found = against_exact(gradients, exact)
        off = float((losses.mean() - expected).abs() / (losses.std() / math.sqrt(len(losses))))
        flat = finite_difference_error(lambda s, tau=tau: hard_loss(problem, s, gumbel[:1], tau), problem.logits)
        values = {**_split(found), "loss_errors_away": off, "finite_difference_error": flat}
        yield Cell({"estimator": "straight_through", "tau": tau}, seed, values)
        own = finite_difference_error(lambda s, tau=tau: throttled_loss(problem, s, tau), problem.logits)
        yield Cell({"estimator": "diffprune", "tau": tau}, seed, {"finite_difference_error": own})
    control = against_exact(score_function(problem, gumbel), exact)
    yield Cell({"estimator": "score_function"}, seed, _split(control))


def _split(found: dict[str, float | list[float]]) -> dict[str, Any]:
    """Numbers by name, and lists under `vectors`, which tables leave out."""
    vectors = {name: value for name, value in found.items() if isinstance(value, list)}
    return {**{name: value for name, value in found.items() if name not in vectors}, "vectors": vectors}


# --- from all seeds ---------------------------------------------------------------------------------------------------


def summarise(rows: Sequence[Row]) -> list[Row]:
    """Rows with mean and deviation over problems; the largest error of a gradient against finite differences."""
    done: list[Row] = []
    for row in sorted(rows, key=lambda row: (ORDER.index(row["estimator"]), -row.get("tau", 0.0))):
        summary: Row = {"n_seeds": len(row[SEEDS])}
        if biases := collect(row, "relative_bias"):
            summary["relative_bias"], summary["relative_bias_std"] = mean_and_spread(biases)
            summary["ci95"] = interval(biases, collect(row, "relative_error"))
            summary["cosine"] = mean_and_spread(collect(row, "cosine"))[0]
            summary["errors_away_min"], summary["errors_away_max"] = (
                min(collect(row, "errors_away")),
                max(collect(row, "errors_away")),
            )
        if errors := collect(row, "finite_difference_error"):
            summary["finite_difference_error"] = max(errors)
        done.append({**row, **summary})
    return done


ORDER = ("straight_through", "score_function", "diffprune")


def draw(rows: Sequence[Row], path: Path) -> None:
    """Every component of the gradient of the first problem, and the relative bias at each temperature."""
    surrogates = [row for row in rows if row["estimator"] == "straight_through"]
    seed = next(iter(surrogates[0][SEEDS]))
    with figure(path, 2) as (left, right):
        places = range(NUM_TOKENS)
        first = surrogates[0][SEEDS][seed]["vectors"]
        left.bar(places, first["exact"], 0.8, color="#cccccc", label="exact")
        for index, row in enumerate(surrogates):
            vectors = row[SEEDS][seed]["vectors"]
            left.errorbar(
                [place + 0.18 * (index - 1) for place in places],
                vectors["mean"],
                [1.96 * error for error in vectors["error"]],
                fmt="o",
                color=COLOURS["gumbel_ste"],
                alpha=1 - 0.3 * index,
                capsize=2,
                label=rf"straight-through, $\tau$ = {row['tau']:g}",
            )
        left.axhline(0, color="black", linewidth=0.6)
        left.set_xlabel("token")
        left.set_ylabel("gradient of the expected loss")
        left.margins(y=0.35)
        left.legend(ncols=2, loc="upper left")
        taus = [f"{row['tau']:g}" for row in surrogates]
        right.bar(
            taus,
            [100 * row["relative_bias"] for row in surrogates],
            0.5,
            yerr=[100 * row["relative_bias_std"] for row in surrogates],
            color=COLOURS["gumbel_ste"],
            capsize=2,
            label="straight-through",
        )
        control = next(row for row in rows if row["estimator"] == "score_function")
        right.axhline(100 * control["relative_bias"], color="black", linewidth=0.9, label="score function (control)")
        right.set_xlabel(r"temperature $\tau$ of the relaxation")
        right.set_ylabel("relative bias (%)")
        right.margins(y=0.35)
        right.legend(loc="upper left")
