"""Average pooling: K cells tile the grid, each gives its mean."""

import statistics

import pytest
import torch

from diffprune.methods.average_pool import AveragePool, split_grid
from diffprune.types import VisualTokens


def pool(x: torch.Tensor, k: int, grid: tuple[int, int]) -> tuple[torch.Tensor, list[int]]:
    merged = AveragePool().reduce(VisualTokens(x=x, grid=(grid,)), torch.tensor([k]))
    return merged.x[0], merged.index[0].tolist()


def test_blocks_are_averaged_and_stand_at_their_middle() -> None:
    x = torch.arange(24.0).view(1, 24, 1)  # 4 x 6: four blocks of 2 x 3
    merged, positions = pool(x, 4, (4, 6))
    assert merged[:, 0].tolist() == [4.0, 7.0, 16.0, 19.0]
    assert positions == [7, 10, 19, 22]


def test_a_square_budget_pools_like_torch() -> None:
    x = torch.randn(1, 576, 5, generator=torch.Generator().manual_seed(0))
    merged, positions = pool(x, 64, (24, 24))
    picture = x[0].T.view(1, 5, 24, 24)
    torch.testing.assert_close(merged, torch.nn.functional.avg_pool2d(picture, 3)[0].flatten(1).T)
    assert positions[:3] == [25, 28, 31]


def test_a_cell_of_one_token_is_that_token() -> None:
    x = torch.arange(1.0, 7.0).view(1, 6, 1)
    assert pool(x, 6, (2, 3))[0][:, 0].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    own, _ = split_grid((2, 3), 4)
    means = [statistics.fmean(x[0, place, 0].item() for place in range(6) if own[place] == cell) for cell in range(4)]
    assert 1 in map(own.count, range(4)) and pool(x, 4, (2, 3))[0][:, 0].tolist() == means


@pytest.mark.parametrize("grid", [(24, 24), (3, 4), (1, 7), (5, 2), (7, 11)])
def test_any_budget_tiles_the_grid_into_exactly_k_even_cells(grid: tuple[int, int]) -> None:
    tokens = grid[0] * grid[1]
    for k in range(1, tokens + 1, max(1, tokens // 60)):
        own, middle = split_grid(grid, k)
        assert len(own) == tokens and set(own) == set(range(k))
        assert middle == sorted(set(middle)) and [own[token] for token in middle] == list(range(k))


@pytest.mark.parametrize("k, rows, columns", [(128, 8, 16), (64, 8, 8), (32, 4, 8), (144, 12, 12)])
def test_usual_budgets_are_full_rectangles(k: int, rows: int, columns: int) -> None:
    own, _ = split_grid((24, 24), k)
    assert len(set(own[:24])) == columns and len(set(own[::24])) == rows


def test_tokens_that_are_no_full_grid_are_pooled_in_runs() -> None:
    merged, positions = pool(torch.arange(10.0).view(1, 10, 1), 2, (3, 4))
    assert merged[:, 0].tolist() == [2.0, 7.0] and positions == [2, 7]


def test_average_pool_asks_for_the_grid() -> None:
    with pytest.raises(ValueError, match=r"VisualTokens\.grid"):
        AveragePool().reduce(VisualTokens(x=torch.zeros(1, 4, 2)), torch.tensor([2]))
