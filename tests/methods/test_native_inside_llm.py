"""Releases that prune inside the language model, written out token by token, beside our `native` of them.

A prompt of 35 words, 576 visual tokens and 60 words, as the releases hard-code it. Of equals the first goes first.
"""

import math
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

from diffprune.inside.state import Cut, LayerState
from diffprune.methods.base import LayerPruner
from diffprune.methods.options import build_method
from tests.methods.layer_states import HandMade, make_state

START, N, WORDS = 35, 576, 60
TEXT = START + N
WIDTH = TEXT + WORDS
HEADS = 16


@dataclass(frozen=True)
class Inside:
    """What a decoder layer holds of one prompt, without a batch."""

    hidden: Tensor  # [T, L]
    attention: Tensor  # [H, T, T]
    keys: Tensor  # [H, T, E]
    bias: Tensor  # [T, T]

    def before(self, layer: int) -> LayerState:
        maps = dict.fromkeys((layer - 1, layer), self.attention[None])
        reader = HandMade(maps=maps, cached=self.keys[None], bias=self.bias[None])
        visual, text = list(range(START, TEXT)), list(range(TEXT, WIDTH))
        return make_state(self.hidden[None], [visual], [text], reader, layer=layer)


@cache
def inside(kind: str) -> Inside:
    """Random tensors; "clusters" has groups of like tokens, "ties" attention of few different values."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    hidden, logits = normal(WIDTH, 32), normal(HEADS, WORDS, WIDTH)
    if kind == "clusters":
        hidden = normal(20, 32)[torch.randint(0, 20, (WIDTH,), generator=generator)] + 0.3 * hidden
    elif kind == "ties":
        logits[1:], logits[0] = 0.0, logits[0].round()
    later = torch.arange(WIDTH) > torch.arange(TEXT, WIDTH)[:, None]
    attention = torch.zeros(HEADS, WIDTH, WIDTH)  # nobody asks what the columns before the words attend to
    attention[:, TEXT:] = logits.masked_fill(later, -torch.inf).softmax(-1)
    bias = torch.rand(WIDTH, WIDTH, generator=generator) + 0.5
    return Inside(hidden, attention, normal(HEADS, WIDTH, 4), bias)


def largest_first(values: Tensor) -> list[int]:
    given = values.tolist()
    return sorted(range(len(given)), key=lambda index: (-given[index], index))


def native(name: str, **options: object) -> LayerPruner:
    method = build_method(name, **options)
    assert isinstance(method, LayerPruner)
    return method


def kept_at(method: LayerPruner, state: LayerState, k: int) -> list[int]:
    chosen = method.select_at(state, torch.tensor([k]))
    assert isinstance(chosen, Tensor)
    return chosen[0].tolist()


EACH_KIND = pytest.mark.parametrize("kind", ["plain", "clusters", "ties"])


# --- FastV and PyramidDrop: one row of attention ----------------------------------------------------------------------


@EACH_KIND
@pytest.mark.parametrize("k", [128, 64, 32])
def test_fastv_keeps_what_its_release_keeps(kind: str, k: int) -> None:
    given, method = inside(kind), native("fastv")
    ((layer, left),) = method.stages(32, N, k).items()
    scores = given.attention[:, -1, START:TEXT].mean(0)
    assert (layer, left) == (2, k)
    assert kept_at(method, given.before(layer), left) == sorted(largest_first(scores)[:k])


@EACH_KIND
@pytest.mark.parametrize("k", [128, 72, 64, 32])  # 72 is an eighth, the release's own ratio
def test_pyramiddrop_keeps_what_its_release_keeps(kind: str, k: int) -> None:
    given, method = inside(kind), native("pyramiddrop", native=True)
    scores = given.attention[:, -1, START:TEXT].mean(0)
    stages = method.stages(32, N, k)
    assert stages == {8: int(N * 0.5), 16: int(N * 0.25), 24: k}
    for layer, left in stages.items():
        assert kept_at(method, given.before(layer), left) == sorted(largest_first(scores)[:left])


# --- DART -------------------------------------------------------------------------------------------------------------


def dart(given: Inside, ratio: float) -> list[int]:
    size = given.keys.abs().sum((0, 2))
    visual = [START + index for index in largest_first(size[START:TEXT])[:4]]
    words = [TEXT + index for index in largest_first(size[TEXT:])[:4]]
    left = [column for column in range(START, TEXT) if column not in visual]
    picks, chosen = int(N * (1 - ratio) / 8), list(visual)
    for pivot in set(visual + words):  # in the order of a set
        cosine = torch.cosine_similarity(given.hidden[pivot], given.hidden[left], dim=-1)
        taken = [left[index] for index in largest_first(-cosine)[:picks]]
        chosen += taken
        left = [column for column in left if column not in taken]
    return sorted(column - START for column in chosen)


@EACH_KIND
@pytest.mark.parametrize(("k", "ratio", "count"), [(128, 0.778, 124), (64, 0.889, 60), (32, 0.944, 36)])
def test_dart_keeps_what_its_release_keeps(kind: str, k: int, ratio: float, count: int) -> None:
    given, expected = inside(kind), dart(inside(kind), ratio)
    assert len(expected) == count
    for method in (native("dart", native=True), native("dart", native=True, ratio=ratio)):
        assert method.stages(32, N, k) == {2: count}
        for budget in (count, k):  # what the stages say, and K itself
            assert kept_at(method, given.before(2), budget) == expected


# --- SparseVLM --------------------------------------------------------------------------------------------------------


def raters(given: Inside) -> list[int]:
    share = (given.hidden[START:TEXT] @ given.hidden[TEXT:].T).softmax(-1).mean(0)
    return [TEXT + index for index in range(WORDS) if share[index] > share.mean()]


def density_peaks(x: Tensor, num: int) -> tuple[list[int], Tensor]:
    """Centres, and the plain mean of each one's cluster."""
    distance = torch.stack([(x - own).norm(dim=-1) for own in x]) / math.sqrt(x.shape[1])
    density = (-distance.topk(num, largest=False).values.square().mean(-1)).exp()  # a point is its own nearest
    to_denser = torch.full_like(density, float(distance.max()))
    for index, own in enumerate(distance):
        if (density > density[index]).any():
            to_denser[index] = own[density > density[index]].min()
    centres = largest_first(density * to_denser)[:num]
    member = distance[:, centres].argmin(-1)
    member[centres] = torch.arange(num)
    return centres, torch.stack([x[member == cluster].mean(0) for cluster in range(num)])


@pytest.mark.parametrize("kind", ["plain", "clusters"])
@pytest.mark.parametrize(("k", "stages"), [(192, (300, 200, 110)), (128, (303, 110, 36)), (64, (66, 30, 17))])
def test_sparsevlm_keeps_and_merges_what_its_release_does(kind: str, k: int, stages: tuple[int, ...]) -> None:
    given, method = inside(kind), native("sparsevlm", native=True)
    assert tuple(method.stages(32, N, k).items()) == tuple(zip((3, 7, 16), stages, strict=True))
    scores = given.attention[:, raters(given), START:TEXT].mean((0, 1))
    cut = method.select_at(given.before(3), torch.tensor([stages[0]]))
    assert isinstance(cut, Cut) and cut.hidden is not None
    visual, order = given.hidden[START:TEXT], largest_first(scores)
    pool = order[stages[0] :][: int(0.3 * (N - stages[0])) + 1]
    centres, merged = density_peaks(visual[pool], int(len(pool) / 10) + 1)
    kept = sorted(order[: stages[0]])
    assert cut.keep[0].tolist() == kept + [pool[index] for index in centres]  # merged ones behind the others
    torch.testing.assert_close(cut.hidden[0], torch.cat([visual[kept], merged]))


@pytest.mark.parametrize("kind", ["plain", "clusters"])
@pytest.mark.parametrize(("k", "stages"), [(192, (300, 200, 118)), (128, (238, 108, 60)), (64, (66, 34, 20))])
def test_sparsevlm_plus_keeps_what_its_release_keeps(kind: str, k: int, stages: tuple[int, ...]) -> None:
    given, method = inside(kind), native("sparsevlm-plus", native=True)
    assert tuple(method.stages(32, N, k).values()) == stages
    rows = raters(given)
    weights = given.attention[:, rows, START:TEXT] / given.bias[rows, START:TEXT]
    heads = largest_first(weights.sum((1, 2)))[:14]
    expected = sorted(largest_first(weights[heads].mean((0, 1)))[: stages[0]])
    assert kept_at(method, given.before(3), stages[0]) == expected
