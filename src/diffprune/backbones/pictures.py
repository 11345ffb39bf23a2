"""Visual tokens of pictures that were encoded apart from each other, put together as one batch."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from jaxtyping import Shaped
from torch import Tensor

from diffprune.ops import pad_rows
from diffprune.types import VisualTokens

MADE_LATER = frozenset({"text", "projected"})  # what is made where it is used, not held for each picture
PADDING = {"slots": -2, "segment": -1}  # what stands behind a row's last value, where it is not 0


def join_tokens(parts: Sequence[VisualTokens]) -> VisualTokens:
    """Several batches as one, all padded to the most tokens a picture has."""
    first = parts[0]
    changes: dict[str, Any] = {
        item.name: join_rows([getattr(part, item.name) for part in parts], PADDING.get(item.name, 0))
        for item in fields(VisualTokens)
        if isinstance(getattr(first, item.name), Tensor) and item.name != "made_mask"
    }
    full = all(part.is_full for part in parts) and len({part.x.shape[1] for part in parts}) == 1
    return replace(
        first,
        grid=tuple(pair for part in parts for pair in part.grid),
        seeds=tuple(seed for part in parts for seed in part.seeds or ()),
        planes=tuple(join_rows(planes, 0) for planes in zip(*(part.planes for part in parts), strict=True)),
        made_mask=changes["mask"] if full else None,
        **changes,
    )


def join_rows(parts: Sequence[Shaped[Tensor, "_ _ ..."]], value: int) -> Shaped[Tensor, "_ _ ..."]:
    """Rows of several tensors below each other, padded at the end to the longest."""
    return pad_rows([row for part in parts for row in part], value)


def pieces(counts: Sequence[int], most: int) -> list[list[int]]:
    """Pictures in their order, in groups of at most that many tokens together; one that has more is alone."""
    out: list[list[int]] = []
    held = most + 1
    for image, count in enumerate(counts):
        if held + count > most:
            out.append([])
            held = 0
        out[-1].append(image)
        held += count
    return out
