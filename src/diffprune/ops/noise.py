"""Random numbers in the shape of a tensor: normal and Gumbel, from one generator for all rows or from one for each."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Generators = torch.Generator | Sequence[torch.Generator] | None


def draw_normal(
    like: Float[Tensor, "B *rest"], mask: Bool[Tensor, "B N"] | None, generator: Generators
) -> Float[Tensor, "B *rest"]:
    """Standard normal noise in the shape of `like`, float32."""

    def normal(shape: Sequence[int], device: torch.device, own: torch.Generator | None) -> Tensor:
        return torch.randn(shape, generator=own, device=device, dtype=torch.float32)

    return _draw(normal, like, mask, generator)


def draw_gumbel(
    like: Float[Tensor, "B *rest"], mask: Bool[Tensor, "B N"] | None, generator: Generators
) -> Float[Tensor, "B *rest"]:
    """Standard Gumbel noise in the shape of `like`, float32."""

    def gumbel(shape: Sequence[int], device: torch.device, own: torch.Generator | None) -> Tensor:
        waits = torch.empty(shape, device=device, dtype=torch.float64).exponential_(generator=own)
        return -waits.log().float()  # in float64 no wait is 0

    return _draw(gumbel, like, mask, generator)


def _draw(
    sample: Callable[[Sequence[int], torch.device, torch.Generator | None], Tensor],
    like: Float[Tensor, "B *rest"],
    mask: Bool[Tensor, "B N"] | None,
    generator: Generators,
) -> Float[Tensor, "B *rest"]:
    """Noise from one generator for all, or from one per row: then a row's real tokens draw alone, padding gets 0.

    So a row draws the same in any batch, beside any other. Numbers are drawn where the generator lives: a CPU generator
    gives the same noise for every device. None is torch's own.
    """
    if generator is None or isinstance(generator, torch.Generator):
        home = like.device if generator is None else generator.device
        return sample(like.shape, home, generator).to(like.device)
    if len(generator) != len(like):
        raise ValueError(f"{len(generator)} generators for {len(like)} rows; give one per row, or one for all")
    drawn = torch.zeros(like.shape, device=like.device)
    # One wait for the device, not one per row.
    whole = [True] * len(like) if mask is None else [bool(row) for row in mask.all(-1).cpu()]
    for row, own in enumerate(generator):
        if mask is None or whole[row]:
            drawn[row] = sample(like.shape[1:], own.device, own).to(like.device)
        else:
            real = mask[row].nonzero().squeeze(-1)
            drawn[row, real] = sample((len(real), *like.shape[2:]), own.device, own).to(like.device)
    return drawn
