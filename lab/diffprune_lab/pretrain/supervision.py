"""Targets of the vision tower before it meets a language model: each token names the item it looks at.

A token on a thing names the thing's attributes, a token on a sign the whole of its text, so that one kept token of an
item is enough to answer a question about it. A token on the background names nothing, and no token may hold what stands
elsewhere (`leak`): left alone, a tower spreads the whole picture over all its tokens, and then it does not matter which
of them are kept. What is dropped must really be gone.
[CLS] names what is in the picture, which gives its attention a meaning: all of it, the background and the clutter that
no text mentions included, as a summary trained without knowing what will be asked. (Trained on the items alone, its
attention is all but an oracle of what the texts are about, which no real tower is.) The heads are thrown away.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn
from torch.nn import functional

from diffprune.rng import Rng
from diffprune_lab.pretrain.prefixes import FIRST_GLYPH, SIGN
from diffprune_lab.pretrain.turns import IGNORE
from diffprune_lab.scenes import atlas, grounds
from diffprune_lab.scenes.world import CELL, COLORS, PATTERNS, QUALITIES, SHAPES, SIZES, TAGS, Scene

CHARACTERS = " ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"  # a blank: the text is shorter
PLACE_STEP = 8  # pixels; places of centers are rounded to it
PLACES = 192 // PLACE_STEP

# What each patch token names, and how many values that has.
FIELDS = {
    "kind": 3,  # background, thing, sign
    "quality": len(QUALITIES),
    "cell": 9,
    "column": PLACES,  # of the center of its item
    "row": PLACES,
    "shape": len(SHAPES),
    "color": len(COLORS),
    "size": len(SIZES),
    "pattern": len(PATTERNS),
    "tag": len(TAGS) + 1,
    "letter0": len(CHARACTERS),
    "letter1": len(CHARACTERS),
    "letter2": len(CHARACTERS),
    "letter3": len(CHARACTERS),
}
MOST_MARKS = 4  # marks of clutter counted in a cell; more are as many
# What [CLS] names beside the pairs of color and shape.
SUMMARY_FIELDS = {
    "quality": len(QUALITIES),
    "count": 5,
    **{f"letter{i}": len(CHARACTERS) for i in range(4)},
    "ground": len(grounds.GROUND_PATTERNS) + 1,  # the sort of background; paper is the last
    **{f"marks{cell}": MOST_MARKS + 1 for cell in range(9)},  # clutter in each cell
}
PAIRS = len(COLORS) * len(SHAPES)
PAIR_WEIGHT = 0.1
SUMMARY_WEIGHT = 0.5
# Fields that are learned late weigh more, those that are learned at once less; 1 where nothing is said.
WEIGHTS = {"shape": 4.0, "size": 1.5, "pattern": 1.5, "quality": 0.3, "cell": 0.5, "column": 0.3, "row": 0.3}
LEAK_WEIGHT = 20.0

_PLACE = {name: place for place, name in enumerate(FIELDS)}
_SUMMARY_PLACE = {name: place for place, name in enumerate(SUMMARY_FIELDS)}


def scene_targets(
    scenes: Sequence[Scene],
) -> tuple[Int[np.ndarray, "B I F"], Int[np.ndarray, "B S"], Float[np.ndarray, "B C"]]:
    """(items, summary, pairs): what a token on each of the six items names, and what [CLS] names, for each scene.

    A ruined picture has targets for its quality alone.
    """
    items = np.full((len(scenes), SIGN + 1, len(FIELDS)), IGNORE, np.int64)
    summary = np.full((len(scenes), len(SUMMARY_FIELDS)), IGNORE, np.int64)
    pairs = np.full((len(scenes), PAIRS), IGNORE, np.float32)
    for row, scene in enumerate(scenes):
        quality = QUALITIES.index(scene.quality)
        items[row, :, _PLACE["quality"]] = quality
        summary[row, _SUMMARY_PLACE["quality"]] = quality
        if scene.quality == "ruined":
            continue
        items[row, 0, _PLACE["kind"]] = 0
        pairs[row] = 0
        summary[row, _SUMMARY_PLACE["count"]] = len(scene.things)
        text = scene.sign.text if scene.sign is not None else ""
        letters = [CHARACTERS.index(letter) for letter in text.ljust(4)]
        summary[row, _SUMMARY_PLACE["letter0"] : _SUMMARY_PLACE["ground"]] = letters
        summary[row, _SUMMARY_PLACE["ground"]] = ground_sort(scene)
        summary[row, _SUMMARY_PLACE["marks0"] :] = np.minimum(clutter_by_cell(scene), MOST_MARKS)
        for slot, thing in enumerate(scene.things, start=1):
            tag = TAGS.index(thing.tag) + 1 if thing.tag else 0
            x0, y0, x1, y1 = thing.box
            items[row, slot, _PLACE["kind"]] = 1
            items[row, slot, _PLACE["cell"] : _PLACE["letter0"]] = (
                thing.cell,
                (x0 + x1) // 2 // PLACE_STEP,
                (y0 + y1) // 2 // PLACE_STEP,
                thing.shape,
                thing.color,
                thing.size,
                thing.pattern,
                tag,
            )
            pairs[row, thing.color * len(SHAPES) + thing.shape] = 1
        if scene.sign is not None:
            x0, y0, x1, y1 = scene.sign.box
            items[row, SIGN, _PLACE["kind"]] = 2
            items[row, SIGN, _PLACE["cell"] : _PLACE["shape"]] = (
                scene.sign.cell,
                (x0 + x1) // 2 // PLACE_STEP,
                (y0 + y1) // 2 // PLACE_STEP,
            )
            items[row, SIGN, _PLACE["letter0"] :] = letters
    return items, summary, pairs


def ground_sort(scene: Scene) -> int:
    """The sort of background, as an index into GROUND_PATTERNS; the paper of diagrams comes after them."""
    pattern = scene.ground[0]
    return next((i for i, sort in enumerate(grounds.GROUND_PATTERNS) if pattern in sort), len(grounds.GROUND_PATTERNS))


def clutter_by_cell(scene: Scene) -> Int[np.ndarray, " 9"]:
    """How many marks of clutter start in each of the nine cells."""
    marks = [(x, y) for mask, x, y, _, _ in scene.sprites if mask in atlas.MARK_MASKS]
    return np.bincount([y // CELL * 3 + x // CELL for x, y in marks], minlength=9)


def token_targets(
    items: Int[Tensor, "B I F"], item: Int[Tensor, "B N"], covers: Int[Tensor, "B N"]
) -> Int[Tensor, "B N F"]:
    """What each token names: its item's row; a token that shows a mere corner of an item names the quality alone."""
    targets = items.gather(1, item[:, :, None].expand(-1, -1, items.shape[2]))
    corner = (item == 0) & (covers > 0)
    hidden = corner[:, :, None] & (torch.arange(items.shape[2], device=items.device) == _PLACE["kind"])
    return targets.masked_fill(hidden, IGNORE)


def item_of_owner(owner: int, tagged: bool) -> int:
    """The item a sprite is part of: a thing with its tag, a sign with its letters; 0 is none."""
    if owner < FIRST_GLYPH:
        return owner
    return owner - FIRST_GLYPH + 1 if tagged else SIGN


def without_items(scene: Scene, rng: Rng) -> Scene:
    """The scene drawn without some of its items, at least one; what it says it shows is as before."""
    tagged = scene.kind == "diagram"
    items = sorted({item_of_owner(sprite[4], tagged) for sprite in scene.sprites} - {0})
    gone = {item for item in items if rng.below(2)} or {rng.choice(items)}
    left = tuple(sprite for sprite in scene.sprites if item_of_owner(sprite[4], tagged) not in gone)
    return replace(scene, sprites=left)


def leak(
    features: Float[Tensor, "B N D"],
    twin_features: Float[Tensor, "B N D"],
    pixels: UInt8[Tensor, "B 3 H W"],
    twin_pixels: UInt8[Tensor, "B 3 H W"],
    patch: int,
    *,
    variance: Float[Tensor, ""] | None = None,
) -> Float[Tensor, ""]:
    """How far tokens whose own pixels stayed the same moved when items elsewhere vanished, relative to their deviation.

    A square root, so that a small leak is pushed as hard as a large one.

    Args:
        variance: What the square is relative to, if not the features' variance as a constant.
    """
    same = (pixels == twin_pixels).all(1).unfold(1, patch, patch).unfold(2, patch, patch).all(-1).all(-1).flatten(1)
    moved = (features.float() - twin_features.float()).square().mean(-1)  # [B, N]
    variance = features.detach().float().var() if variance is None else variance
    relative = (moved * same).sum() / same.sum().clamp(min=1) / variance
    return (relative + 1e-8).sqrt()


class TowerHeads(nn.Module):
    """Linear readers of the tower, one for patch tokens and one each for [CLS] at the feature layer and at the end."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.patch_norm = nn.LayerNorm(width)
        self.patch_head = nn.Linear(width, sum(FIELDS.values()))
        self.summary_norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        heads = [nn.Linear(width, sum(SUMMARY_FIELDS.values()) + PAIRS) for _ in range(2)]
        for head in heads:
            nn.init.constant_(head.bias[-PAIRS:], -3.5)  # a picture shows about 3 of 120 pairs
        self.summary_heads = nn.ModuleList(heads)

    def forward(
        self,
        features: Float[Tensor, "B M D"],
        last: Float[Tensor, "B M D"],
        targets: Int[Tensor, "B N F"],
        summary: Int[Tensor, "B S"],
        pairs: Float[Tensor, "B C"],
    ) -> tuple[Float[Tensor, ""], Float[Tensor, " A"]]:
        """(loss, accuracies): the accuracies in the order of FIELDS, then the summary's fields and pairs, at the end.

        Args:
            features: Hidden states of the feature layer, [CLS] first.
            last: Hidden states of the last block.
        """
        loss, accuracies = classify(self.patch_head(self.patch_norm(features[:, 1:])), targets, FIELDS)
        for norm, head, states in zip(self.summary_norms, self.summary_heads, (features, last), strict=True):
            logits = head(norm(states[:, 0])).float()
            one, summary_accuracies = classify(logits[:, :-PAIRS], summary, SUMMARY_FIELDS)
            known = (pairs >= 0).float()
            missed = functional.binary_cross_entropy_with_logits(
                logits[:, -PAIRS:], pairs.clamp(min=0), reduction="none"
            )
            loss = loss + SUMMARY_WEIGHT * one + PAIR_WEIGHT * (missed * known).sum() / known[:, 0].sum().clamp(min=1)
        hits = ((logits[:, -PAIRS:] > 0) == (pairs > 0)) | (pairs < 0)
        exact = (hits.all(-1) & (known[:, 0] > 0)).sum() / known[:, 0].sum().clamp(min=1)
        return loss, torch.cat((accuracies, summary_accuracies, exact[None]))

    @staticmethod
    def accuracy_names() -> list[str]:
        """The names of what `forward` gives as accuracies."""
        return [*FIELDS, *(f"cls_{name}" for name in SUMMARY_FIELDS), "cls_pairs"]


def classify(
    logits: Float[Tensor, "... V"],
    targets: Int[Tensor, "... F"],
    fields: Mapping[str, int],
    weights: Mapping[str, float] = WEIGHTS,
) -> tuple[Float[Tensor, ""], Float[Tensor, " F"]]:
    """(loss, accuracies): the sum of the fields' cross-entropies and the accuracy of each, where it has a target.

    Args:
        fields: Values of each field, which lie side by side in the logits.
        weights: Of the fields in the loss; 1 where nothing is said.
    """
    losses, accuracies = [], []
    parts = logits.split(list(fields.values()), dim=-1)
    for field, part, target in zip(fields, parts, targets.unbind(-1), strict=True):
        known = target != IGNORE
        count = known.sum().clamp(min=1)
        part = part.float()
        loss = functional.cross_entropy(part.flatten(0, -2), target.flatten(), ignore_index=IGNORE, reduction="sum")
        losses.append(weights.get(field, 1.0) * loss / count)
        accuracies.append(((part.argmax(-1) == target) & known).sum() / count)
    return torch.stack(losses).sum(), torch.stack(accuracies).detach()
