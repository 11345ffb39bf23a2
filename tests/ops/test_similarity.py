"""Walks through a list that skip what is too alike, and the small sorts around them."""

import pytest
import torch

from diffprune.ops import cosine_matrix
from diffprune.ops.similarity import descending, pack, raster, walk


@pytest.mark.parametrize("seed", range(4))
def test_a_walk_decided_at_once_is_the_walk_token_by_token(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(40) < torch.tensor([40, 25])[:, None]
    similarity = cosine_matrix(torch.randn(2, 40, 3, generator=generator))

    def limit(number: torch.Tensor) -> torch.Tensor:
        return 1 - number * 0.02

    alive = walk(similarity, mask, limit)
    for row, count in enumerate((40, 25)):
        survivors: list[int] = []
        for token in range(count):
            if all(similarity[row, token, other] <= 1 - (n + 1) * 0.02 for n, other in enumerate(survivors)):
                survivors.append(token)
        assert alive[row].nonzero()[:, 0].tolist() == survivors
        assert 1 < len(survivors) < count


def test_equal_values_go_by_index_and_padding_goes_last() -> None:
    mask = torch.tensor([[True, True, False, True]])
    assert descending(torch.tensor([[1.0, 2.0, 9.0, 2.0]]), mask).tolist() == [[1, 3, 0, 2]]


def test_packing_keeps_the_order_and_raster_sorts() -> None:
    packed = pack(torch.tensor([[5, 2, 7], [1, 0, 3]]), torch.tensor([[True, False, True], [False, True, False]]), 2)
    assert packed.tolist() == [[5, 7], [0, -1]]
    assert raster(torch.tensor([[7, -1, 5]])).tolist() == [[5, 7, -1]]


def test_a_long_chain_is_settled_link_by_link() -> None:
    """Each token strikes out the next alone, if it is alive itself: every other one survives."""
    length = 41
    similarity = torch.zeros(1, length, length)
    similarity[0, torch.arange(1, length), torch.arange(length - 1)] = 1.0
    alive = walk(similarity, torch.ones(1, length, dtype=torch.bool), lambda number: torch.full(number.shape, 0.5))
    assert alive[0].nonzero()[:, 0].tolist() == list(range(0, length, 2))
