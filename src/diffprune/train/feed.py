"""What a run trains on: numbered samples, and how they become the input of a model.

A feed answers one question: which samples belong to these positions of the run? The answer follows from the config and
the position alone, so a run that is resumed, or split over several processes, reads what the unbroken one would.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Bool
from torch import Tensor

from diffprune.backbones.prompts import Batch, Exchange
from diffprune.model import PrunedVLM
from diffprune.types import VisualTokens


@dataclass(frozen=True, slots=True)
class Sample:
    """A picture, what is asked about it, and the answer to learn.

    Args:
        picture: As `PIL.Image.Image`, or as anything that the feed's own `prepare` or `encode` makes pixels of.
        later: Questions and answers that follow in the same conversation.
    """

    id: int
    picture: Any
    question: str
    answer: str
    later: tuple[Exchange, ...] = ()

    @property
    def answers(self) -> list[str]:
        """Every answer of the conversation, in order."""
        return [self.answer, *(answer for _, answer in self.later)]


@dataclass(frozen=True, slots=True)
class Broken:
    """A row that cannot be used, and why."""

    id: int
    reason: str


class Feed(ABC):
    """Samples by their position in the run, those held out, and how they become the input of a model.

    The last three methods do what pictures need; a feed of something else has its own.
    """

    @property
    @abstractmethod
    def per_epoch(self) -> int | None:
        """Training samples of one pass; None of an endless feed."""

    @abstractmethod
    def validation(self) -> list[Sample | Broken]:
        """The held-out samples; every call gives equal ones."""

    @abstractmethod
    def read(self, positions: range, wanted: Sequence[int]) -> dict[int, Sample | Broken]:
        """The wanted ones of these positions; streams pass over the others unread."""

    def prepare(self, vlm: PrunedVLM, samples: Sequence[Sample]) -> Batch | None:
        """The samples as the model takes them, made on the CPU while a step runs; None leaves it all to `encode`."""
        return prepare_pictures(vlm, samples)

    def encode(
        self, vlm: PrunedVLM, samples: Sequence[Sample], batch: Batch | None = None
    ) -> tuple[Batch, VisualTokens]:
        """The samples as the model takes them, and their visual tokens.

        Args:
            batch: From `prepare`, where that was called before.
        """
        batch = self.prepare(vlm, samples) if batch is None else batch
        assert batch is not None, "a feed whose prepare leaves it to encode has an encode of its own"
        tokens = vlm.encode(batch)
        assert tokens is not None
        return batch, tokens

    def regions(self, vlm: PrunedVLM, tokens: VisualTokens, samples: Sequence[Sample]) -> Bool[Tensor, "B N"] | None:
        """True at tokens that see what the answers speak of; None where the data has no regions."""
        return None


def prepare_pictures(vlm: PrunedVLM, samples: Sequence[Sample], pictures: Sequence[Any] | None = None) -> Batch:
    """A batch of samples with their answers.

    Args:
        pictures: In place of the samples' own.
    """
    return vlm.prepare(
        [sample.picture for sample in samples] if pictures is None else list(pictures),
        [sample.question for sample in samples],
        [sample.answer for sample in samples],
        later=[sample.later for sample in samples],
    )
