"""PyramidDrop: its stages, and the one query row that ranks."""

import pytest
import torch

from diffprune.methods.base import LayerPruner
from diffprune.methods.options import build_method
from tests.methods.examples import kept
from tests.methods.layer_states import HandMade, make_state, one_row


def pyramiddrop(**options: object) -> LayerPruner:
    method = build_method("pyramiddrop", **options)
    assert isinstance(method, LayerPruner)
    return method


def test_the_layer_about_to_run_ranks_by_the_last_instruction_token() -> None:
    width = 8  # column 7 is padding, so the last instruction token is 6
    maps = {
        7: one_row({6: [0, 0, 0.9, 0, 0.9, 0]}, width=width),  # the layer that just ran
        8: one_row({6: [0, 0.1, 0.3, 0.2, 0.1, 0.25], 7: [0, 0.9, 0, 0, 0.9, 0]}, width=width),
    }
    state = make_state(torch.randn(1, width, 4), [[1, 2, 3, 4, 5]], [[6]], HandMade(maps=maps), layer=8, lengths=[7])
    assert kept(pyramiddrop().select_at(state, torch.tensor([2]))) == [[1, 4]]
    assert kept(pyramiddrop().select_at(state, torch.tensor([3]))) == [[1, 2, 4]]


def test_the_release_s_stages_are_halves_of_all_tokens_rounded_down() -> None:
    method = pyramiddrop(native=True)
    assert method.stages(32, 576, 72) == {8: 288, 16: 144, 24: 72}  # an eighth, the release's own last stage
    assert method.average(32, 576, 72) == 270
    assert method.stages(32, 575, 71) == {8: 287, 16: 143, 24: 71}
    assert method.stages(32, 576, 576) == {8: 576, 16: 576, 24: 576}
    assert method.positions == "packed" and pyramiddrop().positions == "original"


@pytest.mark.parametrize(
    ("keep", "stages"), [(64, [288, 144, 64]), (128, [288, 144, 128]), (200, [288, 200, 200]), (400, [400, 400, 400])]
)
def test_an_exact_budget_takes_the_last_stage_s_place_and_no_stage_holds_fewer(keep: int, stages: list[int]) -> None:
    for native in (False, True):
        assert pyramiddrop(native=native).stages(32, 576, keep) == dict(zip((8, 16, 24), stages, strict=True))


def test_other_depths_are_cut_at_the_same_quarters() -> None:
    assert list(pyramiddrop().stages(28, 576, 64)) == [7, 14, 21]
    assert pyramiddrop().stages(3, 16, 4) == {1: 8, 2: 4}  # two of the stages fall on one layer: the smaller counts
    assert pyramiddrop(layers=[2, 4], ratios=[0.5, 0.25]).stages(8, 16, 3) == {2: 8, 4: 3}


def test_a_budget_in_the_mean_over_layers_needs_what_the_first_quarter_holds() -> None:
    method = pyramiddrop(budget="average")
    for keep in (150, 192, 270, 400):
        assert method.average(32, 576, keep) == pytest.approx(keep, abs=0.5)
    with pytest.raises(ValueError, match=r"keep=128 cannot be the mean over 32 layers: the first 8 hold all 576.*145"):
        method.stages(32, 576, 128)
    assert method.stages(32, 576, 145) == {8: 2, 16: 1, 24: 1}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"layers": (8, 16)}, "differ in number"),
        ({"layers": (8, 8, 16)}, "do not rise"),
        ({"ratios": (0.5, 0.6, 0.1)}, "do not fall"),
        ({"ratios": (0.5, 0.25, 0.0)}, "do not fall"),
        ({"budget": "mean"}, "budget='mean'"),
    ],
)
def test_stages_that_make_no_sense_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        pyramiddrop(**options)


def test_a_layer_past_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="layer=24 is past the model's 20 layers"):
        pyramiddrop(layers=(8, 16, 24)).stages(20, 576, 64)
