"""How far the throttled loss can be trusted at a temperature, before anything is trained.

DiffPrune descends along the throttled loss, which need not prefer the ranking that is best to drop by: at a high
temperature all tokens weigh about the same. Here a few captions are read with many rankings, by random directions of
the features and their opposites, once with tokens dropped and once with tokens throttled. Where both losses agree on
which rankings are good, there is something to learn at that temperature.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from diffprune.backbones.prompts import Batch
from diffprune.config import RunConfig
from diffprune.model import PrunedVLM
from diffprune.nn.scorer import standardise
from diffprune.train.sampler import noise_generator
from diffprune.types import Budget, VisualTokens

BATCH, RANKINGS = 4, 12
NOISE = "agreement"  # in place of a step: the noise is the same for every ranking and temperature


class FixedScorer(nn.Module):
    """A scorer that returns these logits, whatever its input."""

    def __init__(self, logits: Float[Tensor, "B N"]) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, x: Tensor, **_: Any) -> Float[Tensor, "B N"]:
        return self.logits


@contextmanager
def fixed_logits(method: Any, logits: Float[Tensor, "B N"]) -> Iterator[None]:
    """Make a method with a scorer rank by these logits, whatever its tokens."""
    own, method.scorer = method.scorer, FixedScorer(logits)
    try:
        yield
    finally:
        method.scorer = own


@dataclass(frozen=True, slots=True, kw_only=True)
class Captions:
    """A few pictures with answers, encoded once.

    Args:
        ids: Of the samples; with `seed` they decide the noise.
        remove_below: As in the run's training.
    """

    batch: Batch
    tokens: VisualTokens
    ids: Sequence[int]
    seed: int
    remove_below: float

    @classmethod
    def of(cls, samples: Sequence[Any], batch: Batch, tokens: VisualTokens, config: RunConfig) -> "Captions":
        ids = [sample.id for sample in samples]
        return cls(batch=batch, tokens=tokens, ids=ids, seed=config.seed, remove_below=config.remove_below)

    @torch.no_grad()
    def loss(self, vlm: PrunedVLM, logits: Float[Tensor, "B N"], keep: float, tau: float | None) -> float:
        """The loss with tokens ranked by these logits and throttled; or dropped, where there is no temperature."""
        device = self.tokens.x.device
        counts = torch.tensor([Budget(keep).count(int(n)) for n in self.tokens.counts.tolist()], device=device)
        options: dict[str, Any] = {"tokens": self.tokens, "keep": counts}
        if tau is None:
            options["hard"] = True
        else:
            noise = [noise_generator(device, self.seed, NOISE, one) for one in self.ids]
            options |= {"tau": tau, "generator": noise, "remove_below": self.remove_below}
        with fixed_logits(vlm.method, logits):
            return vlm.loss(self.batch, **options).item()


def agreement(
    vlm: PrunedVLM, captions: Sequence[Captions], keep: float, taus: Iterable[float], *, rankings: int = RANKINGS
) -> Iterator[tuple[float, float]]:
    """Each temperature with the correlation of throttled and hard loss over rankings, one after the other.

    Losses are compared within captions: what makes one caption harder than another is no matter of ranking.
    """
    ranked = random_rankings([one.tokens for one in captions], rankings, captions[0].seed)

    def losses(tau: float | None) -> Float[Tensor, "C R"]:
        return torch.tensor(
            [[one.loss(vlm, logits, keep, tau) for logits in own] for one, own in zip(captions, ranked, strict=True)]
        )

    hard = losses(None)
    for tau in taus:
        yield tau, correlation(hard, losses(tau))


def random_rankings(tokens: Sequence[VisualTokens], count: int, seed: int) -> list[list[Float[Tensor, "B N"]]]:
    """For each batch of pictures, random directions of the features as logits, and their opposites.

    Every batch has its own directions, so that more of them are tried. Features are standardised by channel first, or
    the channel with the largest values would decide every ranking.
    """
    real = torch.cat([one.x[one.mask] for one in tokens]).float()
    mean, deviation = real.mean(0), real.std(0).clamp(min=1e-6)
    generator = torch.Generator().manual_seed(seed)
    ranked = []
    with torch.autocast(real.device.type, enabled=False):  # in bfloat16 a fifth of them would tie
        for one in tokens:
            drawn = torch.randn(-(-count // 2), real.shape[-1], generator=generator).to(real.device)
            x = (one.x.float() - mean) / deviation
            ranked.append([standardise(x @ direction, one.mask) for direction in torch.cat([drawn, -drawn])[:count]])
    return ranked


def correlation(first: Float[Tensor, "C R"], second: Float[Tensor, "C R"]) -> float:
    """The correlation of two tables of losses, each row around its own mean; 0 where one of them does not vary."""
    first, second = (table.double() - table.double().mean(-1, keepdim=True) for table in (first, second))
    size = float(first.norm() * second.norm())
    return float((first * second).sum()) / size if size > 0 and math.isfinite(size) else 0.0
