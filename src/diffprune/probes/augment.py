"""Random crops, flips, colours and mixtures of a batch of pictures, all on the device they are on."""

import math
import random

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torch.nn import functional as F

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet


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

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(len(pixels), generator=generator, device=pixels.device)

    x = pixels.float() / 255
    area, aspect = uniform(min_area, 1.0), uniform(-math.log(4 / 3), math.log(4 / 3)).exp()
    width, height = (area * aspect).sqrt().clamp(max=1.0), (area / aspect).sqrt().clamp(max=1.0)
    theta = x.new_zeros(len(x), 2, 3)
    theta[:, 0, 0] = width * torch.where(uniform(0.0, 1.0) < 0.5, -1.0, 1.0)
    theta[:, 1, 1] = height
    theta[:, 0, 2], theta[:, 1, 2] = (1 - width) * uniform(-1.0, 1.0), (1 - height) * uniform(-1.0, 1.0)
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    x = F.grid_sample(x, grid, align_corners=False, padding_mode="reflection")
    brightness, contrast, saturation = (uniform(0.6, 1.4)[:, None, None, None] for _ in range(3))
    x = x * brightness
    x = (x - x.mean((1, 2, 3), keepdim=True)) * contrast + x.mean((1, 2, 3), keepdim=True)
    grey = x.mean(1, keepdim=True)
    return ((x - grey) * saturation + grey).clamp(0, 1)


def mix(
    x: Float[Tensor, "B 3 h w"], labels: Int[Tensor, " B"], num_classes: int, seed: int
) -> tuple[Float[Tensor, "B 3 h w"], Float[Tensor, "B classes"]]:
    """Mixup or CutMix, each half the time: every picture blended with, or pasted into by, another of the batch."""
    own = random.Random(seed)
    targets = F.one_hot(labels, num_classes).to(x.dtype)
    if own.random() < 0.5:
        share = own.betavariate(0.8, 0.8)
        mixed = share * x + (1 - share) * x.flip(0)
    else:
        height, width = x.shape[-2:]
        cut = math.sqrt(1 - own.betavariate(1.0, 1.0))
        rows, columns = round(cut * height), round(cut * width)
        top, left = own.randint(0, height - rows), own.randint(0, width - columns)
        mixed = x.clone()
        mixed[:, :, top : top + rows, left : left + columns] = x.flip(0)[:, :, top : top + rows, left : left + columns]
        share = 1 - rows * columns / (height * width)
    return mixed, share * targets + (1 - share) * targets.flip(0)
