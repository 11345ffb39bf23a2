"""SparseVLM: who rates, what is kept, what is recycled, and what its budgets mean."""

import pytest
import torch
from torch import Tensor

from diffprune.inside.budget import layer_average
from diffprune.inside.state import Cut, LayerState, Prompt
from diffprune.methods import sparsevlm as module
from diffprune.methods.options import build_method
from diffprune.methods.sparsevlm import (
    LISTS,
    SparseVLM,
    density_peaks,
    keep_and_merge,
    num_recycled,
    split_budget,
    text_raters,
)
from tests.methods.examples import kept
from tests.methods.layer_states import HandMade, make_state


def sparsevlm(name: str = "sparsevlm", **options: object) -> SparseVLM:
    method = build_method(name, **options)
    assert isinstance(method, SparseVLM)
    return method


def choice(method: SparseVLM, state: LayerState, k: int) -> list[int]:
    cut = method.select_at(state, torch.tensor([k]))
    return kept(cut.keep if isinstance(cut, Cut) else cut)[0]


# --- raters -----------------------------------------------------------------------------------------------------------


def test_raters_are_the_words_that_the_picture_resembles_more_than_the_average() -> None:
    # Two visual tokens (columns 1, 2), text before (0) and behind (3, 4, 5). Logits of the visual tokens to the words:
    # (0, 2, 0) and (0, 2, 1), so word 4 gets most of both; word 0 would win but stands before the picture.
    embeds = torch.zeros(1, 6, 3)
    embeds[0, 1], embeds[0, 2] = torch.tensor([2.0, 0.0, 9.0]), torch.tensor([2.0, 1.0, 9.0])
    embeds[0, 4], embeds[0, 5], embeds[0, 0] = (
        torch.tensor([1.0, 0.0, 0.0]),
        torch.tensor([0.0, 1.0, 0.0]),
        torch.tensor([0.0, 0.0, 9.0]),
    )
    visual = torch.tensor([[0, 1, 1, 0, 0, 0]]).bool()
    prompt = Prompt(embeds=embeds, visual=visual, instruction=torch.tensor([[0, 0, 0, 1, 1, 1]]).bool())
    share = torch.stack([torch.tensor([0.0, 2.0, 0.0]), torch.tensor([0.0, 2.0, 1.0])]).softmax(-1).mean(0)
    assert (share > share.mean()).tolist() == [False, True, False]
    assert text_raters(prompt).tolist() == [[False, False, False, False, True, False]]


def test_words_that_all_weigh_the_same_all_rate_and_a_prompt_without_picture_has_none() -> None:
    visual = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0]]).bool()
    instruction = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]).bool()
    prompt = Prompt(embeds=torch.ones(2, 4, 3), visual=visual, instruction=instruction)
    assert text_raters(prompt).tolist() == [[False, False, True, True], [False] * 4]


# --- scores -----------------------------------------------------------------------------------------------------------


def rated(weights: Tensor, bias: Tensor | None = None) -> LayerState:
    """Four visual tokens (0 to 3); of the words 4, 5, 6 the last two are raters, by their embeddings."""
    embeds = torch.zeros(1, 7, 2)
    embeds[0, :4, 0] = 3.0
    embeds[0, 5:, 0] = 1.0
    reader = HandMade(maps={2: weights}, bias=torch.ones(1, 7, 7) if bias is None else bias)
    hidden = torch.arange(14.0).reshape(1, 7, 2)
    return make_state(hidden, [[0, 1, 2, 3]], [[4, 5, 6]], reader, layer=3, embeds=embeds)


def test_a_visual_token_is_worth_what_raters_and_heads_pay_on_average() -> None:
    weights = torch.zeros(1, 2, 7, 7)
    weights[0, :, 4, :4] = torch.tensor([9.0, 0, 0, 0])  # no rater
    weights[0, 0, 5, :4] = torch.tensor([0.1, 0.2, 0.3, 0.0])
    weights[0, 1, 6, :4] = torch.tensor([0.0, 0.2, 0.3, 0.2])
    state = rated(weights)
    scores = sparsevlm().score(state, torch.tensor([[5, 6]]))
    torch.testing.assert_close(scores, torch.tensor([[0.1, 0.4, 0.6, 0.2]]) / 4)
    assert choice(sparsevlm(), state, 2) == [1, 2]


def test_raters_in_chunks_score_as_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    state = rated(torch.rand(1, 3, 7, 7), torch.rand(1, 7, 7) + 0.5)
    raters = torch.tensor([[4, 5, 6]])
    for name in ("sparsevlm", "sparsevlm-plus"):
        whole = sparsevlm(name, heads=2).score(state, raters)
        with monkeypatch.context() as patch:
            patch.setattr(module, "QUERY_CHUNK", 2)
            torch.testing.assert_close(sparsevlm(name, heads=2).score(state, raters), whole)


def test_the_second_version_divides_by_the_bias_of_distance_and_listens_to_few_heads() -> None:
    weights = torch.zeros(1, 3, 7, 7)
    weights[0, 0, 5, :4] = torch.tensor([0.4, 0.1, 0.1, 0.1])  # total after division: 0.4 / 4 + 0.3 = 0.4
    weights[0, 1, 6, :4] = torch.tensor([0.0, 0.3, 0.1, 0.2])  # total 0.6: the loudest
    weights[0, 2, 6, :4] = torch.tensor([0.8, 0.0, 0.0, 0.1])  # total 0.8 / 4 + 0.1 = 0.3
    bias = torch.ones(1, 7, 7)
    bias[:, :, 0] = 4.0
    state = rated(weights, bias)
    one, two = (sparsevlm("sparsevlm-plus", heads=heads).score(state, torch.tensor([[5, 6]])) for heads in (1, 2))
    torch.testing.assert_close(one, torch.tensor([[0.0, 0.3, 0.1, 0.2]]) / 2)
    torch.testing.assert_close(two, torch.tensor([[0.1, 0.4, 0.2, 0.3]]) / 4)
    assert choice(sparsevlm("sparsevlm-plus", heads=2), state, 2) == [1, 3]
    assert sparsevlm("sparsevlm-plus").options.heads == 14  # more than this model has: then all


def test_the_rank_of_the_raters_attention_says_how_many_stay() -> None:
    weights = torch.zeros(1, 1, 7, 7)
    weights[0, 0, 5, :4] = torch.tensor([0.4, 0.2, 0.1, 0.3])
    weights[0, 0, 6, :4] = torch.tensor([0.8, 0.4, 0.2, 0.6])  # twice the other: rank 1
    method = sparsevlm("sparsevlm-plus", budget="rank", rank_scale=1.5)
    assert choice(method, rated(weights), 1) == [0]  # int(1.5)
    weights[0, 0, 6, :4] = torch.tensor([0.0, 0.4, 0.2, 0.6])  # rank 2
    assert choice(method, rated(weights), 1) == [0, 1, 3]
    assert choice(sparsevlm("sparsevlm-plus", budget="rank"), rated(weights), 1) == [0, 1, 3]  # one goes in any case
    assert choice(method, rated(weights), 4) == [0, 1, 2, 3]  # all may stay
    assert list(method.stages(32, 576, 64)) == [3, 7, 16, 20]


# --- recycling --------------------------------------------------------------------------------------------------------


def test_centres_are_dense_and_far_from_anything_denser() -> None:
    # Three points near 0 (the middle one densest), two near 10, one at 20: two clusters.
    x = torch.tensor([[0.0], [0.1], [0.2], [10.0], [10.1], [20.0]])
    centres, member = density_peaks(x, 2)
    # Density of the 2 nearest, itself among them: pairs score exp(-0.005), the lone point about 0. Of the equals the
    # first is the peak: point 0 (delta 20) and point 3 (delta 9.8).
    assert centres.tolist() == [0, 3]
    assert member.tolist() == [0, 0, 0, 1, 1, 1]


def test_the_best_of_the_rest_are_merged_into_plain_means() -> None:
    hidden = torch.tensor([[0.0, 0], [1, 0], [5, 0], [7, 0], [9, 9], [8, 8]])
    scores = torch.tensor([0.9, 0.1, 0.5, 0.4, 0.8, 0.0])
    # Two stay (0, 4). Of the four others int(0.3 * 4) + 1 = 2 are merged: 2 and 3, into one mean at the first's place.
    keep, held = keep_and_merge(hidden, scores, 2, 1, sort=True)
    assert keep.tolist() == [0, 2, 4]
    assert held.tolist() == [[0, 0], [6, 0], [9, 9]]
    keep, held = keep_and_merge(hidden, scores, 2, 1, sort=False)
    assert keep.tolist() == [0, 4, 2] and held[2].tolist() == [6, 0]


def test_a_budget_counts_merged_tokens_too() -> None:
    for current in (2, 10, 57, 576):
        for target in range(1, current + 1):
            top, clusters = split_budget(current, target)
            assert top + clusters == target and top >= 1
            assert clusters <= num_recycled(current - top)[1]
    assert split_budget(576, 82) == (66, 16)
    assert split_budget(576, 4) == (3, 1)  # the release would make 18 clusters
    weights = torch.rand(1, 1, 7, 7)
    cut = sparsevlm().select_at(rated(weights), torch.tensor([4]))
    assert isinstance(cut, Cut) and cut.hidden is not None
    assert cut.keep.tolist() == [[0, 1, 2, 3]] and torch.equal(cut.hidden[0], rated(weights).hidden[0, :4])


# --- stages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("budget", "plain", "recycled"), [(192, 203, 207), (128, 141, 145), (96, 110, 114), (64, 79, 82)]
)
def test_the_release_s_lists_hold_more_than_they_say(budget: int, plain: int, recycled: int) -> None:
    method = sparsevlm(native=True)
    stages = method.stages(32, 576, budget)
    assert stages == dict(zip((3, 7, 16), LISTS["1.5"][budget], strict=True))
    assert method.average(32, 576, budget) == pytest.approx(plain, abs=0.5)
    current, true = 576, {}
    for layer, count in stages.items():
        current = true[layer] = count + num_recycled(current - count)[1]
    assert layer_average(true, 32, 576) == pytest.approx(recycled, abs=0.5)


def test_a_budget_without_a_list_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"keep=32 has no list .* 64, 96, 128, 192; the smallest is 64"):
        sparsevlm(native=True).stages(32, 576, 32)
    with pytest.raises(ValueError, match="name three layers"):
        sparsevlm(native=True, layers=(2, 6)).stages(32, 576, 64)
    assert sparsevlm("sparsevlm-plus", native=True).stages(32, 576, 64) == {3: 66, 7: 34, 16: 20}


def test_a_list_s_cut_drops_at_least_one_of_what_is_there() -> None:
    assert sparsevlm("sparsevlm-plus", native=True).stages(32, 200, 192) == {3: 199, 7: 198, 16: 118}
    assert sparsevlm(native=True).stages(32, 200, 192) == {3: 199, 7: 199, 16: 110}  # one was merged, so 200 are there


def test_the_release_puts_merged_tokens_behind_the_kept_ones_and_on_top_of_the_list() -> None:
    weights = torch.zeros(1, 1, 7, 7)
    weights[0, 0, 5:, :4] = torch.tensor([0.1, 0.2, 0.9, 0.8])
    cut = sparsevlm(native=True).select_at(rated(weights), torch.tensor([2]))
    assert isinstance(cut, Cut) and cut.keep.tolist() == [[2, 3, 1]]  # 1 is the better of the two dropped
    assert sparsevlm(native=True).positions == "packed"
    assert sparsevlm("sparsevlm-plus", native=True).positions == sparsevlm().positions == "original"


def test_stages_lead_to_the_budget_by_equal_shares() -> None:
    assert sparsevlm().stages(32, 576, 72) == {3: 288, 7: 144, 16: 72}
    assert sparsevlm().stages(32, 576, 600) == {3: 576, 7: 576, 16: 576}
    assert sparsevlm().stages(3, 16, 4) == {1: 8, 2: 4}
    assert list(sparsevlm().stages(28, 576, 72)) == [3, 6, 14]
    for keep in (64, 128, 192):
        assert sparsevlm(budget="average").average(32, 576, keep) == pytest.approx(keep, abs=0.5)
    with pytest.raises(ValueError, match=r"keep=50 cannot be the mean .* give 55 or more"):
        sparsevlm(budget="average").stages(32, 576, 50)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"version": "2.0"}, "version='2.0' is not known"),
        ({"budget": "list"}, "budget='list' is not known"),
        ({"layers": (6, 2)}, "do not rise"),
        ({"heads": 0}, "heads=0"),
        ({"rank_scale": 0.0}, "rank_scale=0.0"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        sparsevlm(**options)


@pytest.mark.parametrize("seed", range(3))
def test_the_release_s_recycling_written_out_point_by_point_gives_the_same(seed: int) -> None:
    torch.manual_seed(seed)
    hidden, scores, top = torch.randn(120, 6, dtype=torch.float64).float(), torch.rand(120), 30
    merged, clusters = num_recycled(120 - top)
    assert (merged, clusters) == (28, 3)
    order = sorted(range(120), key=lambda i: -float(scores[i]))
    pool = order[top : top + merged]

    def distance(i: int, j: int) -> float:
        return float((hidden[i] - hidden[j]).double().norm()) / 6**0.5

    nearest = {i: sorted(distance(i, j) for j in pool)[:clusters] for i in pool}
    density = {i: torch.tensor(-sum(d * d for d in nearest[i]) / clusters).exp().item() for i in pool}
    farthest = max(distance(i, j) for i in pool for j in pool)
    peak = {i: min((distance(i, j) for j in pool if density[j] > density[i]), default=farthest) for i in pool}
    centres = sorted(pool, key=lambda i: -density[i] * peak[i])[:clusters]
    means = []
    for centre in centres:
        own = [i for i in pool if min(centres, key=lambda c: distance(i, c)) == centre]
        means.append(hidden[own].mean(0))

    keep, held = keep_and_merge(hidden, scores, top, clusters, sort=False)
    assert keep.tolist() == sorted(order[:top]) + centres
    torch.testing.assert_close(held[top:], torch.stack(means))
    torch.testing.assert_close(held[:top], hidden[sorted(order[:top])])
