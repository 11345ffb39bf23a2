"""FastV: the last prompt token's attention in the layer that just ran, and what its budget means."""

import pytest
import torch

from diffprune.methods.base import LayerPruner
from diffprune.methods.options import build_method
from tests.methods.examples import kept
from tests.methods.layer_states import HandMade, make_state


def fastv(**options: object) -> LayerPruner:
    method = build_method("fastv", **options)
    assert isinstance(method, LayerPruner)
    return method


def test_the_visual_tokens_the_last_prompt_token_attends_to_most_stay() -> None:
    torch.manual_seed(0)
    weights = torch.rand(2, 2, 8, 8)
    # Head means over columns 2..5 (row 0, last token 7) and 1..3 (row 1, last token 5, padding behind).
    weights[0, :, 7, 2:6] = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.5, 0.1, 0.1, 0.2]])  # 0.3, 0.25, 0.15, 0.25
    weights[1, :, 5, 1:4] = torch.tensor([[0.0, 0.2, 0.9], [0.3, 0.2, 0.0]])  # 0.15, 0.2, 0.45
    state = make_state(
        torch.randn(2, 8, 4),
        visual=[[2, 3, 4, 5], [1, 2, 3]],
        instruction=[[6, 7], [4, 5]],
        reader=HandMade(maps={1: weights, 2: torch.rand(2, 2, 8, 8)}),
        lengths=[8, 6],
    )
    assert kept(fastv().select_at(state, torch.tensor([2, 2]))) == [[0, 1], [1, 2]]  # of equals the first goes first
    assert kept(fastv().select_at(state, torch.tensor([1, 3]))) == [[0], [0, 1, 2]]


@pytest.mark.parametrize(
    ("layer", "average", "left"),
    [(1, 192, 180), (1, 128, 114), (1, 64, 47), (2, 192, 166), (2, 128, 98), (2, 64, 30), (3, 192, 152), (3, 64, 11)],
)
def test_a_budget_in_the_mean_over_layers_leaves_fewer_at_the_cut(layer: int, average: int, left: int) -> None:
    method = fastv(layer=layer, budget="average")
    assert method.stages(32, 576, average) == {layer: left}
    assert method.average(32, 576, average) == pytest.approx(average, abs=0.5)


def test_an_exact_budget_is_what_is_left_at_the_cut() -> None:
    assert fastv().stages(32, 576, 32) == {2: 32}
    assert fastv().average(32, 576, 32) == (2 * 576 + 30 * 32) / 32
    assert fastv(budget="average").stages(32, 576, 576) == {2: 576}
    assert fastv(budget="average").stages(32, 0, 0) == {2: 0}


def test_a_mean_below_what_the_first_layers_hold_is_refused_with_the_smallest() -> None:
    method = fastv(budget="average")
    with pytest.raises(ValueError, match=r"keep=32 cannot be the mean over 32 layers.*give 37 or more"):
        method.stages(32, 576, 32)
    assert method.stages(32, 576, 37) == {2: 1}
    with pytest.raises(ValueError, match="give 37 or more"):
        method.stages(32, 576, 36)


def test_a_layer_without_attention_before_it_is_refused() -> None:
    with pytest.raises(ValueError, match=r"layer=0 .* method random"):
        fastv(layer=0).stages(32, 576, 64)
    with pytest.raises(ValueError, match="layer=32 is past the model's 32 layers"):
        fastv(layer=32).stages(32, 576, 64)
    with pytest.raises(ValueError, match="budget='mean' is not known"):
        fastv(budget="mean")


def test_a_state_without_a_model_says_where_attention_comes_from() -> None:
    state = make_state(torch.zeros(1, 3, 2), visual=[[0, 1]], instruction=[[2]], reader=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"no reader of decoder layers; let PrunedVLM\.generate make it"):
        fastv().select_at(state, torch.tensor([1]))
