"""DART: pivots by the size of their keys, then the tokens least like each pivot in turn."""

import pytest
import torch
from torch import Tensor

from diffprune.inside.state import LayerState
from diffprune.methods.base import LayerPruner
from diffprune.methods.dart import share_out
from diffprune.methods.options import build_method
from tests.methods.examples import kept
from tests.methods.layer_states import HandMade, make_state


def dart(**options: object) -> LayerPruner:
    method = build_method("dart", **options)
    assert isinstance(method, LayerPruner)
    return method


def angles(*degrees: float) -> Tensor:
    """Points on a circle: the cosine of two is that of the angle between them; length does not matter."""
    turn = torch.tensor(degrees).deg2rad()
    return torch.stack([turn.cos(), turn.sin()], dim=-1) * torch.arange(1.0, len(degrees) + 1)[:, None]


def hand_worked() -> LayerState:
    """Six visual tokens (columns 1 to 6), text at 0, 7 and 8; two heads with keys of L1 norm `size` together."""
    hidden = angles(0, 10, 20, 80, 100, 160, 190, 90, 0)[None]
    size = torch.tensor([99.0, 5, 9, 1, 2, 3, 4, 7, 6])
    keys = torch.stack([size * 0.75, -size * 0.25])[None, :, :, None]  # [1, 2, 9, 1]
    return make_state(hidden, [[1, 2, 3, 4, 5, 6]], [[7, 8]], HandMade(cached=keys))


def test_each_pivot_adds_the_visual_tokens_least_like_it() -> None:
    # The visual pivot is column 2 (20 degrees, key 9); the text pivot column 7 (90 degrees, key 7): text before the
    # picture is none. Pivot 2 takes column 6 (190 degrees: 170 away); pivot 7 then takes column 1 (80 away).
    method = dart(visual_pivots=1, text_pivots=1)
    assert kept(method.select_at(hand_worked(), torch.tensor([3]))) == [[0, 1, 5]]
    # One more goes to the first pivot: column 5 (140 away).
    assert kept(method.select_at(hand_worked(), torch.tensor([4]))) == [[0, 1, 4, 5]]


def test_a_budget_below_the_pivots_keeps_the_largest_keys() -> None:
    method = dart(visual_pivots=4, text_pivots=2)
    assert kept(method.select_at(hand_worked(), torch.tensor([2]))) == [[0, 1]]
    assert kept(method.select_at(hand_worked(), torch.tensor([1]))) == [[1]]


@pytest.mark.parametrize("keep", range(1, 7))
def test_any_budget_is_met_exactly(keep: int) -> None:
    for options in ({}, {"text_pivots": 0}, {"visual_pivots": 2, "text_pivots": 9}):
        rows = kept(dart(**options).select_at(hand_worked(), torch.tensor([keep])))
        assert len(rows[0]) == keep and rows[0] == sorted(set(rows[0]))


def test_the_release_s_count_is_near_the_budget_only() -> None:
    for ratio, count in ((0.778, 124), (0.889, 60), (0.944, 36)):
        assert dart(native=True, ratio=ratio).stages(32, 576, 64) == {2: count}
    assert dart(native=True).stages(32, 576, 32) == {2: 36}
    assert dart().stages(32, 576, 64) == {2: 64}
    assert dart(native=True, ratio=0.5).stages(32, 576, 576) == {2: 576}
    above = [dart(native=True).stages(32, 576, keep)[2] - keep for keep in range(4, 576)]
    assert min(above) == -4 and max(above) == 4


def test_fewer_than_the_pivots_that_the_release_always_keeps_are_refused_with_the_smallest() -> None:
    with pytest.raises(ValueError, match=r"keep=3 is less than the 4 visual pivots .* keep at least 4"):
        dart(native=True).stages(32, 576, 3)
    assert dart(native=True).stages(32, 576, 4) == {2: 4}
    assert dart(native=True, visual_pivots=2).stages(32, 576, 2) == {2: 2}
    assert dart(native=True, ratio=0.944).stages(32, 576, 1) == {2: 36}  # the ratio counts, not K
    assert dart(native=True).stages(32, 3, 3) == {2: 3} and dart(native=True).stages(32, 0, 0) == {2: 0}
    assert dart().stages(32, 576, 3) == {2: 3}


def test_the_release_takes_equal_numbers_in_the_order_of_a_set() -> None:
    # {2, 7}: pivot 2 first, then 7, two each of columns 1, 3, 4, 5, 6: 6 and 5, then 1 and 3 (10 away) or 4 (10 away).
    method = dart(native=True, visual_pivots=1, text_pivots=1)
    (row,) = kept(method.select_at(hand_worked(), torch.tensor([5])))
    assert {0, 1, 4, 5} < set(row) and len(row) == 5
    # Visual pivots 2 and 1 by size; a set of small numbers is walked upwards: 1 (10 degrees) takes 6, then 2 takes 5.
    method = dart(native=True, visual_pivots=2, text_pivots=0)
    assert kept(method.select_at(hand_worked(), torch.tensor([4]))) == [[0, 1, 4, 5]]


def test_a_prompt_that_may_keep_all_does_so_beside_one_that_may_not() -> None:
    torch.manual_seed(0)
    reader = HandMade(cached=torch.randn(2, 2, 9, 3))
    state = make_state(torch.randn(2, 9, 6), [[1, 2, 3, 4, 5, 6], [0, 1, 2]], [[7, 8], [3]], reader, lengths=[9, 4])
    for native in (False, True):
        rows = kept(dart(native=native, visual_pivots=2, text_pivots=1).select_at(state, torch.tensor([5, 3])))
        assert len(rows[0]) == 5 and rows[1] == [0, 1, 2]


def test_prompts_of_a_batch_do_not_see_each_other() -> None:
    torch.manual_seed(0)
    hidden, keys = torch.randn(2, 9, 6), torch.randn(2, 2, 9, 3)
    visual, text, k = [[1, 2, 3, 4, 5, 6], [0, 1, 2]], [[7, 8], [3]], [5, 2]
    both = make_state(hidden, visual, text, HandMade(cached=keys), lengths=[9, 4])
    together = kept(dart().select_at(both, torch.tensor(k)))
    for row, length in enumerate((9, 4)):
        own = HandMade(cached=keys[row : row + 1, :, :length])
        state = make_state(hidden[row : row + 1, :length], visual[row : row + 1], text[row : row + 1], own)
        assert kept(dart().select_at(state, torch.tensor(k[row : row + 1]))) == together[row : row + 1]


def test_what_remains_goes_to_the_first_pivots() -> None:
    shares = share_out(torch.tensor([7, 2, 0]), torch.tensor([3, 4, 0]), 4)
    assert shares.tolist() == [[3, 2, 2, 0], [1, 1, 0, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"visual_pivots": 0}, "visual_pivots=0"),
        ({"ratio": 0.5}, "ratio=0.5 is how the release counts"),
        ({"ratio": 1.0, "native": True}, "ratio=1.0 is no share"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        dart(**options)


@pytest.mark.parametrize("ratio", [0.5, 0.7, 0.9])
def test_the_release_s_rule_written_out_token_by_token_keeps_the_same(ratio: float) -> None:
    torch.manual_seed(int(ratio * 10))
    first, count, width, pivots = 35, 100, 160, 4
    hidden, keys = torch.randn(1, width, 16), torch.randn(1, 3, width, 5)
    size = {column: float(keys[0, :, column].abs().sum()) for column in range(width)}

    def largest(columns: range) -> list[int]:
        return sorted(columns, key=lambda column: -size[column])[:pivots]

    visual, text = range(first, first + count), range(first + count, width)
    own, words = largest(visual), largest(text)
    picks = int(count * (1 - ratio) / (2 * pivots))
    left, chosen = set(visual) - set(own), set(own)
    for pivot in set(own + words):
        cosine = {c: float(torch.cosine_similarity(hidden[0, pivot], hidden[0, c], dim=0)) for c in left}
        taken = sorted(left, key=lambda column: cosine[column])[:picks]
        chosen |= set(taken)
        left -= set(taken)

    method = dart(native=True, ratio=ratio)
    state = make_state(hidden, [list(visual)], [list(text)], HandMade(cached=keys))
    k = torch.tensor([method.stages(32, count, 1)[2]])
    assert kept(method.select_at(state, k)) == [sorted(column - first for column in chosen)]
