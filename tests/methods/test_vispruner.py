"""VisPruner: an important half by attention, a diverse half by rounds of matching."""

import pytest
import torch

from diffprune.methods.options import build_method
from diffprune.methods.vispruner import drop_duplicates
from diffprune.types import VisualTokens
from tests.methods.examples import kept


def test_the_diverse_half_leaves_duplicates_out() -> None:
    # By attention: 0, 1 | 2, 3, 4, 5. Of the rest, 2 equals 3 and 4 equals 0, which is no longer in the list.
    x = torch.tensor([[1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0], [0, 0, 1.0], [1.0, 0, 0], [1.0, -1, 0]])[None]
    tokens = VisualTokens(x=x, cls_attention=torch.tensor([[0.9, 0.8, 0.7, 0.6, 0.5, 0.4]]))
    method = build_method("vispruner", step=1)
    # Rest 2 3 4 5: first set {2, 4}, second {3, 5}; 2 is most like one of them and goes.
    assert kept(method.select(tokens, torch.tensor([5]))) == [[0, 1, 3, 4, 5]]
    assert kept(build_method("cls_attention").select(tokens, torch.tensor([5]))) == [[0, 1, 2, 3, 4]]


def test_a_round_goes_on_with_the_first_set_by_similarity_then_the_second() -> None:
    similarity = torch.zeros(1, 6, 6)
    for first, second, value in ((0, 1, 0.3), (2, 3, 0.9), (4, 5, 0.6)):
        similarity[0, first, second] = value
    listed = torch.arange(6)[None]
    assert drop_duplicates(similarity, listed, [5], step=1).tolist() == [[4, 0, 1, 3, 5]]


def test_an_odd_list_has_one_more_in_the_first_set() -> None:
    similarity = torch.eye(3)[None]
    assert drop_duplicates(similarity, torch.arange(3)[None], [1], step=8).tolist() == [[1]]
    assert drop_duplicates(torch.ones(1, 1, 1), torch.zeros(1, 1, dtype=torch.int64), [0], step=8).tolist() == [[]]


def released_choice(x: torch.Tensor, attention: torch.Tensor, k: int, share: float) -> list[int]:
    """The rule, one list at a time."""
    order = sorted(range(len(x)), key=lambda token: -float(attention[token]))
    important, rest = order[: int(k * share)], order[int(k * share) :]
    unit = x / x.norm(dim=-1, keepdim=True)
    while (surplus := min(8, len(rest) - (k - len(important)))) > 0:
        first, second = rest[::2], rest[1::2]
        closest = (unit[first] @ unit[second].T).amax(-1)
        ranked = sorted(range(len(first)), key=lambda place: -float(closest[place]))
        rest = [first[place] for place in ranked[surplus:]] + second
    return sorted(important + rest)


@pytest.mark.parametrize("k, share", [(128, 0.5), (64, 0.5), (64, 0.75), (32, 0.5), (65, 0.5)])
def test_the_native_choice_is_the_rule_list_by_list(k: int, share: float) -> None:
    generator = torch.Generator().manual_seed(k)
    x = torch.randn(1, 576, 64, generator=generator)
    attention = torch.rand(1, 576, generator=generator)
    tokens = VisualTokens(x=x, cls_attention=attention)
    expected = released_choice(x[0], attention[0], k, share)
    for native in (True, False):
        method = build_method("vispruner", important=share, native=native)
        assert kept(method.select(tokens, torch.tensor([k])))[0] == expected


@pytest.mark.parametrize("option, value", [("important", 1.5), ("step", 0)])
def test_an_option_with_a_wrong_value_is_refused_by_name(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{option}={value}"):
        build_method("vispruner", **{option: value})
