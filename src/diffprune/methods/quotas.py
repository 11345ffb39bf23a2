"""Budgets split over groups of tokens, and the tokens that fill them. Shared by methods; registers none."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diffprune.methods.similarity import descending, pack


def count_members(group: Int[Tensor, "B N"], chosen: Bool[Tensor, "B N"], num_groups: int) -> Int[Tensor, "B P"]:
    """How many chosen tokens each group has."""
    counts = torch.zeros(len(group), num_groups, dtype=torch.int64, device=group.device)
    return counts.scatter_add(-1, group, chosen.long())


def fill_up(
    quota: Int[Tensor, "B P"],
    room: Int[Tensor, "B P"],
    weight: Float[Tensor, "B P"] | Int[Tensor, "B P"],
    total: Int[Tensor, " B"],
) -> Int[Tensor, "B P"]:
    """Quotas that sum to `total`: what is missing goes to the heaviest group until it is full, then to the next."""
    order = weight.sort(dim=-1, descending=True, stable=True).indices
    free = (room - quota).gather(-1, order)
    missing = (total - quota.sum(-1))[:, None] - (free.cumsum(-1) - free)
    given = torch.minimum(missing.clamp(min=0), free)
    return quota.scatter_add(-1, order, given)


def take_quota(
    group: Int[Tensor, "B N"],
    value: Float[Tensor, "B N"],
    quota: Int[Tensor, "B P"],
    mask: Bool[Tensor, "B N"],
) -> Int[Tensor, "B K"]:
    """The `quota` largest values of each group: group by group, descending within it, -1 at the end."""
    num_groups = quota.shape[-1]
    group = group.masked_fill(~mask, 0)
    order = descending(value, mask)
    by_group = group.masked_fill(~mask, num_groups).gather(-1, order).sort(dim=-1, stable=True).indices
    order = order.gather(-1, by_group)  # group ascending, value descending, padding last
    sizes = count_members(group, mask, num_groups)
    own, real = group.gather(-1, order), mask.gather(-1, order)
    start = (sizes.cumsum(-1) - sizes).gather(-1, own)
    place = torch.arange(order.shape[-1], device=order.device) - start
    return pack(order, real & (place < quota.gather(-1, own)))
