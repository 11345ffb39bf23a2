"""DivPrune: first pick, max-min, and the release's choice on 576 tokens."""

import pytest
import torch
from torch import Tensor

from diffprune.methods.options import build_method
from diffprune.types import VisualTokens
from tests.methods.examples import kept, make_tokens


def directions(*degrees: float) -> Tensor:
    angle = torch.tensor(degrees).deg2rad()
    return torch.stack([angle.cos(), angle.sin()], dim=-1)[None]


def choose(projected: Tensor, k: int, **options: object) -> list[int]:
    tokens = VisualTokens(x=torch.zeros(*projected.shape[:2], 3), projected=projected)
    return kept(build_method("divprune", **options).select(tokens, torch.tensor([k])))[0]


def test_the_first_is_the_loneliest_and_the_next_are_far_from_it() -> None:
    projected = (
        directions(0, 10, 70, 110, 150) * torch.tensor([9.0, 1.0, 1.0, 1.0, 0.1])[:, None]
    )  # lengths are nothing
    assert choose(projected, 1) == [2]  # 40 degrees to its nearest, as 3 and 4; the lower index goes first
    assert choose(projected, 2) == [2, 4]  # 80 degrees from token 2
    assert choose(projected, 3) == [0, 2, 4]  # 70 degrees to its nearest, against 60 and 40


def reference(projected: Tensor, k: int) -> list[int]:
    """The formula word by word: the distances to all that is taken are looked through at every step."""
    unit = projected / projected.norm(dim=-1, keepdim=True)
    distance = 1 - unit @ unit.T
    taken = [int(distance.sort(dim=0).values[1].argmax())]
    while len(taken) < k:
        nearest = distance[taken].min(dim=0).values
        nearest[taken] = -1.0
        taken.append(int(nearest.argmax()))
    return sorted(taken)


@pytest.mark.parametrize("k", [128, 64, 32])
@pytest.mark.parametrize("native", [False, True])
def test_576_tokens_give_the_formula_s_choice(k: int, native: bool) -> None:
    projected = torch.randn(1, 576, 96, generator=torch.Generator().manual_seed(k))
    assert choose(projected, k, native=native) == reference(projected[0], k)


def test_half_precision_ties_are_the_release_s_business_alone() -> None:
    projected = directions(0, 1.0, 2.1).half()  # cosines of a degree are all 1 in half precision
    assert choose(projected, 1) == [2]
    assert choose(projected, 1, native=True) == [0]


def test_divprune_asks_for_projected_tokens() -> None:
    assert build_method("divprune").needs == {"projected"}
    with pytest.raises(ValueError, match=r"VisualTokens\.projected"):
        build_method("divprune").select(VisualTokens(x=torch.zeros(1, 4, 2)), torch.tensor([2]))


def test_all_tokens_alike_still_give_k_of_them() -> None:
    tokens = make_tokens((10, 4))
    alike = VisualTokens(x=tokens.x, mask=tokens.mask, projected=torch.ones(2, 10, 4))
    assert kept(build_method("divprune").select(alike, torch.tensor([3, 4]))) == [[0, 1, 2], [0, 1, 2, 3]]
