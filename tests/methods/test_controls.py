"""The controls: random, uniform_grid, feature_norm, cls_attention, full and hidden_norm."""

import dataclasses

import pytest
import torch

from diffprune.inside.state import LayerState
from diffprune.methods.base import LayerPruner
from diffprune.methods.options import build_method
from diffprune.methods.uniform_grid import spread_evenly
from diffprune.types import VisualTokens
from tests.methods.examples import kept, make_tokens


def rows_and_columns(cells: list[int], columns: int) -> tuple[set[int], set[int]]:
    return {cell // columns for cell in cells}, {cell % columns for cell in cells}


# --- random -----------------------------------------------------------------------------------------------------------


def test_random_draws_anew_for_every_seed_and_every_image() -> None:
    tokens = VisualTokens(x=torch.zeros(2, 100, 4), seeds=(1, 2))
    k = torch.tensor([10, 10])
    first, same, other = (kept(build_method("random", seed=seed).select(tokens, k)) for seed in (0, 0, 1))
    assert first == same and first != other and first[0] != first[1]


def test_random_goes_by_the_picture_and_not_by_its_place() -> None:
    x = torch.randn(2, 30, 4)
    k = torch.tensor([5, 5])
    method = build_method("random")
    for seeds in ((7, 8), None):  # the pixels' hash, and the features' where there is none
        forth = kept(method.select(VisualTokens(x=x, seeds=seeds), k))
        back = kept(method.select(VisualTokens(x=x.flip(0), seeds=seeds and seeds[::-1]), k))
        assert forth == back[::-1] and forth[0] != forth[1]


def test_random_without_seeds_is_blind_to_padding() -> None:
    tokens = dataclasses.replace(make_tokens((10, 4)), seeds=None)
    alone = VisualTokens(x=tokens.x[1:, :4])
    method = build_method("random")
    assert kept(method.select(tokens, torch.tensor([3, 2])))[1] == kept(method.select(alone, torch.tensor([2])))[0]


def test_random_is_uniform() -> None:
    method = build_method("random")
    tokens = VisualTokens(x=torch.zeros(2000, 8, 1), seeds=tuple(range(2000)))
    counts = method.select(tokens, torch.full((2000,), 2)).flatten().bincount(minlength=8)
    assert (counts - 500).abs().max() < 100  # five standard deviations are 97


# --- uniform_grid -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k, height, width", [(64, 8, 8), (144, 12, 12), (128, 8, 16), (32, 4, 8)])
def test_common_budgets_make_a_full_lattice(k: int, height: int, width: int) -> None:
    cells = spread_evenly((24, 24), k)
    rows, columns = rows_and_columns(cells, 24)
    assert (len(cells), len(rows), len(columns)) == (k, height, width)
    assert sum(rows) / len(rows) == pytest.approx(11.5, abs=0.51)  # centred


@pytest.mark.parametrize("grid", [(24, 24), (7, 13), (1, 10), (9, 1)], ids=str)
def test_every_budget_is_met_exactly(grid: tuple[int, int]) -> None:
    total = grid[0] * grid[1]
    for k in range(0, total + 1, max(1, total // 20)):
        cells = spread_evenly(grid, k)
        assert len(cells) == k and cells == sorted(set(cells))
        assert all(0 <= cell < total for cell in cells)


def test_what_is_left_of_the_budget_is_spread_too() -> None:
    extra = set(spread_evenly((24, 24), 551)) - set(spread_evenly((24, 24), 529))  # 529 is a full 23 x 23 lattice
    rows, columns = rows_and_columns(sorted(extra), 24)
    assert len(extra) == 22
    assert max(rows) - min(rows) > 15 or max(columns) - min(columns) > 15


def test_a_line_of_tokens_is_taken_evenly() -> None:
    assert spread_evenly((1, 10), 2) == [2, 7]


def test_tokens_that_are_no_full_grid_are_taken_in_raster_order() -> None:
    tokens = VisualTokens(x=torch.zeros(1, 10, 4), grid=((3, 4),))  # two cells of the grid carry nothing
    assert kept(build_method("uniform_grid").select(tokens, torch.tensor([2]))) == [[2, 7]]


def test_uniform_grid_asks_for_the_grid() -> None:
    with pytest.raises(ValueError, match=r"VisualTokens\.grid"):
        build_method("uniform_grid").select(VisualTokens(x=torch.zeros(1, 4, 2)), torch.tensor([2]))


# --- feature_norm, cls_attention, full --------------------------------------------------------------------------------


def test_feature_norm_keeps_the_largest() -> None:
    tokens = VisualTokens(x=torch.tensor([[[3.0, 0.0], [1.0, 1.0], [0.0, -4.0], [0.1, 0.1]]]))
    assert kept(build_method("feature_norm").select(tokens, torch.tensor([2]))) == [[0, 2]]


def test_feature_norm_is_taken_in_full_precision() -> None:
    x = torch.full((1, 2, 4096), 300.0, dtype=torch.float16)  # the sum of squares is past float16
    x[0, 1] = 301.0
    assert kept(build_method("feature_norm").select(VisualTokens(x=x), torch.tensor([1]))) == [[1]]


def test_cls_attention_keeps_what_cls_looks_at() -> None:
    tokens = VisualTokens(x=torch.zeros(1, 4, 2), cls_attention=torch.tensor([[0.1, 0.4, 0.2, 0.3]]))
    assert kept(build_method("cls_attention").select(tokens, torch.tensor([2]))) == [[1, 3]]


def test_cls_attention_asks_for_the_attention() -> None:
    assert build_method("cls_attention").needs == {"cls_attention"}
    with pytest.raises(ValueError, match=r"VisualTokens\.cls_attention"):
        build_method("cls_attention").select(VisualTokens(x=torch.zeros(1, 4, 2)), torch.tensor([2]))


def test_full_keeps_everything_whatever_the_budget() -> None:
    assert kept(build_method("full").select(make_tokens((10, 4)), torch.tensor([1, 1]))) == [
        list(range(10)),
        list(range(4)),
    ]


# --- hidden_norm ------------------------------------------------------------------------------------------------------


def test_hidden_norm_keeps_the_visual_tokens_with_the_largest_state() -> None:
    method = build_method("hidden_norm")
    assert isinstance(method, LayerPruner)
    hidden = torch.zeros(2, 6, 3)
    hidden[:, :, 0] = torch.tensor([[9.0, 1.0, 5.0, 3.0, 4.0, 9.0], [0.0, 2.0, 7.0, 8.0, 9.0, 9.0]])
    state = LayerState(
        layer=2,
        hidden=hidden,
        attention_mask=torch.ones(2, 6, dtype=torch.bool),
        visual=torch.tensor([[1, 2, 3, 4], [1, 2, -1, -1]]),
    )
    assert kept(method.select_at(state, torch.tensor([2, 1]))) == [[1, 3], [1]]  # places in `visual`, not columns


def test_hidden_norm_drops_before_the_layer_of_its_option() -> None:
    method = build_method("hidden_norm", layer=5)
    assert isinstance(method, LayerPruner)
    assert method.stages(32, 576, 64) == {5: 64}
    with pytest.raises(ValueError, match="layer=5 is past the model's 4 layers"):
        method.stages(4, 576, 64)
    with pytest.raises(ValueError, match="layer=-1"):
        build_method("hidden_norm", layer=-1)
