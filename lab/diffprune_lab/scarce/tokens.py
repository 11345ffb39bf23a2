"""What each visual token looks at: its item, the unit of the item that it shows, and what it can say of it by itself.

A unit is a piece of an item that is needed by itself: the head, the base and the badge of a thing, the rest of the
thing, and each letter of a sign. Nothing here reads a feature; all follows from the map of labels that is drawn along
with a picture.
"""

from typing import NamedTuple

import torch
from jaxtyping import Int, Int16
from torch import Tensor

from diffprune_lab.scarce import masks, world
from diffprune_lab.scarce.draw import PARTS

PATCH = 8
THINGS, LETTERS = world.MOST_THINGS, world.MOST_LETTERS
SIGN = THINGS + 1  # items: 0 none, 1 to 9 things, 10 the sign
HEAD, BASE, BADGE, REST = range(4)  # units of a thing: 1 + 4 * (thing from 0) + one of these
FIRST_LETTER = 1 + 4 * THINGS
PLATE = FIRST_LETTER + LETTERS
UNITS = PLATE + 1
NEEDED = 3  # pixels of an outline from which a patch shows it
IGNORE = -100

KINDS = ("ground", "inner", "outline", "badge", "letter", "plate", "litter")


class Tokens(NamedTuple):
    """Of each token, with N tokens a picture.

    Attributes:
        item: 0 none, 1 to 9 a thing, 10 the sign.
        unit: 0 none, else the unit that most of it shows.
        kind: One of KINDS.
        thing: The thing it shows, from 1, or 0.
        head: Whether it shows outline that tells the head of its thing.
        base: The same of the base.
        lower: Whether more of it shows the lower half of its thing than the upper.
        badge: Pixels of a badge.
        letter: Place of the letter it shows in the sign, or -1.
        litter: Which piece of litter it shows, or -1.
    """

    item: Int[Tensor, "B N"]
    unit: Int[Tensor, "B N"]
    kind: Int[Tensor, "B N"]
    thing: Int[Tensor, "B N"]
    head: Tensor
    base: Tensor
    lower: Tensor
    badge: Int[Tensor, "B N"]
    letter: Int[Tensor, "B N"]
    litter: Int[Tensor, "B N"]


def patches(labels: Int16[Tensor, "B H W"], patch: int = PATCH) -> Int16[Tensor, "B N P"]:
    """The pixels of each token."""
    batch, height, width = labels.shape
    split = labels.view(batch, height // patch, patch, width // patch, patch)
    return split.permute(0, 1, 3, 2, 4).reshape(batch, -1, patch * patch)


def read_tokens(labels: Int16[Tensor, "B 192 192"]) -> Tokens:
    """What the tokens of a picture look at."""
    pixels = patches(labels).long()  # [B, N, 64]
    owner, part = pixels // PARTS, pixels % PARTS
    counts = torch.zeros(*pixels.shape[:2], world.OWNERS, dtype=torch.int32, device=labels.device)
    counts.scatter_add_(2, owner, torch.ones_like(owner, dtype=torch.int32))
    things = counts[:, :, 1 : THINGS + 1]
    badges = counts[:, :, world.FIRST_BADGE : world.FIRST_LITTER]
    letters = counts[:, :, world.FIRST_LETTER : world.FIRST_BADGE]
    litter = counts[:, :, world.FIRST_LITTER :]
    most_thing, thing = (things + badges).max(-1)
    most_letter, letter = letters.max(-1)
    most_litter, litter_piece = litter.max(-1)
    plate = counts[:, :, world.PLATE_OWNER]
    badge = badges.amax(-1)

    of_thing = (owner > 0) & (owner <= THINGS)
    head, base = (((part == which) & of_thing).sum(-1) for which in (masks.HEAD, masks.BASE))
    upper = (((part == masks.UPPER) | (part == masks.HEAD) | (part == masks.UPPER_SIDE)) & of_thing).sum(-1)
    outline = ((part > masks.LOWER) & of_thing).sum(-1)

    on_thing, on_letter, on_plate = most_thing >= 4, most_letter >= 12, (plate + letters.sum(-1)) >= 4
    on_litter = (most_litter >= 6) & ~on_thing & ~on_letter
    thing = torch.where(on_thing, thing + 1, 0)
    letter = torch.where(on_letter & ~on_thing, letter, -1)
    on_head, on_base, on_badge = (on_thing & (count >= NEEDED) for count in (head, base, badge // 4))
    item = torch.where(on_thing, thing, torch.where(on_plate | on_letter, SIGN, 0))
    which = torch.where(on_badge, BADGE, torch.where(on_head & (head >= base), HEAD, torch.where(on_base, BASE, REST)))
    unit = torch.where(on_thing, 4 * (thing - 1) + which + 1, 0)
    unit = torch.where(item == SIGN, torch.where(letter >= 0, FIRST_LETTER + letter, PLATE), unit)
    kind = torch.zeros_like(item)
    kind = torch.where(on_litter, 6, kind)
    kind = torch.where(item == SIGN, torch.where(letter >= 0, 4, 5), kind)
    kind = torch.where(on_thing, torch.where(on_badge, 3, torch.where(outline >= NEEDED, 2, 1)), kind)
    return Tokens(
        item=item,
        unit=unit,
        kind=kind,
        thing=thing,
        head=on_head,
        base=on_base,
        lower=things.sum(-1) > 2 * upper,
        badge=torch.where(on_badge, badge, 0),
        letter=letter,
        litter=torch.where(on_litter, litter_piece, -1),
    )


def unit_pixels(labels: Int16[Tensor, "B 192 192"]) -> Int[Tensor, "B N U"]:
    """How many pixels of each unit each token shows; what an oracle ranks tokens by."""
    pixels = patches(labels).long()
    owner, part = pixels // PARTS, pixels % PARTS
    which = torch.where(part == masks.HEAD, HEAD, torch.where(part == masks.BASE, BASE, REST))
    unit = torch.where((owner > 0) & (owner <= THINGS), 4 * (owner - 1) + which + 1, 0)
    unit = torch.where(owner == world.PLATE_OWNER, PLATE, unit)
    is_letter = (owner >= world.FIRST_LETTER) & (owner < world.FIRST_BADGE)
    unit = torch.where(is_letter, FIRST_LETTER + owner - world.FIRST_LETTER, unit)
    is_badge = (owner >= world.FIRST_BADGE) & (owner < world.FIRST_LITTER)
    unit = torch.where(is_badge, 4 * (owner - world.FIRST_BADGE) + BADGE + 1, unit)
    counts = torch.zeros(*pixels.shape[:2], UNITS, dtype=torch.int64, device=labels.device)
    return counts.scatter_add_(2, unit, torch.ones_like(unit))


def shown_units(seen: Tokens) -> Tensor:
    """[B, N, U], true where a token shows a unit that is needed by itself: head, base, badge or letter."""
    shown = torch.zeros(*seen.item.shape, UNITS, dtype=torch.bool, device=seen.item.device)
    first = 4 * (seen.thing - 1).clamp(min=0) + 1
    for which, there in ((HEAD, seen.head), (BASE, seen.base), (BADGE, seen.badge > 0)):
        shown.scatter_(2, (first + which)[:, :, None], there[:, :, None])
    letter = seen.letter >= 0
    place = torch.where(letter, FIRST_LETTER + seen.letter, 0)
    shown |= torch.zeros_like(shown).scatter_(2, place[:, :, None], letter[:, :, None])
    return shown


def coverage(seen: Tokens, keep: Int[Tensor, "B K"]) -> Tensor:
    """The share of the needed units of the pictures of which at least one token is kept."""
    shown = shown_units(seen)
    kept = shown.gather(1, keep[:, :, None].expand(-1, -1, UNITS)).any(1)
    return kept.sum() / shown.any(1).sum().clamp(min=1)
