"""Which columns of a prompt stay when visual tokens are dropped, where they stand then, and at which positions."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffprune.types import LMInputs, Origin, VisualTokens

# Which placeholders without picture content stay: with "rows" those of rows that keep a token or had none to lose, as
# the rows of a picture that is too narrow for a column of tokens.
NEWLINE_RULES = ("rows", "all", "none")


def held_slots(
    tokens: VisualTokens,
    keep: Int[Tensor, "I K"],
    *,
    newlines: str,
    rows_of_slots: Callable[[Int[Tensor, "I S"]], Int[Tensor, "I S"]],
) -> tuple[Bool[Tensor, " S"], Int[Tensor, " held"]]:
    """Of all images' placeholders: which stay, and where in `keep`, flat, each of those has its token.

    A newline has -1. All images at once: the device is not waited for image by image.

    Args:
        newlines: Which newlines stay, one of `NEWLINE_RULES`.
        rows_of_slots: The row each placeholder of an image belongs to.
    """
    num = tokens.x.shape[1]
    if tokens.slots is None:
        held = place_in_keep(keep, num)
        stay = held >= 0
        return (stay.flatten() if tokens.is_full else stay[tokens.mask.to(stay.device)]), held[stay]
    slots = tokens.slots
    held, stay = held_and_newlines(slots, keep, num, newlines=newlines, row_of=rows_of_slots(slots))
    return stay[slots != -2], held[stay]


def place_in_keep(keep: Int[Tensor, "I K"], num: int) -> Int[Tensor, "I N"]:
    """Where in `keep`, flat over all images, each of an image's `num` tokens stands; -1 where it is dropped."""
    width = keep.shape[1]
    first = torch.arange(len(keep), device=keep.device)[:, None] * width  # [I, 1]
    place = torch.where(keep < 0, num, keep)  # what keeps nothing goes to a column of its own
    held = keep.new_full((len(keep), num + 1), -1)
    return held.scatter(1, place, first + torch.arange(width, device=keep.device))[:, :num]


def held_and_newlines(
    slots: Int[Tensor, "I S"], keep: Int[Tensor, "I K"], num: int, *, newlines: str, row_of: Int[Tensor, "I S"]
) -> tuple[Int[Tensor, "I S"], Bool[Tensor, "I S"]]:
    """For each placeholder its token's place in `keep`, flat (-1 for none), and whether the placeholder stays.

    All shapes follow from those given, so that it can be a CUDA graph.

    Args:
        slots: Token behind each placeholder; -1 is a newline, -2 padding.
        num: Tokens of an image.
        newlines: Which newlines stay, one of `NEWLINE_RULES`.
        row_of: The row each placeholder belongs to.
    """
    held = torch.where(slots >= 0, place_in_keep(keep, num).gather(1, slots.clamp_min(0)), -1)  # [I, S]
    stay = held >= 0
    if newlines == "all":
        stay = stay | (slots == -1)
    elif newlines == "rows":
        lost, kept = (
            torch.zeros_like(row_of).scatter_add(1, row_of, some.long()) > 0  # fewer rows than slots
            for some in ((slots >= 0) & ~stay, stay)
        )
        stay = stay | ((slots == -1) & (kept | ~lost).gather(1, row_of))
    return held, stay


def require_filled(num_slots: int, num_placeholders: int) -> None:
    """An error where the pictures do not fill the placeholders of the prompt."""
    if num_placeholders != num_slots:
        raise ValueError(
            f"the prompt holds {num_placeholders} image placeholders but the pictures fill {num_slots}; "
            "process text and images in one call"
        )


def left_pad_order(stays: Bool[Tensor, "B T"]) -> tuple[Int[Tensor, "B U"], Bool[Tensor, "B U"]]:
    """Columns that stay, in order and flush right, and the mask of real ones."""
    width = max(1, int(stays.sum(-1).max()))
    order = torch.argsort(stays.long(), dim=-1, stable=True)[:, -width:]
    return order, stays.gather(1, order)


def positions_of(
    columns: Int[Tensor, "B U"], mask: Bool[Tensor, "B U"], unpruned: Int[Tensor, "*R B T"], *, packed: bool
) -> Int[Tensor, "*R B U"]:
    """Position of each column: the one it had before anything was dropped, or, packed, counted without gaps."""
    if packed:
        return (mask.cumsum(-1) - 1).clamp_min(0).expand(*unpruned.shape[:-2], *columns.shape)
    return torch.where(mask, unpruned.gather(-1, columns.expand(*unpruned.shape[:-2], *columns.shape)), 0)


def fill(
    embeds: Float[Tensor, "B U L"],
    is_visual: Bool[Tensor, "B U"],
    place: Int[Tensor, "B U"],
    visual: Float[Tensor, "M L"],
    newline: Float[Tensor, " L"] | None,
) -> Float[Tensor, "B U L"]:
    """Embeddings with the visual ones in their places.

    Args:
        is_visual: True where a visual token or a newline stands.
        place: Row of `visual` at each column, -1 at text and newlines.
        newline: Embedding of a placeholder without picture content.
    """
    rows = visual.to(embeds.device, embeds.dtype).index_select(0, place.clamp_min(0).flatten()).view_as(embeds)
    if newline is not None:
        rows = torch.where((place < 0)[..., None], newline.to(rows), rows)
    return torch.where(is_visual[..., None], rows, embeds)


def tokens_in_place(tokens: VisualTokens, placeholder: Bool[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """The token, counted over all images' rows, that stands at each placeholder where none is dropped.

    -1 at text and at newlines. All shapes follow from those given, so the device is not waited for.
    """
    real = tokens.mask if tokens.slots is None else tokens.slots != -2
    index = torch.arange(real.shape[1], device=real.device) if tokens.slots is None else tokens.slots
    first = torch.arange(len(tokens), device=real.device)[:, None] * tokens.x.shape[1]
    flat = torch.where(index < 0, -1, index + first).flatten()
    if not (tokens.is_full and tokens.slots is None):
        flat = flat[torch.argsort((~real).flatten().long(), stable=True)]
    if placeholder.device.type == "cpu":  # elsewhere counting would wait for the device
        require_filled(int(real.sum()), int(placeholder.sum()))
    rank = (placeholder.flatten().cumsum(0) - 1).clamp_min(0)
    return torch.where(placeholder, flat.to(rank.device)[rank].view_as(placeholder), -1)


def origin_of(tokens: VisualTokens, keep: Int[Tensor, "I K"] | None, place: Int[Tensor, "B U"]) -> Origin:
    """Which token of which image stands at each column, -1 for none; `place` is its place in `keep`, flat."""
    if keep is None:  # all, each at its own
        return Origin(tokens=tokens, index=place)
    first = torch.arange(len(tokens), device=keep.device)[:, None] * tokens.x.shape[1]
    token = (keep + first).flatten().to(place.device)[place.clamp_min(0)]
    return Origin(tokens=tokens, index=torch.where(place < 0, -1, token))


def real_columns_first(lm: LMInputs) -> LMInputs:
    """Rows with their padding behind and a mask of ones, for one causal pass without a cache.

    Being causal already keeps real tokens from attending to what stands behind them. A mask with a zero in it would be
    made a T x T tensor and keep SDPA from its flash kernel.
    """
    real = lm.attention_mask.bool()
    if real.device.type == "cpu" and bool(real.all()):  # elsewhere asking would wait for the device
        return lm
    order = torch.argsort((~real).long(), dim=-1, stable=True)  # [B, T]

    def take(columns: Any) -> Any:
        is_row = isinstance(columns, Tensor) and columns.shape == order.shape
        return columns.gather(1, order) if is_row else columns

    return replace(
        lm,
        input_ids=take(lm.input_ids),
        inputs_embeds=lm.inputs_embeds.gather(1, order[..., None].expand_as(lm.inputs_embeds)),
        attention_mask=torch.ones_like(lm.attention_mask),
        position_ids=lm.position_ids.gather(-1, order.expand_as(lm.position_ids)),
        visual=take(lm.visual),
        source=take(lm.source),
        labels=take(lm.labels),
        extra={key: take(value) for key, value in lm.extra.items()},
        origin=None if lm.origin is None else replace(lm.origin, index=take(lm.origin.index)),
        soft_mask=take(lm.soft_mask),
    )
