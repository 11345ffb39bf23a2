"""Which patches a classifier in training is shown while the others are hidden (PatchDropout): parts of any make-up.

A classifier that has seen random parts alone takes any other choice for something new, and then random choice beats
every pruner. So each picture's part is drawn on a scale of its own between scattered, connected, of one colour and rich
or poor in contrast. No pruner's choice is among them.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

SHOWN = (4, 16)  # one patch of so many is shown, in turns; each number is another shape to compile
BLOBS = (2, 3, 4, 6, 8)  # across the picture: how large connected parts are
TASTE = 3.0  # the larger, the more a part is of one kind alone


def draw_shown(
    x: Float[Tensor, "B 3 h w"], *, patch: int, count: int, generator: torch.Generator
) -> Int[Tensor, "B shown"]:
    """Raster indices of the `count` patches that each picture shows, in no order."""
    num_images, side = len(x), x.shape[-1] // patch

    def draw(*shape: int) -> Tensor:
        return torch.randn(num_images, *shape, generator=generator, device=x.device)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(num_images, *shape, generator=generator, device=x.device)

    scattered = draw(side * side)
    blobs = torch.stack([_stretch(draw(1, size, size), side) for size in BLOBS], 1)  # [B, sizes, N]
    connected = blobs[torch.arange(num_images, device=x.device), (uniform() * len(BLOBS)).long()]
    colours = F.avg_pool2d(x, patch)  # [B, 3, side, side]
    coloured = (draw(3, 1, 1) * colours).sum(1).flatten(1)
    contrast = (F.avg_pool2d(x * x, patch) - colours * colours).clamp(min=0).sum(1).sqrt().flatten(1)
    rich_or_poor = torch.where(uniform(1) < 0.5, contrast, -contrast)
    parts = torch.stack([_standard(part) for part in (scattered, connected, coloured, rich_or_poor)], -1)
    return (parts * uniform(1, 4) ** TASTE).sum(-1).topk(count, -1, sorted=False).indices


def _stretch(coarse: Float[Tensor, "B 1 size size"], side: int) -> Float[Tensor, "B N"]:
    return F.interpolate(coarse, size=(side, side), mode="bicubic", align_corners=False).flatten(1)


def _standard(values: Float[Tensor, "B N"]) -> Float[Tensor, "B N"]:
    """Mean 0 and deviation 1 over a picture's patches."""
    return (values - values.mean(-1, keepdim=True)) / values.std(-1, keepdim=True).clamp(min=1e-6)
