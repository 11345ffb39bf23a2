"""A pruner that knows what is in the picture: an upper bound of what a pruner can reach on a budget."""

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from diffprune.methods.base import Card, ScoringPruner
from diffprune.types import VisualTokens
from diffprune_lab.scenes.draw import PICTURE
from diffprune_lab.scenes.sizes import picture_size
from diffprune_lab.scenes.world import Scene

Length = int | float
Box = tuple[Length, Length, Length, Length]  # x0, y0, x1, y1 in pixels of the picture
GOLDEN = (5**0.5 - 1) / 2
ROUNDS = 3  # of covering every item once more, before tokens go by how much they see alone
LATER = 500  # ranks between the last token of these rounds and the next: more than there can be in them


def items(scene: Scene, size: tuple[int, int] = (PICTURE, PICTURE)) -> list[Box]:
    """The boxes of everything the texts speak of, one per item; a sign counts each of its letters as one.

    Args:
        size: (height, width) of the picture, in whose pixels the boxes are.
    """
    boxes: list[Box] = [thing.box for thing in scene.things]
    boxes += [thing.tag_box for thing in scene.things if thing.tag_box is not None]
    if scene.sign is not None:
        x0, y0, x1, y1 = scene.sign.box
        letters = len(scene.sign.text)
        width = x1 - x0
        boxes += [(x0 + width * i // letters, y0, x0 + width * (i + 1) // letters, y1) for i in range(letters)]
    down, across = size[0] / PICTURE, size[1] / PICTURE
    return [(x0 * across, y0 * down, x1 * across, y1 * down) for x0, y0, x1, y1 in boxes]


class Oracle(ScoringPruner):
    """Gives every item one token before any gets a second, and so on; the rest is spread over the background.

    Args:
        boxes: The items of each picture, under the number made from its pixels (`VisualTokens.seeds`).
    """

    name: ClassVar[str] = "oracle"
    card: ClassVar[Card] = Card(idea="Knows the boxes of what the texts mention; the bound for any pruner.")

    def __init__(self, boxes: Mapping[int, Sequence[Box]]) -> None:
        super().__init__()
        self.boxes = dict(boxes)

    @classmethod
    def of(cls, pictures: Iterable[tuple[int, Scene]], sizes: str = "fixed") -> "Oracle":
        """From (number of the picture, its scene) pairs, and the way the pictures were sized (`scenes.sizes`)."""
        return cls({seed: items(scene, picture_size(scene, sizes)) for seed, scene in pictures})

    def score(self, tokens: VisualTokens) -> Float[Tensor, "B N"]:
        known = tokens.seeds is not None and all(seed in self.boxes for seed in tokens.seeds)
        if tokens.seeds is None or tokens.boxes is None or not known:
            raise ValueError("the oracle knows nothing of these pictures; make it with Oracle.of of theirs")
        rows = [rank_tokens(tokens.boxes[row].cpu(), self.boxes[seed]) for row, seed in enumerate(tokens.seeds)]
        return torch.stack(rows).to(tokens.x.device)


def rank_tokens(where: Float[Tensor, "N 4"], boxes: Sequence[Box]) -> Float[Tensor, " N"]:
    """The order in which tokens are kept, 0 for the first, -1 for the next; far less for tokens that see no item.

    The first rounds cover: no item gets a second token while another has none that sees it well, and of the tokens that
    would do the one goes first that shows most of what is least covered. Then every item's next best tokens follow.
    """
    best = -1e4 - (torch.arange(len(where)) * GOLDEN) % 1  # any number of them lies all over the picture
    if not boxes:
        return best
    item = torch.tensor(boxes, dtype=where.dtype).unsqueeze(1)  # [I, 1, 4]
    size = (torch.minimum(where[:, 2:], item[..., 2:]) - torch.maximum(where[:, :2], item[..., :2])).clamp_min(0)
    seen = size.prod(-1)  # [I, N], pixels of the item that the token sees
    centre = (where[:, :2] + where[:, 2:]) / 2
    distance = (centre - (item[..., :2] + item[..., 2:]) / 2).square().sum(-1)
    # Tokens that see most of the item, of equals the most central: a picture is never 1,000 pixels away.
    rank = (distance - 1e6 * seen).argsort(dim=-1, stable=True).argsort(dim=-1)  # [I, N]
    later = torch.where(seen > 0, -rank.to(best) - LATER, -torch.inf).amax(0)
    best = torch.where((seen > 0).any(0), later, best)
    for step, token in enumerate(cover(seen, distance)):
        best[token] = -step
    return best


def cover(seen: Float[Tensor, "I N"], distance: Float[Tensor, "I N"]) -> list[int]:
    """Tokens in the order that covers items evenly, `ROUNDS` tokens for each that has so many.

    A token counts for an item of which it sees at least half as much as any one does.

    Args:
        seen: How much of each item each token sees.
        distance: Of each token from the item's middle, squared: of two that show as much the nearer one goes first.
    """
    most = seen.amax(-1, keepdim=True)
    share = torch.where(2 * seen >= most.clamp_min(1e-6), seen / most.clamp_min(1e-6), 0.0)
    value = (share - 1e-3 * distance / distance.amax().clamp_min(1e-6)).where(share > 0, 0.0).double().numpy()
    counts, order = np.zeros(len(value)), []
    while True:
        able = (value > 0).any(1) & (counts < ROUNDS)  # items that may get one more
        if not able.any():
            return order
        least = able & (counts == counts[able].min())
        token = int(value[least].sum(0).argmax())
        counts += value[:, token] > 0
        value[:, token] = 0
        order.append(token)
