"""What families with a ViT tower share: the attention its tokens receive, and where its patches look."""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from diffprune.ops.transfer import to_device


def encoder_layers(tower: Any) -> Any:
    """The stack of blocks of a vision tower, with or without its outer wrapper."""
    inner = getattr(tower, "vision_model", tower)
    inner = getattr(inner, "encoder", inner)
    return inner.layers if hasattr(inner, "layers") else inner.layer


def layer_attention(
    tower: Any, hidden: Sequence[Tensor], feature_layer: int, *, has_cls: bool = True
) -> tuple[Float[Tensor, "B P"], Float[Tensor, "B P E"]]:
    """Attention each position receives in the block that made the features, mean over heads, and the block's keys."""
    layers = encoder_layers(tower)
    index = feature_layer % (len(layers) + 1) - 1  # hidden[i + 1] is the output of block i
    return block_attention(layers[index], hidden[index], has_cls=has_cls)


def block_attention(
    block: Any, x: Float[Tensor, "B P D"], *, has_cls: bool = True
) -> tuple[Float[Tensor, "B P"], Float[Tensor, "B P E"]]:
    """Attention each position receives in one block, mean over heads, and the block's keys, from what enters it.

    The row of [CLS], or where there is none the mean over all queries. Only the rows needed are computed, from the
    block's own projections, so the tower itself runs whatever attention it likes.
    """
    attention = block.self_attn if hasattr(block, "self_attn") else block.attention
    x = block.layer_norm1(x) if hasattr(block, "layer_norm1") else block.layernorm_before(x)
    if hasattr(attention, "q_proj"):
        query, key = attention.q_proj(x), attention.k_proj(x)
    else:  # an engine has made one of the three
        query, key = (part.contiguous() for part in attention.qkv_proj(x).chunk(3, dim=-1)[:2])
    if hasattr(attention, "q_norm"):
        query, key = attention.q_norm(query), attention.k_norm(key)
    width = attention.head_dim
    q = (query[:, :1] if has_cls else query).unflatten(-1, (-1, width)).transpose(1, 2)  # [B, H, Q, E / H]
    k = key.unflatten(-1, (-1, width)).transpose(1, 2)
    total = torch.zeros(x.shape[:2], device=x.device, dtype=torch.float32)
    for rows in q.split(256, dim=2):  # never a whole P x P map
        weights = torch.softmax((rows @ k.transpose(-1, -2)).float() * width**-0.5, dim=-1)
        total += weights.mean(1).sum(1)
    return total / q.shape[2], key


def crop_boxes(
    image_processor: Any, sizes: Sequence[tuple[int, int]], side: int, device: torch.device
) -> Float[Tensor, "B N 4"] | None:
    """Where each of side x side patches looks in the original picture, after the processor's resize and centre crop.

    None where the pictures' sizes are not known.
    """
    if not sizes:
        return None
    size, crop = dict(image_processor.size), dict(image_processor.crop_size or {})
    boxes: dict[tuple[int, int], Tensor] = {}
    for width, height in set(sizes):
        if "shortest_edge" in size:
            edge, short = size["shortest_edge"], min(width, height)
            resized_w, resized_h = edge * width // short, edge * height // short
        else:
            resized_w, resized_h = size["width"], size["height"]
        crop_w, crop_h = resized_w, resized_h
        if crop and getattr(image_processor, "do_center_crop", False):
            crop_w, crop_h = crop["width"], crop["height"]
        left, top = (resized_w - crop_w) // 2, (resized_h - crop_h) // 2
        x = (left + torch.arange(side + 1) * (crop_w / side)) * (width / resized_w)
        y = (top + torch.arange(side + 1) * (crop_h / side)) * (height / resized_h)
        boxes[width, height] = grid_boxes(x, y)
    return to_device(torch.stack([boxes[width, height] for width, height in sizes]), device)


def grid_boxes(x: Float[Tensor, " columns_1"], y: Float[Tensor, " rows_1"]) -> Float[Tensor, "N 4"]:
    """x0 y0 x1 y1 of every cell of a grid, raster order, from its column and row borders."""
    y0, x0 = torch.meshgrid(y[:-1], x[:-1], indexing="ij")
    y1, x1 = torch.meshgrid(y[1:], x[1:], indexing="ij")
    return torch.stack([x0, y0, x1, y1], dim=-1).flatten(0, 1)
