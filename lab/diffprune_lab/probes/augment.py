"""Random crops, flips, colours and mixtures of a batch of pictures, all on the device they are on."""

import math
import random

import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn import functional as F

from diffprune_lab.probes.data import inside_at

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet
ASPECT = math.log(4 / 3)  # of a crop, at most


def normalise(
    pixels: UInt8[Tensor, "B 3 h w"] | Float[Tensor, "B 3 h w"],
    mean: tuple[float, ...] = MEAN,
    std: tuple[float, ...] = STD,
) -> Float[Tensor, "B 3 h w"]:
    """Pixels as a classifier takes them, from 0 to 255 or, if they are floats already, from 0 to 1."""
    x = pixels if pixels.is_floating_point() else pixels.float() / 255
    return (x - x.new_tensor(mean)[:, None, None]) / x.new_tensor(std)[:, None, None]


def augment(
    pixels: UInt8[Tensor, "B 3 h w"], generator: torch.Generator, *, min_area: float = 0.35
) -> Float[Tensor, "B 3 h w"]:
    """Each picture cropped (at least `min_area` of it), mirrored half the time and recoloured, from 0 to 1."""
    crops = draw_crops(len(pixels), generator, min_area=min_area)
    return recolour(crop(pixels, crops), generator)


def draw_crops(count: int, generator: torch.Generator, *, min_area: float = 0.35) -> Float[Tensor, "B 2 3"]:
    """For each picture a part of at least `min_area`, mirrored half the time, as the affine map `crop` takes."""
    area, aspect = _uniform(count, min_area, 1.0, generator), _uniform(count, -ASPECT, ASPECT, generator).exp()
    width, height = (area * aspect).sqrt().clamp(max=1.0), (area / aspect).sqrt().clamp(max=1.0)
    theta = area.new_zeros(count, 2, 3)
    theta[:, 0, 0] = width * torch.where(_uniform(count, 0.0, 1.0, generator) < 0.5, -1.0, 1.0)
    theta[:, 1, 1] = height
    theta[:, 0, 2] = (1 - width) * _uniform(count, -1.0, 1.0, generator)
    theta[:, 1, 2] = (1 - height) * _uniform(count, -1.0, 1.0, generator)
    return theta


def crop(pixels: UInt8[Tensor, "B 3 h w"], crops: Float[Tensor, "B 2 3"]) -> Float[Tensor, "B 3 h w"]:
    """Those parts, stretched to the whole size, from 0 to 1."""
    grid = F.affine_grid(crops, list(pixels.shape), align_corners=False)
    return F.grid_sample(pixels.float() / 255, grid, align_corners=False, padding_mode="reflection")


def recolour(x: Float[Tensor, "B 3 h w"], generator: torch.Generator) -> Float[Tensor, "B 3 h w"]:
    """Each picture with another brightness, contrast and saturation."""
    brightness, contrast, saturation = (_uniform(len(x), 0.6, 1.4, generator)[:, None, None, None] for _ in range(3))
    x = x * brightness
    x = (x - x.mean((1, 2, 3), keepdim=True)) * contrast + x.mean((1, 2, 3), keepdim=True)
    grey = x.mean(1, keepdim=True)
    return ((x - grey) * saturation + grey).clamp(0, 1)


def inside_cropped(boxes: Float[Tensor, "B 4"], crops: Float[Tensor, "B 2 3"], side: int) -> Float[Tensor, "B N"]:
    """Which cells of a side x side grid over the cropped pictures have their centre inside each box: 1, else 0."""
    places = (F.affine_grid(crops, [len(crops), 1, side, side], align_corners=False).flatten(1, 2) + 1) / 2  # [B, N, 2]
    return inside_at(boxes, places).float()


def draw_mixture(side: int, seed: int, device: torch.device) -> Float[Tensor, "side side"]:
    """Share of each pixel that stays a picture's own: Mixup, the same everywhere, or CutMix, 0 in a rectangle."""
    own = random.Random(seed)
    if own.random() < 0.5:
        return torch.full((side, side), own.betavariate(0.8, 0.8), device=device)
    cut = round(math.sqrt(1 - own.betavariate(1.0, 1.0)) * side)
    top, left = own.randint(0, side - cut), own.randint(0, side - cut)
    shares = torch.ones(side, side, device=device)
    shares[top : top + cut, left : left + cut] = 0
    return shares


def mix(values: Float[Tensor, "B ..."], own: Float[Tensor, "..."]) -> Float[Tensor, "B ..."]:
    """Every entry of the batch mixed with another one of it, the one that stands as far from the end."""
    return own * values + (1 - own) * values.flip(0)


def _uniform(count: int, low: float, high: float, generator: torch.Generator) -> Float[Tensor, " B"]:
    return low + (high - low) * torch.rand(count, generator=generator, device=generator.device)
