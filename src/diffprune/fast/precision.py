"""Linear maps in 8 bits: weights converted once, inputs as they come, one scale for each row of both.

Products that take a scale for each row are slow where there are few rows (a prefill of 104: 3.2 ms of products in a 7B
model instead of 2.4), so the product itself is of the 8-bit numbers as they are, and rows are scaled behind it, in the
kernel of whatever comes next.

A prefill of a pruned prompt takes little longer than reading the weights, and eight bits are half of sixteen. Only the
maps of decoder layers are converted: embeddings, norms, attention, cache and head stay in the model's precision.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

PRECISIONS = ("model", "fp8")
EIGHT_BITS = torch.float8_e4m3fn
LARGEST = torch.finfo(EIGHT_BITS).max
SMALLEST_SCALE = 1e-12  # of a row of zeros
MULTIPLE = 16  # of which the widths of an 8-bit product must be multiples

Linear = tuple[Tensor, Tensor | None]  # weight and bias


class Scaled(NamedTuple):
    """A linear map in 8 bits: `scale[0, n] * weight[n]` are its rows."""

    weight: Float[Tensor, "N K"]
    bias: Float[Tensor, " N"] | None
    scale: Float[Tensor, "1 N"]
    one: Float[Tensor, ""]  # the scale of the product itself, kept as its address must not change


Map = Linear | Scaled


def to_eight_bits(x: Float[Tensor, "M K"]) -> tuple[Tensor, Float[Tensor, "M 1"]]:
    """Rows in 8 bits, each over the whole range, and what to multiply them by to have them back."""
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp_min(SMALLEST_SCALE) / LARGEST
    return (wide / scale).clamp(-LARGEST, LARGEST).to(EIGHT_BITS), scale


def scaled_map(linear: Map) -> Map:
    """The map in 8 bits; as it is where it is so already, or its widths are none that such a product takes."""
    if isinstance(linear, Scaled):
        return linear
    weight, bias = linear
    if weight.shape[0] % MULTIPLE or weight.shape[1] % MULTIPLE:
        return linear
    small, scale = to_eight_bits(weight)
    return Scaled(small, bias, scale.t().contiguous(), scale.new_ones(()))


def scaled_product(x: Float[Tensor, "*B K"], linear: Scaled) -> Float[Tensor, "*B N"]:
    """What the map makes of x, in x's own precision."""
    small, scale = to_eight_bits(x.flatten(0, -2))
    # In bfloat16, as sums of products of numbers up to 448 are beyond float16.
    out = torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]  # there is no public name yet
        small, linear.weight.t(), scale_a=linear.one, scale_b=linear.one, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    out = (out.float() * scale * linear.scale).to(x.dtype).unflatten(0, x.shape[:-1])
    return out if linear.bias is None else out + linear.bias


def why_not_eight_bits(device: torch.device) -> str:
    """Why such products cannot run on this device; empty where they can."""
    if device.type != "cuda":
        return f"{device.type} has no 8-bit matrix products that are faster"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        name = torch.cuda.get_device_name(device)
        return f"{name} has no 8-bit matrix products, which cards have from compute capability 8.9 on"
    try:
        probe = torch.ones(MULTIPLE, MULTIPLE, device=device)
        linear = scaled_map((probe, None))
        assert isinstance(linear, Scaled)
        scaled_product(probe, linear)
    except (AttributeError, RuntimeError, ValueError) as error:
        return f"torch {torch.__version__} cannot ({str(error).partition(chr(10))[0]})"
    return ""
