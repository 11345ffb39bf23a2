"""Parts of a picture that a classifier in training is shown."""

import pytest
import torch

from diffprune_lab.probes.hiding import PARTS, draw_shown


def drawn(x: torch.Tensor, count: int = 16, seed: int = 0, parts: str = "any") -> torch.Tensor:
    return draw_shown(x, patch=4, count=count, generator=torch.Generator().manual_seed(seed), parts=parts)


def neighbours(shown: torch.Tensor, side: int) -> torch.Tensor:
    """[B]: pairs of shown patches that touch."""
    grid = torch.zeros(len(shown), side * side).scatter(1, shown, 1.0).view(-1, side, side)
    return (grid[:, 1:] * grid[:, :-1]).sum((1, 2)) + (grid[:, :, 1:] * grid[:, :, :-1]).sum((1, 2))


@pytest.mark.parametrize("parts", PARTS)
def test_each_picture_shows_so_many_different_patches_and_the_seed_decides_which(parts: str):
    x = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    shown = drawn(x, parts=parts)
    assert shown.shape == (8, 16) and all(len(set(row)) == 16 for row in shown.tolist())
    assert shown.min() >= 0 and shown.max() < 64
    assert torch.equal(shown, drawn(x, parts=parts)) and not torch.equal(shown, drawn(x, seed=1, parts=parts))


def test_parts_are_scattered_for_some_pictures_and_connected_for_others():
    x = torch.randn(400, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    touching = neighbours(drawn(x, count=32), side=16)
    scattered = neighbours(torch.rand(400, 256, generator=torch.Generator().manual_seed(2)).topk(32).indices, side=16)
    assert touching.std() > 2 * scattered.std()
    assert (touching > scattered.max()).float().mean() > 0.2 and (touching <= scattered.median()).float().mean() > 0.1


def test_some_parts_are_of_one_colour_or_contrast():
    x = torch.zeros(200, 3, 32, 32)
    x[:, :, :, 16:] = torch.randn(200, 3, 32, 16, generator=torch.Generator().manual_seed(3))  # plain left, busy right
    on_the_right = (drawn(x) % 8 >= 4).float().mean(-1)
    assert (on_the_right > 0.95).float().mean() > 0.05 and (on_the_right < 0.05).float().mean() > 0.05


def test_near_parts_lie_around_a_place_that_may_be_anywhere():
    shown = drawn(torch.zeros(400, 3, 64, 64), parts="near")
    assert neighbours(shown, side=16).min() >= 12  # 16 in a square have 24, scattered ones 2
    rows, columns = shown // 16, shown % 16
    assert (rows.amax(-1) - rows.amin(-1)).max() <= 9 and (columns.amax(-1) - columns.amin(-1)).max() <= 9
    seen = torch.zeros(256).scatter_add(0, shown.flatten(), torch.ones(shown.numel()))
    assert seen.min() > 0
