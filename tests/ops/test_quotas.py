"""Budgets of groups: what is missing goes to the heaviest, and each group gives its best."""

import torch

from diffprune.ops.quotas import fill_up, heaviest, take_quota


def test_missing_quota_goes_to_the_heaviest_group_with_room() -> None:
    quota = fill_up(
        torch.tensor([[1, 1, 1]]),
        torch.tensor([[4, 2, 3]]),
        heaviest(torch.tensor([[1.0, 3.0, 2.0]])),
        torch.tensor([6]),
    )
    assert quota.tolist() == [[1, 2, 3]]


def test_each_group_gives_its_best() -> None:
    group, rank = torch.tensor([[1, 0, 1, 0, 1, 0]]), torch.tensor([[4, 3, 0, 1, 2, 0]])
    mask = torch.arange(6)[None] < 5
    assert take_quota(group, rank, torch.tensor([[1, 2]]), mask).tolist() == [[3, -1, 2, 4, -1, -1]]


def test_a_quota_larger_than_its_group_takes_no_padding() -> None:
    group, rank, mask = torch.zeros(1, 4, dtype=torch.int64), torch.arange(4)[None], torch.arange(4)[None] < 1
    assert take_quota(group, rank, torch.tensor([[3]]), mask).tolist() == [[0, -1, -1, -1]]
