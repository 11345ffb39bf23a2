"""Releases that prune before the language model, written out token by token, beside our `native` of them.

576 tokens, batch 1, no cleverness: what a reader of a release would write down. Of equals the first goes first.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from itertools import accumulate

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from diffprune.methods.oc_vtp import OCVTP, slot_noise
from diffprune.methods.options import build_method
from diffprune.methods.visionselector import VisionSelector
from diffprune.nn import BlockSpec
from diffprune.types import VisualTokens
from tests.methods.examples import make_method

SIDE = 24
N = SIDE * SIDE


def largest_first(values: Tensor) -> list[int]:
    given = values.tolist()
    return sorted(range(len(given)), key=lambda index: (-given[index], index))


@cache
def picture(kind: str, width: int = 64) -> VisualTokens:
    """Tokens without structure, in clusters, about one mean, or half of them copies with equal attention."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    x, projected, attention = normal(N, width), normal(N, width), normal(16, N).softmax(-1).mean(0)
    if kind == "clusters":
        member = torch.randint(0, 20, (N,), generator=generator)
        x, projected = normal(20, width)[member] + 0.3 * x, normal(20, width)[member] + 0.3 * projected
    elif kind == "one mean":
        x, projected = x + normal(width), projected + normal(width)
    elif kind == "copies":
        source = torch.randint(0, N // 2, (N,), generator=generator)
        x, projected = x[source], projected[source]
        attention = torch.randint(1, 200, (N,), generator=generator) / 1000
    return VisualTokens(
        x=x[None],
        grid=(SIDE, SIDE),
        cls_attention=attention[None],
        projected=projected[None],
        text=normal(7, width)[None],
    )


EACH_KIND = pytest.mark.parametrize("kind", ["plain", "clusters", "one mean", "copies"])
EACH_K = pytest.mark.parametrize("k", [128, 64, 32])


# --- VisPruner --------------------------------------------------------------------------------------------------------


def vispruner(x: Tensor, attention: Tensor, k: int, share: float = 0.5) -> list[int]:
    x = x / x.norm(dim=-1, keepdim=True)
    order = largest_first(attention)
    important = int(k * share)
    chosen, rest = order[:important], order[important:]
    while len(rest) > k - important:
        drop = min(8, len(rest) - (k - important))
        even, odd = rest[::2], rest[1::2]
        nearest = (x[even] @ x[odd].T).max(-1).values
        rest = [even[index] for index in largest_first(nearest)[drop:]] + odd
    return sorted(chosen + rest)


@EACH_KIND
@EACH_K
def test_vispruner_keeps_what_its_release_keeps(kind: str, k: int) -> None:
    tokens = picture(kind)
    assert tokens.cls_attention is not None
    for share in (0.5, 0.75):
        method = build_method("vispruner", native=True, important=share)
        expected = vispruner(tokens.x[0], tokens.cls_attention[0], k, share)
        assert method.select(tokens, k)[0].tolist() == expected


# --- MMTok ------------------------------------------------------------------------------------------------------------


def mmtok(x: Tensor, projected: Tensor, text: Tensor, k: int) -> list[int]:
    x, projected, text = (functional.normalize(value, dim=-1) for value in (x, projected, text))
    by_text = (text @ projected.T / 0.02).softmax(-1) / len(text)
    by_visual = (x @ x.T / 0.2).softmax(-1) / len(x)
    covers = torch.cat([by_text, 0.5 * by_visual])
    best, chosen = torch.zeros(len(covers), 1), []
    for _ in range(k):
        gain = (covers - best).clamp(min=0).sum(0)
        gain[chosen] = -torch.inf
        chosen.append(largest_first(gain)[0])
        best = torch.maximum(best, covers[:, chosen[-1:]])
    return sorted(chosen)


@EACH_KIND
@EACH_K
def test_mmtok_keeps_what_its_release_keeps(kind: str, k: int) -> None:
    tokens = picture(kind)
    assert tokens.projected is not None and tokens.text is not None
    expected = mmtok(tokens.x[0], tokens.projected[0], tokens.text[0], k)
    assert build_method("mmtok", native=True).select(tokens, k)[0].tolist() == expected


# --- PruneSID ---------------------------------------------------------------------------------------------------------


def principal_components(observations: Tensor, num: int) -> Tensor:
    """[D, N] -> [N, num]: the leading right singular vectors of the centred columns."""
    centred = observations.double() - observations.double().mean(0)
    return torch.linalg.svd(centred, full_matrices=False).Vh[:num].T


def drawn_components(observations: Tensor, num: int) -> Tensor:
    return torch.pca_lowrank(observations, q=num)[2]


def prunesid(x: Tensor, attention: Tensor, k: int, components: Callable[[Tensor, int], Tensor]) -> list[int]:
    num_groups = int(k / 4)
    group = components(torch.sigmoid(x).T, num_groups).abs().argmax(-1)
    unit = functional.normalize(x, dim=-1)
    similarity = unit @ unit.T
    limit = k / 32 * similarity.triu(1).sum() / (N * (N - 1) / 2)
    ranked: list[list[int]] = []
    survivors: list[int] = []
    for number in range(num_groups):
        waiting = [index for index in largest_first(attention) if group[index] == number]
        kept: list[int] = []
        struck: list[int] = []
        while waiting:
            best = waiting.pop(0)
            kept.append(best)
            struck += [index for index in waiting if similarity[best, index] > limit]
            waiting = [index for index in waiting if not similarity[best, index] > limit]
        fallback = [index for index in largest_first(attention) if index in struck]
        ranked.append(kept + fallback)
        survivors.append(len(kept))
    sizes = [len(members) for members in ranked]
    least = [min(1, size) for size in sizes]
    most = [min(5 * math.ceil(k / 64), size, number) for size, number in zip(sizes, survivors, strict=True)]
    while sum(most) < k:
        most = [min(number + 1, size) for number, size in zip(most, sizes, strict=True)]
    spare, total = k - sum(least) - 1, sum(survivors)
    borders = [0, *(round(Fraction(end * spare, total)) for end in accumulate(survivors))]  # halves to the even number
    quota = [
        min(low + borders[index + 1] - borders[index], high)
        for index, (low, high) in enumerate(zip(least, most, strict=True))
    ]
    for index in largest_first(torch.tensor(survivors)):
        quota[index] += min(most[index] - quota[index], k - 1 - sum(quota))
    return [token for members, number in zip(ranked, quota, strict=True) for token in members[:number]]


@EACH_KIND
@EACH_K
def test_prunesid_keeps_what_its_release_keeps_in_its_order(kind: str, k: int) -> None:
    tokens = picture(kind)
    assert tokens.cls_attention is not None
    method = build_method("prunesid", native=True)
    torch.manual_seed(0)
    expected = prunesid(tokens.x[0], tokens.cls_attention[0], k, drawn_components)
    assert len(expected) == k - 1  # [CLS] is the release's K-th
    for budget in (k, torch.tensor([k])):
        torch.manual_seed(0)
        assert method.select(tokens, budget)[0].tolist() == expected
    torch.manual_seed(0)
    assert method.choose(tokens, k).keep[0].tolist() == sorted(expected)


@EACH_KIND
@EACH_K
def test_prunesid_with_exact_components_follows_the_same_rule(kind: str, k: int) -> None:
    tokens = picture(kind)
    assert tokens.cls_attention is not None
    method = build_method("prunesid", native=True, components="exact")
    expected = prunesid(tokens.x[0], tokens.cls_attention[0], k, principal_components)
    assert method.select(tokens, k)[0].tolist() == expected


# --- OC-VTP and VisionSelector, with the weights of ours --------------------------------------------------------------

SPEC = BlockSpec(width=64, heads=2, mlp_width=128)


def slot_attention(method: OCVTP, x: Tensor, num_slots: int) -> Tensor:
    """[K, N]: how the slots share out each token after three rounds."""
    own = method.slots
    inputs = own.input_norm(own.encode(x))
    key, value = own.key(inputs), own.value(inputs)
    slots = own.mean + own.log_deviation.exp() * slot_noise(num_slots, own.width, method.options.seed)
    attention = torch.empty(0)
    for _ in range(3):
        attention = (own.query(own.slot_norm(slots)) @ key.T / math.sqrt(own.width)).softmax(0)
        slots = own.update(attention / attention.sum(-1, keepdim=True) @ value, slots)
        slots = slots + own.mlp(slots)
    return attention


@EACH_K
def test_oc_vtp_keeps_each_slot_s_token_beside_cls_and_fills_up_by_attention(k: int) -> None:
    tokens = picture("clusters")
    assert tokens.cls_attention is not None
    torch.manual_seed(k)
    method = build_method("oc_vtp", block=SPEC, native=True)
    assert isinstance(method, OCVTP)
    with torch.no_grad():
        expected = set(slot_attention(method, tokens.x[0], k).argmax(-1).tolist())
    assert len(expected) < k  # some slots agree, so none has to make room for [CLS]
    for token in largest_first(tokens.cls_attention[0]):
        if len(expected) < k - 1:  # [CLS] is the release's K-th
            expected.add(token)
    assert method.select(tokens, k)[0].tolist() == sorted(expected)


@EACH_K
def test_visionselector_keeps_the_largest_mean_products(k: int) -> None:
    tokens = picture("one mean")
    method = make_method("visionselector", spec=SPEC)
    assert isinstance(method, VisionSelector)
    with torch.no_grad():
        query, key = method.scorer.query(tokens.x[0]), method.scorer.key(tokens.x[0])  # type: ignore[operator]
        logits = (query @ key.T / math.sqrt(query.shape[-1])).mean(-1)
        assert method.select(tokens, k)[0].tolist() == sorted(largest_first(logits)[:k])
