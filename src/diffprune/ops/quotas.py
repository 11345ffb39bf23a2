"""Budgets split over groups of tokens, and the tokens that fill them."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def count_members(group: Int[Tensor, "B N"], chosen: Bool[Tensor, "B N"], num_groups: int) -> Int[Tensor, "B P"]:
    """How many chosen tokens each group has."""
    counts = torch.zeros(len(group), num_groups, dtype=torch.int64, device=group.device)
    return counts.scatter_add(-1, group, chosen.long())


def heaviest(weight: Float[Tensor, "B P"] | Int[Tensor, "B P"]) -> Int[Tensor, "B P"]:
    """Groups from the heaviest to the lightest, of equal ones the first."""
    return weight.sort(dim=-1, descending=True, stable=True).indices


def fill_up(
    quota: Int[Tensor, "B P"], room: Int[Tensor, "B P"], order: Int[Tensor, "B P"], total: int | Int[Tensor, " B"]
) -> Int[Tensor, "B P"]:
    """Quotas that sum to `total`: what is missing goes to the first group of `order` until it is full, and so on."""
    free = (room - quota).gather(-1, order)
    missing = (total - quota.sum(-1))[:, None] - (free.cumsum(-1) - free)
    return quota.scatter_add(-1, order, missing.clamp_(min=0).minimum(free))


def take_quota(
    group: Int[Tensor, "B N"],
    rank: Int[Tensor, "B N"],
    quota: Int[Tensor, "B P"],
    mask: Bool[Tensor, "B N"],
    sizes: Int[Tensor, "B P"] | None = None,
) -> Int[Tensor, "B N"]:
    """The `quota` first tokens of each group by rank, group by group, among -1 for all others.

    Args:
        group: The group of each token, 0 at padding.
        rank: Each token's own place, from 0 to 2 N - 1.
        sizes: Real tokens of each group, where they have been counted.
    """
    num_groups, num_tokens = quota.shape[-1], mask.shape[-1]
    key = rank.add(group, alpha=2 * num_tokens).masked_fill(~mask, 2 * num_tokens * num_groups)
    order = key.sort(dim=-1).indices  # group by group, padding last
    sizes = count_members(group, mask, num_groups) if sizes is None else sizes
    own = group.gather(-1, order)
    # Where a group's share of the list ends; padding, behind all groups, is past the end of its own.
    end = sizes.cumsum(-1) - sizes + quota.minimum(sizes)
    place = torch.arange(num_tokens, device=order.device)
    return torch.where(place < end.gather(-1, own), order, -1)
