"""What goes into a step of a run and what comes out of it: samples as the model takes them, and values on their way."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from diffprune.backbones.prompts import Batch
from diffprune.train.feed import Broken, Sample


@dataclass(frozen=True, slots=True)
class Part:
    """The input of one forward pass.

    Args:
        samples: Of the rows that can be used.
        broken: The other rows.
        batch: The samples as the model takes them; None where that is left to the pass.
        num_targets: Answer tokens of the samples.
    """

    samples: list[Sample]
    broken: list[Broken]
    batch: Batch | None
    num_targets: int


class HostCopy:
    """Values of a tensor, on their way to the host while the device goes on."""

    def __init__(self, values: Float[Tensor, " V"]) -> None:
        self._values, self._there = values, None
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._there = torch.cuda.Event()
            self._there.record()

    def read(self) -> list[float]:
        """The values, as soon as they are there."""
        if self._there is not None:
            self._there.synchronize()
        return self._values.tolist()


@dataclass(frozen=True, slots=True)
class Taken:
    """A step that was taken, or queued.

    Args:
        asked: Whether any process was asked to stop.
        values: Loss, entropy, number of samples and norm of the gradient, over all processes.
    """

    step: int
    tau: float
    lr: float
    asked: bool
    values: HostCopy
