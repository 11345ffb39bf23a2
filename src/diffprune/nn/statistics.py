"""Mean and deviation of each channel of the encoder's features, for noise that looks like them."""

from collections.abc import Iterable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn


class FeatureStatistics(nn.Module):
    """Buffers [W] that `calibrate` fills once from data and every step reads."""

    mean: Tensor
    std: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("std", torch.zeros(width))  # all zero: not calibrated yet
        self._is_calibrated = False

    def forward(self, num_channels: int) -> tuple[Float[Tensor, " D"], Float[Tensor, " D"]]:
        """Mean and deviation of each channel of a token: of its patches' channels, once for each patch."""
        if not self._is_calibrated:  # read once and remembered: reading a device stalls it
            self._is_calibrated = bool(self.std.any())
        if not self._is_calibrated:
            raise ValueError("noise='matched' is not calibrated; call calibrate() with tokens of some training images")
        group = num_channels // len(self.mean)
        return self.mean.repeat(group), self.std.repeat(group)

    @torch.no_grad()
    def calibrate(self, batches: Iterable[tuple[Float[Tensor, "_ _ D"], Bool[Tensor, "_ _"]]]) -> None:
        """Take both from the real tokens of every (x, mask); sums are kept in float64, so batches may be many."""
        count = 0
        total, squares = torch.zeros(2, len(self.mean), dtype=torch.float64, device=self.mean.device)
        for x, mask in batches:
            patches = x[mask].unflatten(-1, (-1, len(self.mean))).flatten(0, 1).to(total)  # [P, W]
            count += len(patches)
            total, squares = total + patches.sum(0), squares + patches.square().sum(0)
        if count == 0:
            raise ValueError("calibrate() was given no visual token; give it some training images")
        mean = total / count
        self.mean.copy_(mean)
        self.std.copy_((squares / count - mean.square()).clamp(min=0).sqrt())
