"""Targets for the tower of the scenes-qwen models: as in `supervision.py`, in terms that fit any picture size.

The tower has no absolute positions, so a token does not name the place of its item in the picture. It names how far
away the item's center is and how large the item is, in pixels; where the token itself stands, the language model knows
from its position. There is no [CLS], hence no summary.
"""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from diffprune_lab.pretrain import feed, supervision
from diffprune_lab.pretrain.prefixes import SIGN
from diffprune_lab.pretrain.turns import IGNORE
from diffprune_lab.scenes.sizes import SIDES
from diffprune_lab.scenes.world import PICTURE, Scene

STEP = 4  # pixels; distances and sizes are rounded to it
REACH = 12  # steps to the center of an item at most, either way
LONGEST = 20  # steps of an item's side at most

_SHARED = [name for name in supervision.FIELDS if name not in ("cell", "column", "row")]
# What each token names, and how many values that has.
FIELDS = {
    **{name: supervision.FIELDS[name] for name in _SHARED},
    "across": 2 * REACH + 1,  # from the token's center to its item's
    "down": 2 * REACH + 1,
    "width": LONGEST,
    "height": LONGEST,
    "picture_width": len(SIDES),
    "picture_height": len(SIDES),
}
WEIGHTS = {
    **{"shape": 4.0, "size": 1.5, "pattern": 1.5, "quality": 0.3},
    **{"across": 0.3, "down": 0.3, "width": 0.3, "height": 0.3, "picture_width": 0.1, "picture_height": 0.1},
}


def tower_batch(scenes: list[Scene]) -> feed.Batch:
    """What the tower stage needs of the scenes: as for the other models, and the box of each item."""
    boxes = np.zeros((len(scenes), SIGN + 1, 4), np.float32)
    for row, scene in enumerate(scenes):
        for slot, thing in enumerate(scene.things, start=1):
            boxes[row, slot] = thing.box
        if scene.sign is not None:
            boxes[row, SIGN] = scene.sign.box
    return feed.tower_batch(scenes) | {"boxes": torch.from_numpy(boxes)}


def token_targets(
    items: Int[Tensor, "B I F"],
    boxes: Float[Tensor, "B I 4"],
    item: Int[Tensor, "B N"],
    covers: Int[Tensor, "B N"],
    grid: tuple[int, int],
    unit: int,
) -> Int[Tensor, "B N A"]:
    """What each token names, in the order of FIELDS.

    Args:
        items: What a token on each item names in any picture (`supervision.scene_targets`).
        boxes: Of the items, in pixels of the picture as it is drawn.
        item: The item each token looks at.
        covers: How many pixels of it show any item.
        grid: Rows and columns of tokens.
        unit: Pixels along one side of a token.
    """
    rows, columns = grid
    chosen = [list(supervision.FIELDS).index(name) for name in _SHARED]
    shared = supervision.token_targets(items, item, covers)[:, :, chosen]
    stretch = torch.tensor([columns * unit / PICTURE, rows * unit / PICTURE], device=boxes.device)
    own = boxes.gather(1, item[:, :, None].expand(-1, -1, 4)) * stretch.repeat(2)  # [B, N, 4]
    index = torch.arange(rows * columns, device=boxes.device)
    center = (torch.stack((index % columns, index // columns), dim=-1) + 0.5) * unit  # [N, 2]
    away = ((own[:, :, :2] + own[:, :, 2:]) / 2 - center) / STEP
    away = away.round().long().clamp(-REACH, REACH) + REACH
    size = ((own[:, :, 2:] - own[:, :, :2]) / STEP).long().clamp(0, LONGEST - 1)
    # A ruined picture shows nothing but its quality, and its items' other fields say so.
    known = shared[:, :, _SHARED.index("kind")] > 0
    placed = torch.cat((away, size), dim=-1).masked_fill(~known[:, :, None], IGNORE)
    sides = torch.tensor([SIDES.index(columns * unit), SIDES.index(rows * unit)], device=boxes.device)
    ruined = (items[:, 0, list(supervision.FIELDS).index("kind")] == IGNORE)[:, None, None]
    whole = sides.expand(*item.shape, 2).masked_fill(ruined, IGNORE)
    return torch.cat((shared, placed, whole), dim=-1)


class TokenHeads(nn.Module):
    """A linear reader of the language tokens, thrown away after the tower's training."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, sum(FIELDS.values()))

    def forward(
        self, tokens: Float[Tensor, "B N L"], targets: Int[Tensor, "B N A"]
    ) -> tuple[Float[Tensor, ""], Float[Tensor, " A"]]:
        """(loss, accuracies): the weighted sum over the fields, and the accuracy of each in the order of FIELDS."""
        return supervision.classify(self.head(self.norm(tokens)), targets, FIELDS, WEIGHTS)
