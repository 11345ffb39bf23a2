"""Which patches a classifier in training is shown while the others are hidden (PatchDropout).

A classifier that has seen random parts alone takes any other choice for something new, and then random choice beats
every pruner. So parts are near: what lies around a random place, and it matters much which place.
"""

import torch
from jaxtyping import Int
from torch import Tensor

SHOWN = (4, 16)  # one patch of so many is shown, in turns; each number is another shape to compile
PARTS = "near"  # what a training's record calls these parts
RAGGED = 0.3  # how far the rim of a part departs from a circle, in logarithms of the squared distance


def draw_shown(num_images: int, side: int, count: int, generator: torch.Generator) -> Int[Tensor, "B shown"]:
    """Raster indices, in no order, of the `count` patches of side x side nearest to a random place, a little ragged."""
    device = generator.device
    place = side * torch.rand(num_images, 2, 1, generator=generator, device=device)
    centres = torch.arange(side, device=device) + 0.5
    cells = torch.stack(torch.meshgrid(centres, centres, indexing="ij")).flatten(1)  # [2, N]
    far = (cells - place).square().sum(1)  # [B, N]
    ragged = torch.randn(far.shape, generator=generator, device=device).mul(RAGGED).exp()
    return (far * ragged).topk(count, -1, largest=False, sorted=False).indices
