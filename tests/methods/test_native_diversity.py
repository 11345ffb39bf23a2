"""Methods that go by how alike tokens are, against their rules written out step by step, as the releases apply them."""

import dataclasses

import pytest
import torch
from torch import Tensor

from diffprune.methods.cdpruner import CDPruner
from diffprune.methods.options import build_method
from diffprune.methods.tome import ToMe
from diffprune.types import VisualTokens
from tests.methods.clip import joint_already
from tests.methods.pictures import BUDGETS, chosen, largest, picture, signs, unit


def far_from_one_another(projected: Tensor, k: int) -> list[int]:
    distance = 1 - unit(projected) @ unit(projected).T
    loneliness = torch.tensor([sorted(column)[1] for column in distance.T.tolist()])
    taken = largest(loneliness, 1)
    while len(taken) < k:
        nearest = distance[taken].amin(0)
        nearest[taken] = -torch.inf
        taken += largest(nearest, 1)
    return sorted(taken)


@pytest.mark.parametrize("k", BUDGETS)
@pytest.mark.parametrize("kind, width", [("noise", 32), ("noise", 512), ("clusters", 32)])
def test_divprune_takes_the_loneliest_and_then_the_farthest(kind: str, width: int, k: int) -> None:
    tokens = picture(kind, seed=k, width=width)
    assert tokens.projected is not None
    by_hand = far_from_one_another(tokens.projected[0], k)
    assert chosen(build_method("divprune", native=True), tokens, k) == by_hand


@pytest.mark.parametrize("k", BUDGETS)
@pytest.mark.parametrize("seed", range(2))
def test_of_equally_far_tokens_divprune_takes_the_first(seed: int, k: int) -> None:
    projected = signs(seed)
    tokens = VisualTokens(x=projected[None], projected=projected[None])
    assert chosen(build_method("divprune", native=True), tokens, k) == far_from_one_another(projected, k)


def conditional_determinant(embeddings: Tensor, projected: Tensor, text: Tensor, k: int) -> list[int]:
    relevance = torch.stack([-(unit(embeddings) @ segment) for segment in unit(text)]).mean(0)  # the sign is flipped
    relevance = (relevance - relevance.min() + 1e-6) / (relevance.max() - relevance.min())
    kernel = relevance[:, None] * (unit(projected) @ unit(projected).T) * relevance
    residual, factors, taken = kernel.diagonal().clone(), [], []
    for _ in range(k):
        pick = largest(residual, 1)[0]
        factor = kernel[pick].clone()
        for earlier in factors:
            factor -= earlier[pick] * earlier
        factors.append(factor / residual[pick].sqrt())
        residual -= factors[-1] ** 2
        residual[pick] = -torch.inf
        taken.append(pick)
    return sorted(taken)


@pytest.mark.parametrize("k", BUDGETS)
@pytest.mark.parametrize("kind, width", [("noise", 160), ("noise", 512), ("clusters", 160), ("repeats", 160)])
def test_cdpruner_takes_the_largest_residual_of_the_conditional_kernel(kind: str, width: int, k: int) -> None:
    tokens = picture(kind, seed=k, width=width)
    assert tokens.projected is not None and tokens.text is not None
    by_hand = conditional_determinant(tokens.x[0], tokens.projected[0], tokens.text[0], k)
    method = build_method("cdpruner", native=True)
    assert isinstance(method, CDPruner)
    method.attach_clip(joint_already(width))
    assert chosen(method, tokens, k) == by_hand


def longest_outside(x: Tensor, k: int) -> list[int]:
    energy, basis, taken = x.square().sum(-1), [], []
    for _ in range(k):
        pick = largest(energy, 1)[0]
        direction = x[pick].clone()
        for earlier in basis:
            direction -= (x[pick] @ earlier) * earlier
        basis.append(direction / energy[pick].clamp(min=1e-12).sqrt())
        energy -= (x @ basis[-1]) ** 2
        energy[pick] = -torch.inf
        taken.append(pick)
    return sorted(taken)


@pytest.mark.parametrize("k", BUDGETS)
@pytest.mark.parametrize("kind, width", [("noise", 160), ("noise", 1024), ("clusters", 160), ("repeats", 160)])
def test_gots_takes_what_is_longest_outside_the_span(kind: str, width: int, k: int) -> None:
    tokens = picture(kind, seed=k, width=width)
    assert chosen(build_method("gots", native=True), tokens, k) == longest_outside(tokens.x[0], k)


@pytest.mark.parametrize("k", BUDGETS)
def test_where_nothing_is_left_outside_the_span_gots_takes_the_first(k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    axis = torch.randint(24, (576,), generator=generator)
    length = torch.randint(1, 9, (576, 1), generator=generator)
    x = torch.eye(24)[axis] * length  # 24 axes, so that residuals are lengths squared or exactly 0
    tokens = VisualTokens(x=x[None])
    by_hand = longest_outside(x, k)
    assert chosen(build_method("gots", native=True), tokens, k) == by_hand
    assert chosen(build_method("gots"), tokens, k) != by_hand  # ours goes on by length


def merged_by_hand(x: Tensor, k: int, *, native: bool) -> tuple[list[int], Tensor]:
    """Places and features of the K tokens that rounds of matching leave, in the order of the last round."""
    bag = [(token, 1, value) for token, value in enumerate(x)]  # place, tokens held, mean of them
    while len(bag) > k:
        first, second = bag[::2], bag[1::2]
        similarity = unit(torch.stack([value for *_, value in first])) @ unit(torch.stack([v for *_, v in second])).T
        partner = similarity.argmax(1).tolist()
        order = largest(similarity.amax(1), len(first))
        num_merges = min(len(bag) // 2, len(bag) - k)
        for source in order[:num_merges]:
            _, more, other = first[source]
            place, size, value = second[partner[source]]
            second[partner[source]] = (place, size + more, (size * value + more * other) / (size + more))
        bag = [first[source] for source in order[num_merges:]] + second
        if not native:
            bag.sort(key=lambda token: token[0])
    return [place for place, *_ in bag], torch.stack([value for *_, value in bag])


@pytest.mark.parametrize("k", BUDGETS)
@pytest.mark.parametrize("kind, width", [("noise", 64), ("noise", 512), ("clusters", 64)])
def test_tome_merges_the_most_similar_pairs_round_after_round(kind: str, width: int, k: int) -> None:
    tokens = picture(kind, seed=k, width=width)
    method = build_method("tome", native=True)
    assert isinstance(method, ToMe)
    released = method.reduce(tokens, k)
    places, features = merged_by_hand(tokens.x[0], k, native=True)
    assert released.index[0].tolist() == places
    torch.testing.assert_close(released.x[0], features, atol=1e-4, rtol=1e-4)
    assert method.choose(tokens, k).keep[0].tolist() == sorted(places)
    ours = build_method("tome")
    assert isinstance(ours, ToMe)
    assert ours.reduce(tokens, k).index[0].tolist() == merged_by_hand(tokens.x[0], k, native=False)[0]


@pytest.mark.parametrize("k", [500, 300])
def test_of_equally_similar_pairs_tome_merges_the_first(k: int) -> None:
    x = signs(k)
    tokens = dataclasses.replace(picture("noise", 0, width=64), x=x[None])
    method = build_method("tome", native=True)
    assert isinstance(method, ToMe)
    assert method.select(tokens, k)[0].tolist() == merged_by_hand(x, k, native=True)[0]
