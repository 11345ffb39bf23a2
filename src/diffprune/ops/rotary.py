"""Rotary positions."""

import torch
from jaxtyping import Float
from torch import Tensor

from diffprune.ops.arguments import checked


@checked
def rotate(
    x: Float[Tensor, "B H T E"], cos: Float[Tensor, "#B T E"], sin: Float[Tensor, "#B T E"]
) -> Float[Tensor, "B H T E"]:
    """`x` turned by its position's angles: channel i turns with channel i + E/2.

    Computed in the wider precision of `x` and the tables.
    """
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]
