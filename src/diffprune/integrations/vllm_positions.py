"""Original positions in an engine that numbers what it is given: what its three rows hold, and who fills them when.

vLLM asks a model with three-row positions (M-RoPE) twice: when a request arrives, for the whole prompt, and when a
piece of a prompt is about to run, with the embeddings of its pictures at hand. Which tokens were kept is only known
then, so each embedding carries its place in the picture in further channels, which are taken off again here.

Where a position is one number, row 0 is that number and row 1 the picture's first one; the model is handed row 0.
vLLM itself is not imported.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

BASE = 256  # the largest count that every float type of a model holds exactly
DIGITS = 3  # of one number: up to 16,777,216


class Run(NamedTuple):
    """The placeholders of one picture in a prompt.

    Args:
        start: Of the first one.
        kept: How many there are.
        full: How many there were.
    """

    start: int
    kept: int
    full: int


def to_channels(places: Int[Tensor, "K R"]) -> Int[Tensor, "K C"]:
    """Numbers as digits, each small enough for any float type: bfloat16 would make 577 of 576."""
    powers = BASE ** torch.arange(DIGITS, device=places.device)
    return (places[..., None] // powers % BASE).flatten(-2)


def from_channels(channels: Float[Tensor, "K C"]) -> Int[Tensor, "K R"]:
    """The numbers again."""
    powers = BASE ** torch.arange(DIGITS, device=channels.device)
    return (channels.round().long().unflatten(-1, (-1, DIGITS)) * powers).sum(-1)


def first_positions(
    ids: Sequence[int], runs: Sequence[Run], image_token: int, number: Callable[[Tensor], Tensor]
) -> Int[Tensor, "3 T"]:
    """Positions of a shortened prompt when it arrives: text where it was, every placeholder at its picture's first one.

    Args:
        ids: Of the shortened prompt.
        runs: Its pictures, in their order.
        number: The family's positions of an unpruned prompt of ids [1, U]: [1, U], or [3, 1, U].
    """
    unpruned: list[int] = []
    columns: list[int] = []
    last = 0
    for run in runs:
        columns += range(len(unpruned), len(unpruned) + run.start - last)
        unpruned += ids[last : run.start]
        columns += [len(unpruned)] * run.kept
        unpruned += [image_token] * run.full
        last = run.start + run.kept
    columns += range(len(unpruned), len(unpruned) + len(ids) - last)
    unpruned += ids[last:]
    where = number(torch.tensor([unpruned]))[..., 0, :][..., columns]
    return where if where.ndim == 2 else where.expand(3, -1).clone()


def with_places(
    positions: Int[Tensor, "3 T"],
    ids: Int[Tensor, " T"],
    places: Int[Tensor, "K R"],
    *,
    image_token: int,
    start: int,
) -> Int[Tensor, "3 T"]:
    """Positions with the places of kept tokens, which are those of the placeholders from `start` on; again, the same.

    Args:
        places: In its picture, of each token that has come: one number, or row and column.
        start: Where the piece of the prompt begins that is about to run.
    """
    out = positions.clone()
    at = (ids == image_token).nonzero()[:, 0].to(out.device)
    at = at[at >= start][: len(places)]
    places = places.to(out.device)
    if places.shape[1] == 1:
        out[0, at] = out[1, at] + places[:, 0]
    else:
        out[1, at] = out[0, at] + places[:, 0]
        out[2, at] = out[0, at] + places[:, 1]
    return out


def next_position(positions: Int[Tensor, "3 T"]) -> int:
    """How far the position of a first new token lies beyond its index."""
    return int(positions.max()) + 1 - positions.shape[1]
