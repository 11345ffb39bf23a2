"""Which visual tokens the language model sees in training: prefixes of any length and any make-up.

A frozen model meets a pruner's choice only after training, so it must have seen short prefixes of every kind:
scattered, one-sided, objects without background, background without objects. Every rule here gives each token a random
priority; the K tokens with the highest priority stay, in raster order. No pruning method is used: the rules know where
things are and nothing of how a pruner chooses.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor

SIGN = 5  # items are numbered 0 for background, 1 to 4 for things, 5 for the sign
FIRST_GLYPH = 6  # in an owner map: the letters of the sign or, where there are tags, the tag of thing i is 6 + i

# How often each rule is drawn.
RULES = {
    "random": 20,
    "objects": 24,  # things and signs first, background of any make-up where tokens are left
    "balanced": 14,  # as many tokens of each item
    "cores": 8,  # the same few tokens around the middle of each item
    "one_missing": 4,  # objects, but for one item; rare, for what is not shown is seldom there
    "one_only": 2,  # one item first
    "background": 5,
    "block": 8,  # a rectangle
    "half": 6,
    "stripes": 5,
    "blobs": 6,  # smooth random regions
    "direction": 5,  # tokens whose features point one way
}


def item_of_tokens(
    owner: Integer[Tensor, "B H W"], tagged: Bool[Tensor, " B"], patch: int, *, least: int
) -> tuple[Int[Tensor, "B N"], Int[Tensor, "B N"]]:
    """(items, covers): the item each token looks at, 0 for none, and how many of its pixels show any item.

    A token belongs to the item with the most pixels in its patch, if these are at least `least`.

    Args:
        owner: Per pixel 0 background, 1-4 thing, 5 plate, 6-9 letter.
        tagged: True where letters are the tags of things, False where they are a sign's.
        patch: Pixels along one side of a token's patch.
        least: Fewest pixels that make a token an item's.
    """
    batch, height, width = owner.shape
    owner = owner.to(torch.int8)
    of_letters = torch.where(tagged.view(-1, 1, 1), owner - (FIRST_GLYPH - 1), SIGN)
    owned_by = torch.where(owner >= FIRST_GLYPH, of_letters, owner)
    rows, columns = height // patch, width // patch
    patches = (
        owned_by.view(batch, rows, patch, columns, patch).permute(0, 1, 3, 2, 4).reshape(batch, rows * columns, -1)
    )
    counts = torch.stack([(patches == item).sum(-1) for item in range(1, SIGN + 1)], dim=-1)  # [B, N, 5]
    most, item = counts.max(-1)
    return torch.where(most >= least, item + 1, 0), counts.sum(-1)


class Places(NamedTuple):
    """Where each token stands: its row and column on a grid of so many rows and columns.

    Tokens of several grids that cover the same picture may come together.
    """

    row: Int[Tensor, " N"]
    column: Int[Tensor, " N"]
    rows: Int[Tensor, " N"]
    columns: Int[Tensor, " N"]


def raster(rows: int, columns: int, device: torch.device) -> Places:
    """The places of the tokens of one grid, row by row."""
    index = torch.arange(rows * columns, device=device)
    return Places(index // columns, index % columns, torch.full_like(index, rows), torch.full_like(index, columns))


def priorities(
    items: Int[Tensor, "B N"],
    features: Float[Tensor, "B N D"],
    rules: Int[Tensor, " B"],
    generator: torch.Generator | None = None,
    *,
    places: Places | None = None,
) -> Float[Tensor, "B N"]:
    """Token priorities, each row by the rule with its number in `RULES`; ties are broken at random.

    Without `places` the tokens stand on a square grid.
    """
    batch, tokens = items.shape
    device = items.device
    places = places or raster(math.isqrt(tokens), math.isqrt(tokens), device)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device=device)

    noise = uniform(batch, tokens)
    on_item = (items > 0).float()
    row, column = places.row / places.rows, places.column / places.columns  # [N], 0 to 1

    # The place of a token among those of its own item, in random order: 0 is the first.
    same = (items[:, :, None] == torch.arange(SIGN + 1, device=device)).float()  # [B, N, 6]
    order = noise.argsort(-1, descending=True)
    ranked = same.gather(1, order[:, :, None].expand(-1, -1, SIGN + 1)).cumsum(1)
    place = torch.empty_like(noise).scatter_(1, order, ranked.gather(2, items.gather(1, order)[:, :, None])[:, :, 0])

    # The middle of each item, and how far from it its tokens are.
    size = same.sum(1).clamp(min=1)  # [B, 6]
    middle_row, middle_column = (torch.einsum("bni,n->bi", same, at) / size for at in (row, column))
    away = (row - middle_row.gather(1, items)).abs() + (column - middle_column.gather(1, items)).abs()

    present = same[:, :, 1:].amax(1)  # [B, 5]
    chosen = (uniform(batch, SIGN) * present).argmax(-1, keepdim=True) + 1  # one item that is there, else item 1
    is_chosen = (items == chosen).float()

    center, half_size = uniform(batch, 2), 0.1 + 0.9 * uniform(batch, 2)
    from_center = torch.maximum(
        (row - center[:, :1]).abs() / half_size[:, :1], (column - center[:, 1:]).abs() / half_size[:, 1:]
    )
    angle = uniform(batch, 1) * 2 * math.pi
    along = row * angle.sin() + column * angle.cos()
    step = 2 + (uniform(batch, 1) * 5).floor()
    shift = (uniform(batch, 2) * 2).floor()  # stripes across, stripes down, or diagonal
    stripe = ((places.row * shift[:, :1] + places.column * (1 - shift[:, :1] * shift[:, 1:])) % step == 0).float()
    waves = torch.zeros_like(noise)
    for _ in range(4):
        wave, phase = (uniform(batch, 2) - 0.5) * 16, uniform(batch, 1) * 2 * math.pi
        waves = waves + (wave[:, :1] * row + wave[:, 1:] * column + phase).sin()
    direction = torch.randn(batch, features.shape[-1], generator=generator, device=device)
    pointing = torch.einsum("bnd,bd->bn", features.float(), direction)
    pointing = pointing / pointing.std(-1, keepdim=True).clamp(min=1e-6)
    unlike = (
        (features.float() - features.float().mean(1, keepdim=True)).square().mean(-1).sqrt()
    )  # clutter, on the ground

    regions = {
        "random": noise,
        "block": -from_center + 0.02 * noise,
        "half": along + 0.3 * uniform(batch, 1) * noise,
        "stripes": stripe + 0.5 * noise,
        "blobs": waves + 0.3 * noise,
        "direction": pointing + 0.1 * noise,
    }
    # Background beside the items is as scattered or one-sided as any: a scorer chooses it in its own way.
    others = torch.stack([*regions.values(), unlike + 0.1 * noise, noise, noise], dim=1)
    drawn = (uniform(batch) * others.shape[1]).long()
    beside = 0.5 * pick_rows(others, drawn).sigmoid()  # [B, N], 0 to 0.5

    by_rule = {
        **regions,
        "objects": torch.where(items > 0, 1 + 0.5 * noise, beside),
        "balanced": torch.where(items > 0, 1 - place / tokens, beside - 1),
        "cores": torch.where(items > 0, 1 - away, beside - 1) + 0.05 * noise,
        "one_missing": torch.where(is_chosen > 0, -1.0, on_item) + 0.5 * noise,
        "one_only": is_chosen + 0.5 * noise,
        "background": torch.where(items > 0, -1.0, beside) + 0.05 * noise,
    }
    return pick_rows(torch.stack([by_rule[rule] for rule in RULES], dim=1), rules)


def pick_rows(table: Float[Tensor, "B R N"], rules: Int[Tensor, " B"]) -> Float[Tensor, "B N"]:
    """Of each row of the table the line with the number given for it."""
    return table.gather(1, rules.view(-1, 1, 1).expand(-1, 1, table.shape[-1])).squeeze(1)


def draw_rules(batch: int, device: torch.device, generator: torch.Generator | None = None) -> Int[Tensor, " B"]:
    """One rule for each row, drawn in proportion to its weight in `RULES`."""
    weights = torch.tensor(list(RULES.values()), dtype=torch.float32, device=device)
    return torch.multinomial(weights, batch, replacement=True, generator=generator)


def take_prefix(priority: Float[Tensor, "B N"], keep: int) -> Int[Tensor, "B K"]:
    """Raster indices of the `keep` tokens with the highest priority, ascending."""
    return priority.topk(keep, dim=-1).indices.sort(dim=-1).values


def draw_length(tokens: int, share: float, place: float, *, full: float = 0.3, least: int = 8, step: int = 8) -> int:
    """A prefix length: all tokens with probability `full`, else log-uniform from `least` on, in multiples of `step`.

    Args:
        tokens: Tokens of the whole picture.
        share: Uniform in [0, 1); decides whether the prefix is whole.
        place: Uniform in [0, 1); the place on the logarithmic scale.
        full: How often all tokens stay.
        least: Fewest tokens.
        step: Lengths are multiples of it, so that a compiled model meets few shapes.
    """
    if share < full:
        return tokens
    length = least * (tokens / least) ** place
    return min(tokens, max(least, step * round(length / step)))
