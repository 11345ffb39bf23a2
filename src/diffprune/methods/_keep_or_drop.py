"""DynamicViT's choice, each token by itself: what the methods that took it over have in common.

A predictor gives every token the log-probabilities of being kept and of being dropped. Training draws one of the two
with Gumbel noise, hard forward and soft backward, and a penalty holds the share that is kept near K / N.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from diffprune.nn.blocks import zero_padding
from diffprune.nn.scorer import exact_linear
from diffprune.ops import gumbel_keep
from diffprune.ops.noise import Generators, draw_gumbel


class KeepHead(nn.Module):
    """Log-probabilities of keeping and dropping, from half of a token's channels and the image's mean of the others.

    Args:
        width: Channels of a token; the layers narrow from it to a half, a quarter, and 2.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        half, quarter = max(1, width // 2), max(1, width // 4)
        self.layers = nn.Sequential(
            nn.Linear(width, half), nn.GELU(), nn.Linear(half, quarter), nn.GELU(), nn.Linear(quarter, 2)
        )

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights, and so of what goes in."""
        return next(self.parameters()).dtype

    def forward(self, x: Float[Tensor, "B N W"], mask: Bool[Tensor, "B N"]) -> Float[Tensor, "B N 2"]:
        *inner, last = self.layers
        out = local_and_global(x, mask)
        for layer in inner:
            out = layer(out)
        assert isinstance(last, nn.Linear)
        return exact_linear(out, last).log_softmax(-1)


def local_and_global(x: Float[Tensor, "B N W"], mask: Bool[Tensor, "B N"]) -> Float[Tensor, "B N W"]:
    """The first half of each token's channels, and for the rest their mean over the real tokens of the row."""
    half = x.shape[-1] // 2
    total = zero_padding(x[..., half:], mask).sum(1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    rest = (total / mask.sum(-1).clamp(min=1)[:, None, None]).to(x.dtype)
    return torch.cat([x[..., :half], rest.expand(-1, x.shape[1], -1)], dim=-1)


def draw_keep(
    log_probs: Float[Tensor, "B N 2"], mask: Bool[Tensor, "B N"], *, tau: float | Tensor, generator: Generators
) -> Float[Tensor, "B N"]:
    """1 for a token that is drawn to be kept and 0 for one that is not, with the gradient of the soft choice."""
    noise = torch.stack([draw_gumbel(log_probs[..., 0], mask, generator) for _ in range(2)], dim=-1)
    return gumbel_keep(log_probs, tau=tau, noise=noise).masked_fill(~mask, 0.0)


def ratio_penalty(chosen: Float[Tensor, "B N"], k: Int[Tensor, " B"], mask: Bool[Tensor, "B N"]) -> Float[Tensor, " B"]:
    """Squared distance of the share that is kept from K / N, of each row."""
    count = mask.sum(-1).clamp(min=1)
    return (chosen.sum(-1) / count - k / count).square()


def log_odds(log_probs: Float[Tensor, "B N 2"]) -> Float[Tensor, "B N"]:
    """How much likelier a token is kept than dropped: ranks like the probability, without ties near 0 and 1."""
    return log_probs[..., 0] - log_probs[..., 1]
