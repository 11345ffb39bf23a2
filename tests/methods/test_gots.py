"""GOTS: column-pivoted QR of the features."""

import pytest
import torch
from torch import Tensor

from diffprune.methods.options import build_method
from diffprune.types import VisualTokens
from tests.methods.examples import kept


def choose(x: Tensor, k: int, *, group: int = 1, **options: object) -> list[int]:
    return kept(build_method("gots", **options).select(VisualTokens(x=x, group=group), torch.tensor([k])))[0]


def test_the_longest_goes_first_and_what_is_along_it_later() -> None:
    x = torch.tensor([[[0.0, 2.0], [5.0, 0.0], [4.9, 0.5], [0.0, 1.0]]])
    assert choose(x, 1) == [1]
    assert choose(x, 2) == [0, 1]  # token 2 has only 0.5 left outside token 1


def test_a_token_of_several_patches_stands_for_their_mean() -> None:
    x = torch.tensor([[[9.0, 0.0, -9.0, 0.0], [0.0, 2.0, 0.0, 2.0], [1.0, 0.0, 1.0, 0.0]]])  # means 0, 2, 1
    assert choose(x, 1, group=2) == [1]
    assert choose(x, 2, group=2) == [1, 2]
    assert choose(x, 1) == [0]


def reference(x: Tensor, k: int) -> list[int]:
    """Gram-Schmidt in the space of the features."""
    energy = x.square().sum(-1)
    taken: list[int] = []
    basis: list[Tensor] = []
    for _ in range(k):
        pick = int(energy.argmax())
        direction = x[pick] - sum((x[pick] @ q) * q for q in basis)
        basis.append(direction / energy[pick].clamp(min=1e-12).sqrt())
        energy = energy - (x @ basis[-1]).square()
        taken.append(pick)
        energy[taken] = -torch.inf
    return sorted(taken)


@pytest.mark.parametrize("k", [128, 64, 32])
@pytest.mark.parametrize("native", [False, True])
def test_576_tokens_give_the_formula_s_choice(k: int, native: bool) -> None:
    x = torch.randn(1, 576, 160, generator=torch.Generator().manual_seed(k))
    assert choose(x, k, native=native) == reference(x[0], k)


def test_past_the_rank_our_choice_is_by_length_and_the_release_s_by_rounding() -> None:
    x = torch.randn(1, 60, 8, generator=torch.Generator().manual_seed(0))
    ours, native = choose(x, 20), choose(x, 20, native=True)
    spanning = choose(x, 8)
    rest = [token for token in x[0].norm(dim=-1).argsort(descending=True).tolist() if token not in spanning]
    assert ours == sorted([*spanning, *rest[:12]])
    assert len(native) == 20 and set(spanning) <= set(native) and native != ours


def test_half_precision_is_worked_out_in_full() -> None:
    x = torch.full((1, 3, 512), 100.0, dtype=torch.float16)  # squared lengths are past float16
    x[0, 2] = 101.0
    assert choose(x, 1) == [2]
