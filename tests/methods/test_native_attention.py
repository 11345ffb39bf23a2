"""Methods that go by [CLS] attention against their rules written out token by token, as the releases apply them."""

import math

import pytest
import torch
from torch import Tensor

from diffprune.methods.holov import HoloV
from diffprune.methods.options import build_method
from diffprune.methods.visionzip import VisionZip
from diffprune.types import VisualTokens
from tests.methods.pictures import BUDGETS, KINDS, chosen, largest, picture, unit

pytestmark = [pytest.mark.parametrize("kind", KINDS), pytest.mark.parametrize("k", BUDGETS)]


def image(tokens: VisualTokens) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention, keys, encoder features and projected tokens of the one image."""
    assert tokens.cls_attention is not None and tokens.keys is not None and tokens.projected is not None
    return tokens.cls_attention[0], tokens.keys[0], tokens.x[0], tokens.projected[0]


@pytest.mark.parametrize("seed", range(2))
def test_fastervlm_keeps_the_most_attended_in_raster_order(kind: str, k: int, seed: int) -> None:
    tokens = picture(kind, seed, width=8)
    assert chosen(build_method("fastervlm"), tokens, k) == sorted(largest(image(tokens)[0], k))


def zip_by_hand(attention: Tensor, keys: Tensor, x: Tensor, dominant: int, contextual: int) -> tuple[list[int], Tensor]:
    """Places and features of what follows [CLS], which is one of the `dominant`."""
    main = sorted(largest(attention, dominant - 1))
    rest = [token for token in range(len(x)) if token not in main]
    targets = rest[:: max(1, len(rest) // contextual)][:contextual]
    similarity = unit(keys) @ unit(keys)[targets].T
    assigned: list[list[int]] = [[] for _ in targets]
    for token in rest:
        if token not in targets:
            assigned[largest(similarity[token], 1)[0]].append(token)
    merged = [
        x[target] + (x[others].mean(0) if others else 0.0) for target, others in zip(targets, assigned, strict=True)
    ]
    return main + targets, torch.stack([*x[main], *merged])


@pytest.mark.parametrize("seed", range(2))
def test_visionzip_puts_contextual_tokens_behind_the_dominant_ones(kind: str, k: int, seed: int) -> None:
    tokens = picture(kind, seed, width=32)
    attention, keys, x, _ = image(tokens)
    dominant, contextual = {128: (108, 20), 64: (54, 10), 32: (27, 5)}[k]
    places, features = zip_by_hand(attention, keys, x, dominant, contextual)
    method = build_method("visionzip", native=True)
    assert isinstance(method, VisionZip)
    released = method.reduce(tokens, k)
    assert released.index[0].tolist() == places
    torch.testing.assert_close(released.x[0], features, atol=1e-4, rtol=1e-4)
    assert method.select(tokens, k)[0].tolist() == places
    assert method.choose(tokens, k).keep[0].tolist() == sorted(places)
    in_place = released.in_raster_order()
    assert in_place.index[0].tolist() == sorted(places)
    assert torch.equal(in_place.x[0, 0], released.x[0, places.index(min(places))])


def spread_within(features: Tensor) -> Tensor:
    """Variance of each token's cosines with the others; its own entry is emptied and counted among the squares."""
    vectors = features / (features.norm(dim=-1, keepdim=True) + 1e-6)
    cosines = (vectors @ vectors.T).fill_diagonal_(0.0)
    mean = cosines.sum(1) / (len(features) - 1)
    return ((cosines - mean[:, None]) ** 2).sum(1) / (len(features) - 1)


def crop_by_crop(crops: list[list[int]], score: Tensor, ranking: Tensor, k: int) -> list[int]:
    """Quotas by the crops' mean score, then the best of each crop by its ranking; a whole crop stays as it lies."""
    weights = torch.stack([score[crop].mean() for crop in crops])
    weights = weights / (weights.sum() + 1e-6)
    quotas = (weights * k).floor().int().tolist()
    for crop in largest(weights, k - sum(quotas)):
        quotas[crop] += 1
    kept: list[int] = []
    for quota, crop in zip(quotas, crops, strict=True):
        kept += crop if quota >= len(crop) else [crop[place] for place in largest(ranking[crop], quota)]
    return kept


def holov(**options: object) -> HoloV:
    method = build_method("holov", **options)
    assert isinstance(method, HoloV)
    return method


@pytest.mark.parametrize("seed", range(2))
def test_holov_keeps_run_after_run_by_falling_attention(kind: str, k: int, seed: int) -> None:
    tokens = picture(kind, seed)
    attention, _, _, projected = image(tokens)
    size = 576 * k // 1024  # P * K = 1024
    runs = [list(range(start, start + size)) for start in range(0, 576, size)]
    score = torch.zeros(576)
    for run in runs:
        own, spread = attention[run] * 1000, spread_within(projected[run])
        score[run] = own + 0.09 * spread * (own.abs().mean() / (spread.abs().mean() + 1e-6))
    by_hand = crop_by_crop(runs, score, attention, k)
    method = holov(native=True)
    assert chosen(method, tokens, k) == by_hand
    assert [token for token in method.choose(tokens, k).keep[0].tolist() if token >= 0] == sorted(by_hand)
    assert method.needs == {"cls_attention", "projected"}


@pytest.mark.parametrize("seed", range(2))
def test_holov_as_printed_ranks_by_the_combined_score_in_blocks(kind: str, k: int, seed: int) -> None:
    tokens = picture(kind, seed)
    attention, _, _, projected = image(tokens)
    rows, columns = {128: (2, 4), 64: (4, 4), 32: (4, 8)}[k]
    cell = [(token // 24 * rows // 24) * columns + token % 24 * columns // 24 for token in range(576)]
    blocks = [[token for token in range(576) if cell[token] == block] for block in range(rows * columns)]
    spread = torch.zeros(576)
    for block in blocks:
        spread[block] = spread_within(projected[block])
    own = attention * 1000
    score = own + 0.09 * spread * (own.abs().mean() / (spread.abs().mean() + 1e-6))
    by_hand = crop_by_crop(blocks, score, score, k)
    method = holov(variant="paper", native=True)
    assert chosen(method, tokens, k) == by_hand
    assert [token for token in method.choose(tokens, k).keep[0].tolist() if token >= 0] == sorted(by_hand)


def walk_by_hand(x: Tensor, attention: Tensor, k: int, average_rank: float, ceiling: float) -> list[int]:
    """Walk by falling attention; the i-th kept token strikes out what is nearer than its threshold."""
    shares = torch.linalg.svdvals(x.double())
    shares = shares / shares.sum()
    rank = math.exp(-sum(share * math.log(share) for share in shares.tolist() if share > 0))
    distance = (1 - unit(x) @ unit(x).T).tolist()
    order = largest(attention, len(x))
    kept: list[int] = []
    struck: set[int] = set()
    for token in order:
        if token in struck or len(kept) == k:
            continue
        kept.append(token)
        threshold = min(len(kept) * rank / average_rank * 0.01, ceiling)
        struck |= {other for other in order if other not in kept and distance[token][other] < threshold}
    kept += [token for token in order if token not in kept][: k - len(kept)]  # the most attended of the struck-out
    return sorted(kept)


@pytest.mark.parametrize("ceiling", [0.5, 0.9])
def test_agilepruner_walks_by_attention(kind: str, k: int, ceiling: float) -> None:
    tokens = picture(kind, 0, width=64)
    attention, _, x, _ = image(tokens)
    method = build_method("agilepruner", average_rank=40.0, max_distance=ceiling)
    assert chosen(method, tokens, k) == walk_by_hand(x, attention, k, 40.0, ceiling)
