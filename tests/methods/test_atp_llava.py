"""ATP-LLaVA: two scores, two thresholds, and how many tokens are above either."""

import dataclasses

import pytest
import torch

from diffprune.inside.state import LayerState, Prompt
from diffprune.methods.atp_llava import ATPLLaVA, Scores, lattice_score, text_attention, to_unit
from diffprune.types import Origin, VisualTokens
from tests.methods.examples import kept, make_method
from tests.methods.layer_states import HandMade, make_state


def atp_llava(**options: object) -> ATPLLaVA:
    method = make_method("atp_llava", **options)
    assert isinstance(method, ATPLLaVA)
    return method


def set_thresholds(method: ATPLLaVA, redundancy: float, spatial: float) -> None:
    """Equal thresholds at every cut, whatever the prompt."""
    for own in method.thresholds:
        torch.nn.init.zeros_(own.heads.weight)  # type: ignore[union-attr, arg-type]
        own.heads.bias.data = torch.tensor([redundancy, spatial]).logit()  # type: ignore[union-attr]


def state() -> LayerState:
    """One prompt: text, four visual tokens of a 2 x 2 grid, two words. Scores 0, 1/2, 1, 1/4 and 0, 0, 1, 1/2."""
    width = 7
    maps = torch.zeros(1, 2, width, width)
    maps[0, :, 5, 1:5] = torch.tensor([[0.0, 0.0, 0.2, 0.1], [0.0, 0.0, 0.2, 0.1]])
    maps[0, :, 6, 1:5] = torch.tensor([[0.0, 0.0, 0.4, 0.0], [0.0, 0.0, 0.0, 0.2]])  # means 0, 0, 0.2, 0.1
    products = torch.zeros(1, 1, width, width)
    products[0, 0, 1:5, 1:5] = torch.tensor([-1.0, 1.0, 3.0, 0.0])
    made = make_state(
        torch.randn(1, width, 24),
        visual=[[1, 2, 3, 4]],
        instruction=[[5, 6]],
        reader=HandMade(maps={0: maps}, products={0: products}),
        layer=1,
    )
    index = torch.tensor([[-1, 0, 1, 2, 3, -1, -1]])
    origin = Origin(tokens=VisualTokens(x=torch.zeros(1, 4, 16), grid=(2, 2)), index=index)
    assert isinstance(made.prompt, Prompt)
    return dataclasses.replace(made, prompt=dataclasses.replace(made.prompt, origin=origin))


def test_redundancy_is_the_mean_of_self_and_cross_scores_between_0_and_1() -> None:
    found = atp_llava().scores(state())
    torch.testing.assert_close(text_attention(state())[0, 1:5], torch.tensor([0.0, 0.0, 0.2, 0.1]))
    torch.testing.assert_close(found.redundancy, torch.tensor([[0.0, 0.25, 1.0, 0.375]]))


def test_coarser_lattices_score_higher_and_the_rest_nothing() -> None:
    places = torch.tensor([[[0, 0], [1, 1], [1, 3], [4, 4], [2, 2], [1, 0]]])
    # Stride 2 holds odd rows and columns (1 - 3/4), stride 3 those of remainder 1 (1 - 1/3).
    expected = torch.tensor([[0.0, 2 / 3, 0.25, 2 / 3, 0.0, 0.0]])
    torch.testing.assert_close(lattice_score(places, (2, 3), 3.0), expected)


def test_stretching_counts_the_tokens_that_count() -> None:
    score = torch.tensor([[2.0, 4.0, 3.0, 99.0], [5.0, 5.0, 5.0, 5.0]])
    counted = torch.tensor([[True, True, True, False], [True, True, False, False]])
    out = to_unit(score, counted)
    assert out.isfinite().all() and out[0].tolist() == [0.0, 1.0, 0.5, 1.0] and out[1, 0] == 0.0


def test_exactly_k_are_kept_by_how_far_they_are_above_either_threshold() -> None:
    method = atp_llava(strides=[2])
    set_thresholds(method, 0.5, 0.1)
    # Token 3, at (1, 1), is on the lattice: 0.25 - 0.1 = 0.15. By redundancy: -0.5, -0.25, 0.5, -0.125.
    margins = torch.maximum(*method.scores(state()).above)
    torch.testing.assert_close(margins, torch.tensor([[-0.1, -0.1, 0.5, 0.15]]))
    assert kept(method.select_at(state(), torch.tensor([2]))) == [[2, 3]]
    assert kept(method.select_at(state(), torch.tensor([3]))) == [[0, 2, 3]]  # of equals the first


def test_adaptive_budgets_keep_what_is_above_a_threshold_and_never_more_than_k() -> None:
    method = atp_llava(strides=[2], budget="adaptive")
    set_thresholds(method, 0.5, 0.1)
    assert kept(method.select_at(state(), torch.tensor([3]))) == [[2, 3]]
    assert kept(method.select_at(state(), torch.tensor([1]))) == [[2]]
    set_thresholds(method, 0.999, 0.999)
    assert kept(method.select_at(state(), torch.tensor([3]))) == [[2]]  # at least one
    assert kept(method.select_at(state(), torch.tensor([4]))) == [[0, 1, 2, 3]]  # all may stay


def test_training_masks_a_token_by_its_softer_threshold_and_pays_for_depth_and_distance() -> None:
    method = atp_llava(strides=[2], sharpness=10.0)
    set_thresholds(method, 0.5, 0.1)
    decision = method.decide(state(), torch.tensor([2]), tau=1.0)
    expected = torch.sigmoid(10 * torch.tensor([[-0.1, -0.1, 0.5, 0.15]]))
    torch.testing.assert_close(decision.soft_mask, expected)
    # Cuts of 4 layers: 1, 2 and 3; layer 1 is at depth 8 of 32.
    share = expected.sum() / 4
    torch.testing.assert_close(decision.penalty, (0.05 * 8 * share + 0.2 * (share - 0.5).abs() / 3)[None])
    weaker = method.decide(
        dataclasses.replace(state(), soft_mask=torch.tensor([[1.0, 1.0, 0.9, 0.6]])), torch.tensor([2]), tau=1.0
    )
    assert weaker.penalty < decision.penalty  # type: ignore[operator]
    decision.penalty.backward()  # type: ignore[union-attr]
    first = method.thresholds[0]
    assert first.heads.bias.grad is not None and first.heads.bias.grad.abs().min() > 0  # type: ignore[union-attr]


def test_stages_fall_by_one_share_to_exactly_k() -> None:
    method = atp_llava()
    assert method.stages(32, 576, 64) == {4: 277, 14: 133, 24: 64}
    assert list(method.stages(6, 576, 64)) == [1, 3, 5]
    for keep in (128, 64, 32):
        assert method.stages(32, 576, keep)[24] == keep
    with pytest.raises(ValueError, match=r"keep=64 cannot be the mean over 32 layers.*give 73 or more"):
        atp_llava(budget="average").stages(32, 576, 64)


def test_options_that_make_no_sense_are_refused() -> None:
    for options, said in (
        ({"layers": [4, 2]}, r"layers=\(4, 2\) do not rise"),
        ({"strides": [0]}, r"strides=\(0,\) has one below 1"),
        ({"sharpness": 0.0}, r"sharpness=0\.0"),
        ({"budget": "half"}, "budget='half' is not known"),
    ):
        with pytest.raises(ValueError, match=said):
            atp_llava(**options)


def test_thresholds_lie_between_0_and_1() -> None:
    scores = Scores(torch.zeros(1, 2), torch.zeros(1, 2), atp_llava().thresholds[0](torch.tensor([[3.0, -9.0]])))
    assert scores.thresholds.min() > 0 and scores.thresholds.max() < 1
    with pytest.raises(ValueError, match="does not say where its tokens come from"):
        bare = state()
        assert bare.prompt is not None
        atp_llava().scores(dataclasses.replace(bare, prompt=dataclasses.replace(bare.prompt, origin=None)))
