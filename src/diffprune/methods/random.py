"""Keep K tokens at random: the control every method must beat."""

import hashlib
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from diffprune.methods.base import Card, ScoringPruner
from diffprune.registry import METHODS
from diffprune.types import VisualTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomOptions:
    """Args:
    seed: Another seed is another draw; report the mean and deviation over several.
    """

    seed: int = 42


@METHODS.register("random")
class Random(ScoringPruner):
    """Uniform without replacement, drawn per image from (seed, hash of its pixels): the batch around it has no say."""

    card = Card(idea="keeps K tokens drawn uniformly without replacement, seeded per image")
    Options: ClassVar[type] = RandomOptions

    def score(self, tokens: VisualTokens) -> Float[Tensor, "B N"]:
        counts = [tokens.x.shape[1]] * len(tokens) if tokens.is_full else tokens.counts.tolist()
        logits = torch.zeros(tokens.mask.shape)
        for row, count in enumerate(counts):
            image = _feature_hash(tokens, row) if tokens.seeds is None else tokens.seeds[row]
            generator = torch.Generator().manual_seed(_digest(f"{self.options.seed}:{image}".encode()))
            own = torch.rand(count, generator=generator)
            if tokens.is_full:
                logits[row] = own
            else:
                logits[row, tokens.mask[row].cpu()] = own
        return logits.to(tokens.x.device)


def _feature_hash(tokens: VisualTokens, row: int) -> int:
    """Stands in for the pixels' hash where only features are given."""
    real = tokens.x[row, tokens.mask[row]].detach().to("cpu", torch.float32).contiguous()
    return _digest(real.numpy().tobytes())


def _digest(data: bytes) -> int:
    """63 bits, the same in every process (Python's own hash is not)."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") >> 1
