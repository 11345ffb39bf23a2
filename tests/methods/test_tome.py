"""ToMe: one bipartite step by hand, then rounds of them."""

import pytest
import torch

from diffprune.methods.options import build_method
from diffprune.methods.tome import ToMe
from diffprune.types import VisualTokens
from tests.methods.examples import SPEC, kept


def tome(**options: object) -> ToMe:
    method = build_method("tome", block=SPEC, **options)
    assert isinstance(method, ToMe)
    return method


def test_the_most_similar_pair_across_the_sets_is_merged() -> None:
    # Sets {0, 2, 4} and {1, 3}. 2 and 3 are nearest across them; 0 and 4 are equal, but of one set, so cannot meet.
    x = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 2.0], [0.0, 4.0], [1.0, 0.0]])[None]
    merged = tome().reduce(VisualTokens(x=x), torch.tensor([4]))
    assert merged.index.tolist() == [[0, 1, 3, 4]]
    assert merged.x[0].tolist() == [[1.0, 0.0], x[0, 1].tolist(), [0.0, 3.0], [1.0, 0.0]]


def test_a_mean_weighs_each_token_once_however_it_was_merged() -> None:
    x = torch.randn(2, 12, 5, generator=torch.Generator().manual_seed(0))
    for native in (False, True):
        merged = tome(native=native).reduce(VisualTokens(x=x), torch.tensor([1, 1]))
        torch.testing.assert_close(merged.x[:, 0], x.mean(1))


def test_at_most_half_merge_in_a_round() -> None:
    # All alike: the first round leaves 1 3 5; in the second 1 and 5 are one set, and 1 goes to 3.
    merged = tome().reduce(VisualTokens(x=torch.ones(1, 6, 2)), torch.tensor([2]))
    assert kept(merged.index) == [[3, 5]] and (merged.x == 1).all()


def released_rounds(x: torch.Tensor, k: int) -> tuple[list[int], torch.Tensor]:
    """The rule token by token: places of what is left, in the order of the matching, and their features."""
    left = [(place, [place]) for place in range(len(x))]
    while len(left) > k:
        merges = min(len(left) // 2, len(left) - k)
        feature = torch.stack([x[own].mean(0) for _, own in left])
        unit = torch.nn.functional.normalize(feature, dim=-1)
        best, partner = (unit[::2] @ unit[1::2].T).max(-1)
        ranked = sorted(range(len(best)), key=lambda place: -float(best[place]))
        first, second = left[::2], [(place, list(own)) for place, own in left[1::2]]
        for place in ranked[:merges]:
            second[int(partner[place])][1].extend(first[place][1])
        left = [first[place] for place in ranked[merges:]] + second
    return [place for place, _ in left], torch.stack([x[own].mean(0) for _, own in left])


@pytest.mark.parametrize("k", [128, 64, 32])
def test_the_native_rounds_are_the_rule_token_by_token(k: int) -> None:
    x = torch.randn(576, 48, generator=torch.Generator().manual_seed(k))
    places, features = released_rounds(x, k)
    merged = tome(native=True).reduce(VisualTokens(x=x[None]), torch.tensor([k]))
    assert merged.index[0].tolist() == places
    torch.testing.assert_close(merged.x[0], features, rtol=1e-4, atol=1e-5)


def test_keys_decide_where_they_are_the_metric() -> None:
    generator = torch.Generator().manual_seed(1)
    x, keys = torch.randn(1, 12, 6, generator=generator), torch.randn(1, 12, 6, generator=generator)
    tokens, k = VisualTokens(x=x, keys=keys), torch.tensor([7])
    by_keys = tome(metric="keys", heads=1)
    assert by_keys.needs == {"keys"} and tome().needs == frozenset()
    assert torch.equal(by_keys.select(tokens, k), tome().select(VisualTokens(x=keys), k))
    assert by_keys.reduce(tokens, k).x.shape == (1, 7, 6)
    with pytest.raises(ValueError, match=r"tome compares VisualTokens\.keys"):
        by_keys.select(VisualTokens(x=x), k)


def test_an_unknown_metric_is_refused() -> None:
    with pytest.raises(ValueError, match="metric='values'"):
        build_method("tome", metric="values")
