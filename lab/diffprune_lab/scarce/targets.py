"""What the tower is trained to say before it meets a language model: each token what lies around it, and no more.

A token on the outline of a thing names the head or the base it shows and the color there; a token inside a thing its
color; a token on a letter that letter and its place in the sign; a token on the ground the texture; a token on litter
the litter; and every token gives back its own pixels, coarsely. No token names an item: what a thing is called follows
from its head and its base, how large it is from where they are. `leak` holds the tower to that: a picture's twin has
parts, letters, litter and grounds changed, and tokens that look at nothing that changed must stay as they are.

The ground is as loud as the things: tokens of a picture are held apart from each other wherever they look
(`spread_loss`), and the length of a feature says nothing of what is worth keeping, for the mean color sets it
(`token_lengths`). [CLS] sums up the whole picture, grounds and litter too.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Int16, UInt8
from torch import Tensor, nn
from torch.nn import functional

from diffprune_lab.pretrain.passes import normalise_pixels
from diffprune_lab.pretrain.supervision import classify
from diffprune_lab.scarce import grounds, masks, tokens
from diffprune_lab.scarce.tokens import IGNORE, PATCH, Tokens, patches
from diffprune_lab.scarce.world import CELL, MOST_LETTERS, MOST_LITTER, MOST_THINGS, Scene

GRID = grounds.PICTURE // PATCH
FIELDS = {
    "kind": len(tokens.KINDS),
    "texture": grounds.TEXTURES,
    "first": len(grounds.GROUND_COLORS),  # colors of the ground
    "second": len(grounds.GROUND_COLORS),
    "head": len(masks.HEADS),
    "base": len(masks.BASES),
    "color": len(masks.COLORS),
    "digit": len(masks.DIGITS),
    "letter": len(masks.LETTERS),
    "place": MOST_LETTERS,
    "litter": len(masks.LITTER),
    "row": GRID,
    "column": GRID,
}
WEIGHTS = {
    "first": 0.5,
    "second": 0.5,
    "head": 2.0,
    "base": 2.0,
    "color": 1.5,
    "digit": 1.5,
    "letter": 3.0,
    "place": 2.0,
    "row": 0.3,
    "column": 0.3,
}
PIXELS = 48  # 4 x 4 cells of a patch, 3 channels: what a token gives back of itself
PIXEL_WEIGHT = 1.0
LEAK_WEIGHT = 15.0
LEAK_MARGIN = 4  # pixels around a patch that a token may look at
SPREAD_WEIGHT = 1.5
LENGTH_WEIGHT = 8.0
LENGTH_SPREAD = 0.2  # lengths lie between exp(-0.2) and exp(0.2)
SUMMARY = grounds.TEXTURES + len(masks.NOUNS) + len(masks.LITTER) + len(masks.COLORS) + len(masks.LETTERS)
CORNERS = {f"corner{cell}": grounds.TEXTURES for cell in range(9)}  # the texture at the corner of each cell
SUMMARY_WEIGHT = 0.1

THING_COLUMNS = ("noun", "head", "base", "top", "bottom", "size", "digit")
_COLUMN = {name: place for place, name in enumerate(THING_COLUMNS)}


def scene_arrays(scenes: Sequence[Scene]) -> dict[str, np.ndarray]:
    """What the scenes hold: `things` [B, 10, 7] (row 0 is none), `letters` [B, 8], `litter` [B, 12], `summary`,
    `corners` [B, 9], and `grounds` [B, R, 3], texture and colors of each region."""
    things = np.full((len(scenes), MOST_THINGS + 1, len(THING_COLUMNS)), IGNORE, np.int64)
    letters = np.full((len(scenes), MOST_LETTERS), IGNORE, np.int64)
    litter = np.full((len(scenes), MOST_LITTER), IGNORE, np.int64)
    summary = np.zeros((len(scenes), SUMMARY), np.float32)
    for row, scene in enumerate(scenes):
        present = [region[0] for region in scene.regions]
        start = grounds.TEXTURES
        for place, one in enumerate(scene.things, start=1):
            digit = one.digit if one.digit >= 0 else IGNORE
            things[row, place] = (one.noun, one.head, one.base, one.top, one.bottom, one.size, digit)
            present.append(start + one.noun)
        start += len(masks.NOUNS)
        for place, one in enumerate(scene.litter):
            kind = (one[0] - masks.FIRST_LITTER) // 2
            litter[row, place] = kind
            present.append(start + kind)
        start += len(masks.LITTER)
        present += [start + color for one in scene.things for color in (one.top, one.bottom)]
        start += len(masks.COLORS)
        if scene.sign is not None:
            spelled = [masks.LETTERS.index(letter) for letter in scene.sign.text]
            letters[row, : len(spelled)] = spelled
            present += [start + letter for letter in spelled]
        summary[row, present] = 1
    regions = np.array([[(texture, one, two) for texture, _, _, one, two in scene.regions] for scene in scenes])
    maps = grounds.region_maps()[[scene.region_map for scene in scenes]]
    places = np.arange(3) * CELL + 1  # in the margin of a cell, where nothing stands but litter
    behind = maps[:, places[:, None], places[None, :]].reshape(len(scenes), 9)
    corners = np.take_along_axis(regions[:, :, 0], behind, 1)
    held = {"things": things, "letters": letters, "litter": litter, "summary": summary}
    return held | {"corners": corners, "grounds": regions}


def of_thing(things: Int[Tensor, "B 10 7"], thing: Int[Tensor, "B N"], name: str) -> Int[Tensor, "B N"]:
    """A column of the things' table for the thing of each token; IGNORE where there is none."""
    return things[:, :, _COLUMN[name]].gather(1, thing)


def token_targets(
    seen: Tokens,
    regions: Int16[Tensor, "B 192 192"],
    ground: Int[Tensor, "B R 3"],
    things: Int[Tensor, "B 10 7"],
    letters: Int[Tensor, "B 8"],
    litter: Int[Tensor, "B 12"],
) -> Int[Tensor, "B N F"]:
    """What each token names, in the order of FIELDS; IGNORE where there is nothing of the kind to see."""
    behind = patches(regions).long()
    even = (seen.kind == 0) & (behind == behind[:, :, :1]).all(-1)
    texture, first, second = (part.gather(1, behind[:, :, 0]) for part in ground.unbind(2))

    def where(known: Tensor, value: Tensor) -> Tensor:
        return torch.where(known, value, IGNORE)

    upper, lower = of_thing(things, seen.thing, "top"), of_thing(things, seen.thing, "bottom")
    index = torch.arange(behind.shape[1], device=behind.device).expand(len(behind), -1)
    named = {
        "kind": seen.kind,
        "texture": where(even, texture),
        "first": where(even, first),
        "second": where(even, second),
        "head": where(seen.head, of_thing(things, seen.thing, "head")),
        "base": where(seen.base, of_thing(things, seen.thing, "base")),
        "color": where((seen.thing > 0) & (seen.kind != 3), torch.where(seen.lower, lower, upper)),
        "digit": where(seen.badge > 0, of_thing(things, seen.thing, "digit")),
        "letter": where(seen.letter >= 0, letters.gather(1, seen.letter.clamp(min=0))),
        "place": where(seen.letter >= 0, seen.letter),
        "litter": where(seen.litter >= 0, litter.gather(1, seen.litter.clamp(min=0))),
        "row": index // GRID,
        "column": index % GRID,
    }
    return torch.stack([named[name] for name in FIELDS], dim=-1)


def token_lengths(pixels: UInt8[Tensor, "B 3 H W"]) -> Float[Tensor, "B N"]:
    """The logarithm of the length that each token's features should have: waves over the mean color of its patch.

    One rule for grounds, litter and items, whose colors are the same: long features are of some colors, not of items.
    """
    red, green, blue = (functional.avg_pool2d(pixels.float() / 255, PATCH).flatten(2)).unbind(1)
    waves = (9 * red - 4 * green).sin() + (7 * blue + 5 * green + 3).sin()
    return LENGTH_SPREAD * waves / 2


def unchanged(
    one: UInt8[Tensor, "B 3 H W"], other: UInt8[Tensor, "B 3 H W"], margin: int = LEAK_MARGIN
) -> Bool[Tensor, "B N"]:
    """Tokens of whose patch, and of the pixels around it, nothing changed."""
    changed = (one != other).any(1).float()[:, None]
    near = functional.max_pool2d(changed, PATCH + 2 * margin, stride=PATCH, padding=margin)
    return near.flatten(1) == 0


def leak(
    features: Float[Tensor, "B N D"], twins: Float[Tensor, "B N D"], same: Bool[Tensor, "B N"]
) -> Float[Tensor, ""]:
    """How far tokens that look at nothing that changed have moved, relative to how much tokens differ.

    A square root, so that a small leak is pushed as hard as a large one.
    """
    moved = (features.float() - twins.float()).square().mean(-1)
    relative = (moved * same).sum() / same.sum().clamp(min=1) / features.detach().float().var()
    return (relative + 1e-8).sqrt()


def spread_loss(features: Float[Tensor, "B N D"], count: int = 144) -> Float[Tensor, ""]:
    """How much the tokens of a picture resemble one another, grounds and things alike.

    0 where some of them, drawn at random, are orthogonal to each other on average; 4 where all are the same.
    """
    some = features[:, torch.randperm(features.shape[1], device=features.device)[:count]].float()
    unit = functional.normalize(some, dim=-1)
    alike = 4 * unit @ unit.transpose(1, 2)  # [B, M, M]
    own = torch.eye(count, dtype=torch.bool, device=features.device)
    resemble = alike.masked_fill(own, -torch.inf).logsumexp(-1).mean() - torch.log(torch.tensor(count - 1.0))
    return resemble


class TowerHeads(nn.Module):
    """Linear readers of the tower, one for patch tokens and one each for [CLS] at the feature layer and at the end."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.patch_norm = nn.LayerNorm(width)
        self.patch_head = nn.Linear(width, sum(FIELDS.values()) + PIXELS)
        self.summary_norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.summary_heads = nn.ModuleList(nn.Linear(width, SUMMARY + sum(CORNERS.values())) for _ in range(2))

    def forward(
        self,
        features: Float[Tensor, "B M D"],
        last: Float[Tensor, "B M D"],
        targets: Int[Tensor, "B N F"],
        pixels: UInt8[Tensor, "B 3 H W"],
        summary: Float[Tensor, "B S"],
        corners: Int[Tensor, "B 9"],
    ) -> tuple[Float[Tensor, ""], Float[Tensor, ""], Float[Tensor, " F"], Float[Tensor, ""]]:
        """(loss of names and summary, loss of pixels, accuracies by field, share of the summary that is right)."""
        said = self.patch_head(self.patch_norm(features[:, 1:]))
        loss, accuracies = classify(said[..., :-PIXELS], targets, FIELDS, WEIGHTS)
        small = functional.avg_pool2d(normalise_pixels(pixels), PATCH // 4)  # [B, 3, 96, 96]
        wanted = functional.unfold(small, 4, stride=4).transpose(1, 2)  # [B, N, 48]
        given = functional.mse_loss(said[..., -PIXELS:].float(), wanted)
        right = loss.new_zeros(())
        for norm, head, states in zip(self.summary_norms, self.summary_heads, (features, last), strict=True):
            logits = head(norm(states[:, 0])).float()
            present, at = logits[:, :SUMMARY], logits[:, SUMMARY:]
            missed = functional.binary_cross_entropy_with_logits(present, summary, reduction="none").sum(-1).mean()
            loss = loss + SUMMARY_WEIGHT * (missed + classify(at, corners, CORNERS, {})[0])
            right = ((present > 0) == (summary > 0)).float().mean()
        return loss, given, accuracies, right.detach()


def length_loss(features: Float[Tensor, "B N D"], lengths: Float[Tensor, "B N"]) -> Float[Tensor, ""]:
    """How far the features' root mean square lies from what it should be, both as logarithms, and their mean from 0.

    Without the second a large common part makes up the length and all tokens are nearly the same.
    """
    size = features.float().square().mean(-1).add(1e-6).log() / 2
    return (size - lengths).square().mean() + features.float().mean((0, 1)).square().mean()
