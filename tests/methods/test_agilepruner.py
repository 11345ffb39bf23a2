"""AgilePruner: the richer the image, the more near duplicates are skipped."""

import pytest
import torch

from diffprune.methods.agilepruner import effective_rank
from diffprune.methods.options import build_method
from diffprune.types import VisualTokens
from tests.methods.examples import kept

ALL = torch.ones(1, 6, dtype=torch.bool)


def test_effective_rank_counts_equal_directions() -> None:
    torch.testing.assert_close(effective_rank(torch.eye(6)[None], ALL), torch.tensor([6.0]))
    torch.testing.assert_close(effective_rank(torch.ones(1, 6, 9), ALL), torch.tensor([1.0]))
    twice = torch.cat([torch.eye(3), torch.eye(3)])[None]  # six tokens in three directions
    torch.testing.assert_close(effective_rank(twice, ALL), torch.tensor([3.0]))


def test_effective_rank_lies_between_for_unequal_directions() -> None:
    x = torch.diag(torch.tensor([4.0, 1.0, 1.0, 0.0, 0.0, 0.0]))[None]
    shares = torch.tensor([4 / 6, 1 / 6, 1 / 6])
    torch.testing.assert_close(effective_rank(x, ALL), torch.exp(-(shares * shares.log()).sum())[None])


def near_pair() -> VisualTokens:
    """0 and 1 look alike (cosine 0.98), 2 does not; attention falls."""
    x = torch.tensor([[1.0, 0.0, 0.0], [0.98, 0.199, 0.0], [0.0, 0.0, 1.0]])[None]
    return VisualTokens(x=x, cls_attention=torch.tensor([[0.5, 0.3, 0.2]]))


def test_a_rich_image_skips_the_near_duplicate_and_a_plain_one_does_not() -> None:
    tokens, k = near_pair(), torch.tensor([2])
    rank = float(effective_rank(tokens.x, tokens.mask))
    # The first kept token strikes out what is nearer than 0.01 * rank / average; the pair's distance is 0.02.
    plain = build_method("agilepruner", average_rank=rank)  # 0.01
    rich = build_method("agilepruner", average_rank=rank / 3)  # 0.03
    assert kept(plain.select(tokens, k)) == [[0, 1]]
    assert kept(rich.select(tokens, k)) == [[0, 2]]
    assert kept(build_method("agilepruner", average_rank=rank / 3, max_distance=0.01).select(tokens, k)) == [[0, 1]]


def test_where_too_few_survive_attention_fills_up() -> None:
    tokens = VisualTokens(x=torch.ones(1, 4, 3), cls_attention=torch.tensor([[0.1, 0.4, 0.2, 0.3]]))
    assert kept(build_method("agilepruner").select(tokens, torch.tensor([3]))) == [[1, 2, 3]]


def test_the_walk_is_the_rule_token_by_token() -> None:
    generator = torch.Generator().manual_seed(0)
    basis = torch.randn(12, 32, generator=generator)
    x = basis[torch.randint(0, 12, (200,), generator=generator)] + 0.4 * torch.randn(200, 32, generator=generator)
    attention = torch.rand(200, generator=generator)
    tokens = VisualTokens(x=x[None], cls_attention=attention[None])
    rank, unit = float(effective_rank(x[None], tokens.mask)), torch.nn.functional.normalize(x, dim=-1)
    order = sorted(range(200), key=lambda token: -float(attention[token]))
    left, chosen = list(order), []
    while left and len(chosen) < 64:
        chosen.append(left.pop(0))
        tau = min(len(chosen) * rank / 16 * 0.01, 0.3)
        left = [token for token in left if 1 - float(unit[token] @ unit[chosen[-1]]) >= tau]
    chosen += [token for token in order if token not in chosen][: 64 - len(chosen)]
    method = build_method("agilepruner", average_rank=16.0, max_distance=0.3)
    assert kept(method.select(tokens, torch.tensor([64])))[0] == sorted(chosen)
    assert sorted(chosen) != sorted(order[:64])


@pytest.mark.parametrize("option, value", [("average_rank", 0.0), ("step", -0.1), ("max_distance", 3.0)])
def test_an_option_with_a_wrong_value_is_refused_by_name(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{option}={value}"):
        build_method("agilepruner", **{option: value})
