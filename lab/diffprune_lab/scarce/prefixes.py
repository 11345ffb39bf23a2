"""Which visual tokens the language model sees in training: prefixes of any length and make-up.

Regions (scattered, blocks, halves, stripes, smooth blobs, one direction of the features) come from the first world's
rules. Rules about what is drawn give items, units of items, or the ground the first places. No pruning
method is among them.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffprune_lab.pretrain import prefixes
from diffprune_lab.pretrain.prefixes import pick_rows
from diffprune_lab.scarce import tokens
from diffprune_lab.scarce.tokens import Tokens

RULES = {
    "random": 14,
    "region": 14,
    "items": 14,  # things and signs first, ground of any make-up beside them
    "units": 20,  # heads, bases, badges and letters in turn, one of each, then a second
    "leaning": 16,  # any token may stay, items more likely, by any degree
    "unlike": 8,  # tokens unlike the mean of the picture
    "one_missing": 5,
    "one_only": 2,
    "ground": 5,
}
_REGIONS = tuple(
    list(prefixes.RULES).index(rule) for rule in ("random", "block", "half", "stripes", "blobs", "direction")
)


def draw_rules(batch: int, device: torch.device, generator: torch.Generator | None = None) -> Int[Tensor, " B"]:
    """One rule for each row, drawn in proportion to its weight in `RULES`."""
    weights = torch.tensor(list(RULES.values()), dtype=torch.float32, device=device)
    return torch.multinomial(weights, batch, replacement=True, generator=generator)


def priorities(
    seen: Tokens, features: Float[Tensor, "B N D"], rules: Int[Tensor, " B"], generator: torch.Generator | None = None
) -> Float[Tensor, "B N"]:
    """Token priorities, each row by the rule with its number in `RULES`; ties are broken at random."""
    item, device = seen.item, features.device
    batch, count = item.shape

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device=device)

    noise = uniform(batch, count)
    on_item = (item > 0).float()
    drawn = (uniform(batch) * len(_REGIONS)).long()
    regions = torch.tensor(_REGIONS, device=device)[drawn]
    region = prefixes.priorities(torch.zeros_like(item), features, regions, generator)
    beside = 0.5 * (region - region.mean(-1, keepdim=True)).sigmoid()  # 0 to 0.5
    unlike = (features.float() - features.float().mean(1, keepdim=True)).square().mean(-1).sqrt()

    # The place of a token among those of its own unit, in random order.
    order = noise.argsort(-1, descending=True)
    same = torch.nn.functional.one_hot(seen.unit.gather(1, order), tokens.UNITS)
    ranked = same.cumsum(1).gather(2, seen.unit.gather(1, order)[:, :, None])[:, :, 0].float()
    place = torch.empty_like(noise).scatter_(1, order, ranked)
    inside = (seen.unit > 0) & (seen.unit < tokens.FIRST_LETTER) & ((seen.unit - 1) % 4 == tokens.REST)
    slow = inside | (seen.unit == tokens.PLATE)
    place = torch.where(slow, 2 * place * (1 + uniform(batch, 1)), place)

    present = torch.nn.functional.one_hot(item, tokens.SIGN + 1).amax(1)[:, 1:].float()
    chosen = (uniform(batch, tokens.SIGN) * present).argmax(-1, keepdim=True) + 1
    is_chosen = (item == chosen).float()
    degree = 2 * uniform(batch, 1)

    by_rule = {
        "random": noise,
        "region": region,
        "items": torch.where(item > 0, 1 + 0.5 * noise, beside),
        "units": torch.where(item > 0, 1 - place / count, beside - 2),
        "leaning": noise + degree * on_item + 0.3 * beside,
        "unlike": unlike / unlike.std(-1, keepdim=True).clamp(min=1e-6) + degree * noise,
        "one_missing": torch.where(is_chosen > 0, -1.0, on_item) + 0.5 * noise,
        "one_only": is_chosen + 0.5 * noise,
        "ground": torch.where(item > 0, -1.0, beside) + 0.05 * noise,
    }
    return pick_rows(torch.stack([by_rule[rule].float() for rule in RULES], dim=1), rules)
