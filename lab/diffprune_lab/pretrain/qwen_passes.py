"""Forward passes of the scenes-qwen models in training, over the stock modules, for batches of pictures of one size.

The stock tower takes pictures of any sizes as one sequence and calls attention once per window. With one size in a
batch windows are slices, and all of them go through attention together. `lab/tests/pretrain/test_qwen.py` holds both to
the same numbers. P counts the patches of a picture, W is the tower's width.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torch.nn import functional
from transformers import Qwen2_5_VLForConditionalGeneration
from transformers.vision_utils import get_vision_position_ids

from diffprune.ops import rotate
from diffprune_lab.pretrain import passes, turns
from diffprune_lab.pretrain.feed import Batch

# The stock tower's class is not exported under a public name.
Tower = Any

# Pixels and patches --------------------------------------------------------------------------------------------------


def grid_of(pixels: Tensor, unit: int) -> tuple[int, int]:
    """Rows and columns of language tokens of pictures [B, 3, H, W]."""
    return pixels.shape[-2] // unit, pixels.shape[-1] // unit


def patches_of(pixels: UInt8[Tensor, "B 3 height width"], patch: int, merge: int) -> Float[Tensor, "B N G C"]:
    """Normalised pixels of each patch, the patches of a group together and groups in raster order."""
    batch, (rows, columns) = len(pixels), grid_of(pixels, patch * merge)
    cut = passes.normalise_pixels(pixels).view(batch, 3, rows, merge, patch, columns, merge, patch)
    return cut.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(batch, rows * columns, merge * merge, 3 * patch * patch)


def embed_patches(tower: Tower, patches: Float[Tensor, "B N G C"]) -> Float[Tensor, "B P W"]:
    """What the first block takes; a picture is two equal frames to the stock embedding, so their filters add up."""
    filters = tower.patch_embed.proj.weight.sum(2).flatten(1)  # [W, C]
    return functional.linear(patches.flatten(1, 2), filters)


@torch.no_grad()
def whiten_patches_(tower: Tower, patches: Float[Tensor, "X C"]) -> None:
    """Starts the patch embedding as a whitening of these patches with deviation 0.5; `passes.whiten_patches_` says why.

    There is no bias that could take the mean off, so it is one of the directions. Filters beyond the directions there
    are stay random.
    """
    proj = tower.patch_embed.proj
    moments, directions = torch.linalg.eigh(patches.T @ patches / len(patches))  # ascending
    count = min(len(proj.weight), len(moments))
    moments, directions = moments[-count:], directions[:, -count:]
    filters = (directions * (0.5 / (moments + 1e-2 * moments.mean()).sqrt())).T  # [count, C]
    both_frames = filters.view(count, 3, 1, *proj.weight.shape[-2:]) / 2
    proj.weight[:count] = both_frames.expand_as(proj.weight[:count])


@torch.no_grad()
def scale_features_(tower: Tower, factor: float) -> None:
    """Multiplies all hidden states of the tower by `factor` and changes nothing else that it computes.

    Every block, and the merger, reads the residual stream through a norm; see `passes.scale_features_`.
    """
    tower.patch_embed.proj.weight.mul_(factor)
    for block in tower.blocks:
        for writer in (block.attn.proj, block.mlp.down_proj):
            writer.weight.mul_(factor)
            writer.bias.mul_(factor)


# Blocks --------------------------------------------------------------------------------------------------------------


def project_heads(
    block: Any, states: Float[Tensor, "B P W"], cos: Float[Tensor, "1 P E"], sin: Float[Tensor, "1 P E"]
) -> tuple[Float[Tensor, "B H P E"], Float[Tensor, "B H P E"], Float[Tensor, "B H P E"]]:
    """(query, key, value) of a stock vision block."""
    attention = block.attn
    heads = attention.qkv(block.norm1(states)).unflatten(-1, (3, attention.num_heads, -1))  # [B, P, 3, H, E]
    query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
    return rotate(query, cos, sin).to(value.dtype), rotate(key, cos, sin).to(value.dtype), value


def mix_heads(block: Any, states: Float[Tensor, "B P W"], attended: Float[Tensor, "B P W"]) -> Float[Tensor, "B P W"]:
    """The rest of a stock vision block after its attention."""
    states = states + block.attn.proj(attended)
    return states + block.mlp(block.norm2(states))


class BlockParts(NamedTuple):
    """The two parts of a vision block around its attention, as they are or compiled."""

    project: Callable[..., tuple[Tensor, Tensor, Tensor]] = project_heads
    mix: Callable[..., Tensor] = mix_heads


PLAIN = BlockParts()


def window_slices(rows: int, columns: int, side: int) -> Iterator[tuple[slice, slice, int, int]]:
    """Parts of a grid in which all windows have one size: their rows and columns, and the window's height and width.

    Windows start at the top left, so those at the right and at the bottom may be smaller.
    """
    for first_row, last_row in ((0, rows - rows % side), (rows - rows % side, rows)):
        for first_column, last_column in ((0, columns - columns % side), (columns - columns % side, columns)):
            if last_row > first_row and last_column > first_column:
                height, width = min(side, last_row - first_row), min(side, last_column - first_column)
                yield slice(first_row, last_row), slice(first_column, last_column), height, width


def attend_windows(
    query: Float[Tensor, "B H P E"],
    key: Float[Tensor, "B H P E"],
    value: Float[Tensor, "B H P E"],
    grid: tuple[int, int],
    side: int,
) -> Float[Tensor, "B P HE"]:
    """Attention of each patch within its window of `side` x `side` groups."""
    batch, heads, patches, width = query.shape
    rows, columns = grid
    group = patches // (rows * columns)
    # [B, rows, columns, G, H, E]: heads behind, as the output has them
    parts = [x.transpose(1, 2).unflatten(1, (rows, columns, group)) for x in (query, key, value)]
    strips: dict[int, list[Tensor]] = {}
    for some_rows, some_columns, tall, wide in window_slices(rows, columns, side):
        q, k, v = (_into_windows(x[:, some_rows, some_columns], tall, wide) for x in parts)  # [S, H, M, E]
        attended = functional.scaled_dot_product_attention(q, k, v)
        down, across = (some_rows.stop - some_rows.start) // tall, (some_columns.stop - some_columns.start) // wide
        attended = attended.view(batch, down, across, heads, tall, wide, group, width).permute(0, 1, 4, 2, 5, 6, 3, 7)
        strips.setdefault(some_rows.start, []).append(attended.reshape(batch, down * tall, across * wide, group, -1))
    # The last step makes a tensor of its own: what is compiled would be compiled anew for a view of another one.
    return torch.cat([torch.cat(strip, dim=2).flatten(1, 3) for strip in strips.values()], dim=1)


def _into_windows(x: Float[Tensor, "B R C G H E"], tall: int, wide: int) -> Float[Tensor, "S H M E"]:
    batch, rows, columns, group, heads, width = x.shape
    cut = x.reshape(batch, rows // tall, tall, columns // wide, wide, group, heads, width)
    return cut.permute(0, 1, 3, 6, 2, 4, 5, 7).reshape(-1, heads, tall * wide * group, width)


def attend_all(
    query: Float[Tensor, "B H P E"], key: Float[Tensor, "B H P E"], value: Float[Tensor, "B H P E"]
) -> Float[Tensor, "B P HE"]:
    """Attention of each patch over its whole picture."""
    return functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


@cache
def patch_places(rows: int, columns: int, merge: int, device: torch.device) -> Int[Tensor, "P 2"]:
    """Row and column of each patch, group after group."""
    return get_vision_position_ids(torch.tensor([[1, rows * merge, columns * merge]]), merge).to(device)


def tower_features(
    tower: Tower, pixels: UInt8[Tensor, "B 3 height width"], *, parts: BlockParts = PLAIN
) -> Float[Tensor, "B N D"]:
    """Features of every language token as the merger takes them: those of its patches side by side, in raster order."""
    merge, patch = tower.spatial_merge_size, tower.patch_size
    grid = grid_of(pixels, patch * merge)
    states = embed_patches(tower, patches_of(pixels, patch, merge))
    kind = states.device.type
    if torch.is_autocast_enabled(kind):
        states = states.to(torch.get_autocast_dtype(kind))  # half the traffic between the blocks
    places = patch_places(*grid, merge, pixels.device)
    # Angles in float32 whatever the states are; the first argument lends its type only.
    cos, sin = (table.float()[None] for table in tower.rotary_pos_emb(states.new_empty(0, dtype=torch.float32), places))
    side = tower.window_size // merge // patch
    for number, block in enumerate(tower.blocks):
        query, key, value = parts.project(block, states, cos, sin)
        if number in tower.fullatt_block_indexes:
            attended = attend_all(query, key, value)
        else:
            attended = attend_windows(query, key, value, grid, side)
        states = parts.mix(block, states, attended)
    return states.unflatten(1, (-1, merge * merge)).flatten(2)


def norm_features(tower: Tower, features: Float[Tensor, "B K D"]) -> Float[Tensor, "B K D"]:
    """The features behind the norm with which the stock merger begins."""
    return tower.merger.ln_q(features.unflatten(-1, (tower.spatial_merge_unit, -1))).flatten(-2)


def merge_features(tower: Tower, features: Float[Tensor, "B K D"]) -> Float[Tensor, "B K L"]:
    """The stock merger on each token."""
    patches = features.reshape(-1, features.shape[-1] // tower.spatial_merge_unit)
    return tower.merger(patches).unflatten(0, features.shape[:2])


# Language ------------------------------------------------------------------------------------------------------------


def prefix_positions(keep: Int[Tensor, "B K"], grid: tuple[int, int], start: int, end: int) -> Int[Tensor, "3 B P"]:
    """Time, row and column of what all turns see: text in front of the picture, kept tokens, text behind it.

    Text has one number for all three; behind the picture it goes on after the largest one in it.
    """
    rows, columns = grid
    batch = len(keep)
    before = torch.arange(start, device=keep.device).expand(3, batch, -1)
    visual = torch.stack((torch.zeros_like(keep), keep // columns, keep % columns)) + start
    behind = torch.arange(end, device=keep.device).expand(3, batch, -1) + start + max(rows, columns)
    return torch.cat((before, visual, behind), dim=-1)


def answer_loss(
    model: Qwen2_5_VLForConditionalGeneration,
    features: Float[Tensor, "B N D"],
    keep: Int[Tensor, "B K"],
    batch: Batch,
    grid: tuple[int, int],
    start_ids: Int[Tensor, " S"],
    end_ids: Int[Tensor, " E"],
    *,
    parts: turns.LayerParts = turns.PLAIN,
) -> tuple[Float[Tensor, ""], Int[Tensor, "B T"], turns.TurnLayout]:
    """(loss, guesses, layout) as `passes.answer_loss` gives them.

    Args:
        features: Features of all tokens, before the merger.
        keep: The tokens that stay, at their original positions.
        grid: Rows and columns of tokens.
        start_ids: Token ids in front of the picture.
        end_ids: Token ids behind it, the same for all turns.
    """
    language: Any = model.model.language_model
    layout = turns.turn_layout(batch["ids"], batch["lengths"], batch["answers"])
    kept = features.gather(1, keep[:, :, None].expand(-1, -1, features.shape[-1]))
    visual = merge_features(model.model.visual, kept)
    around = torch.cat((start_ids, end_ids)).expand(len(keep), -1)
    embedded = language.embed_tokens(torch.cat((around, batch["ids"]), dim=1)).to(visual.dtype)
    before, behind, text = embedded.split([len(start_ids), len(end_ids), batch["ids"].shape[1]], dim=1)
    first = len(start_ids) + max(grid) + len(end_ids)
    states = turns.shared_prefix_states(
        language,
        torch.cat((before, visual, behind), dim=1),
        prefix_positions(keep, grid, len(start_ids), len(end_ids)),
        text,
        (layout.offset + first).expand(3, -1, -1),
        layout.turn,
        parts=parts,
    )
    return *passes.turns_loss(model.lm_head(states).float(), layout), layout
