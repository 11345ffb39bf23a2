"""Parts of a picture that a classifier in training is shown."""

import torch

from diffprune_lab.probes.hiding import draw_shown


def drawn(num_images: int, side: int, seed: int = 0) -> torch.Tensor:
    return draw_shown(num_images, side, 16, torch.Generator().manual_seed(seed))


def neighbours(shown: torch.Tensor, side: int) -> torch.Tensor:
    """[B]: pairs of shown patches that touch."""
    grid = torch.zeros(len(shown), side * side).scatter(1, shown, 1.0).view(-1, side, side)
    return (grid[:, 1:] * grid[:, :-1]).sum((1, 2)) + (grid[:, :, 1:] * grid[:, :, :-1]).sum((1, 2))


def test_each_picture_shows_so_many_different_patches_and_the_seed_decides_which():
    shown = drawn(8, 8)
    assert shown.shape == (8, 16) and all(len(set(row)) == 16 for row in shown.tolist())
    assert shown.min() >= 0 and shown.max() < 64
    assert torch.equal(shown, drawn(8, 8)) and not torch.equal(shown, drawn(8, 8, seed=1))


def test_parts_lie_around_a_place_that_may_be_anywhere():
    shown = drawn(400, 16)
    assert neighbours(shown, side=16).min() >= 12  # 16 in a square have 24, scattered ones 2
    rows, columns = shown // 16, shown % 16
    assert (rows.amax(-1) - rows.amin(-1)).max() <= 9 and (columns.amax(-1) - columns.amin(-1)).max() <= 9
    seen = torch.zeros(256).scatter_add(0, shown.flatten(), torch.ones(shown.numel()))
    assert seen.min() > 0
