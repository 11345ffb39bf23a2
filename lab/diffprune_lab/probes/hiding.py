"""Which patches a classifier in training is shown while the others are hidden (PatchDropout).

A classifier that has seen random parts alone takes any other choice for something new, and then random choice beats
every pruner. So parts are near: what lies around a random place, and it matters much which place. Or they are of any
make-up: each picture's is drawn on a scale of its own between scattered, connected, of one colour and rich or poor in
contrast.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

SHOWN = (4, 16)  # one patch of so many is shown, in turns; each number is another shape to compile
BLOBS = (2, 3, 4, 6, 8)  # across the picture: how large connected parts are
TASTE = 3.0  # the larger, the more a part is of one kind alone
PARTS = ("any", "near")
RAGGED = 0.3  # how far the rim of a near part departs from a circle, in logarithms of the squared distance


def draw_shown(
    x: Float[Tensor, "B 3 h w"], *, patch: int, count: int, generator: torch.Generator, parts: str
) -> Int[Tensor, "B shown"]:
    """Raster indices of the `count` patches that each picture shows, in no order."""
    num_images, side = len(x), x.shape[-1] // patch
    if parts == "near":
        return _draw_near(num_images, side, count, generator)

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
    kinds = torch.stack([_standard(part) for part in (scattered, connected, coloured, rich_or_poor)], -1)
    return (kinds * uniform(1, 4) ** TASTE).sum(-1).topk(count, -1, sorted=False).indices


def _draw_near(num_images: int, side: int, count: int, generator: torch.Generator) -> Int[Tensor, "B shown"]:
    """The patches nearest to a place of the picture, a little ragged."""
    device = generator.device
    place = side * torch.rand(num_images, 2, 1, generator=generator, device=device)
    centres = torch.arange(side, device=device) + 0.5
    cells = torch.stack(torch.meshgrid(centres, centres, indexing="ij")).flatten(1)  # [2, N]
    far = (cells - place).square().sum(1)  # [B, N]
    ragged = torch.randn(far.shape, generator=generator, device=device).mul(RAGGED).exp()
    return (far * ragged).topk(count, -1, largest=False, sorted=False).indices


def _stretch(coarse: Float[Tensor, "B 1 size size"], side: int) -> Float[Tensor, "B N"]:
    return F.interpolate(coarse, size=(side, side), mode="bicubic", align_corners=False).flatten(1)


def _standard(values: Float[Tensor, "B N"]) -> Float[Tensor, "B N"]:
    """Mean 0 and deviation 1 over a picture's patches."""
    return (values - values.mean(-1, keepdim=True)) / values.std(-1, keepdim=True).clamp(min=1e-6)
