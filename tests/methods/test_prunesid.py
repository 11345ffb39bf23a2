"""PruneSID: groups by principal component, suppression inside a group, quotas."""

import dataclasses
import math
from fractions import Fraction
from itertools import accumulate

import pytest
import torch

from diffprune.fast.graphs import capturing, waiting_refused
from diffprune.methods.options import build_method
from diffprune.methods.prunesid import (
    PruneSID,
    exact_loadings,
    orthonormal,
    raise_caps,
    split_budget,
    subspace_loadings,
    suppress,
)
from diffprune.types import VisualTokens
from tests.methods.examples import kept, make_tokens
from tests.methods.looks import never_looking


def prunesid(**options: object) -> PruneSID:
    method = build_method("prunesid", **options)
    assert isinstance(method, PruneSID)
    return method


def structured(seed: int, num_tokens: int = 576, width: int = 160) -> VisualTokens:
    """Tokens made of a few patterns each, as an encoder's are: their components are well apart."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randn(40, width, generator=generator) * torch.linspace(2.0, 0.5, 40)[:, None]
    mixture = torch.rand(num_tokens, 40, generator=generator) ** 6
    x = mixture @ patterns + 0.05 * torch.randn(num_tokens, width, generator=generator)
    attention = torch.rand(1, num_tokens, generator=generator) ** 3
    return VisualTokens(x=x[None], cls_attention=attention)


def test_a_token_struck_out_strikes_out_nobody() -> None:
    similarity = torch.tensor([[1.0, 0.9, 0.1, 0.9], [0.9, 1.0, 0.9, 0.0], [0.1, 0.9, 1.0, 0.0], [0.9, 0.0, 0.0, 1.0]])
    survives = suppress(
        similarity[None],
        torch.tensor([[0, 1, 2, 3]]),
        torch.tensor([[0, 0, 0, 1]]),
        torch.ones(1, 4, dtype=torch.bool),
        torch.tensor([0.5]),
    )
    # 0 strikes out 1, so 2 stays although it is like 1; 3 is like 0 but of another group.
    assert survives.tolist() == [[True, False, True, True]]


def test_quotas_follow_the_survivors_up_to_a_cap() -> None:
    sizes, survivors = torch.tensor([[6, 3, 3]]), torch.tensor([[4, 2, 1]])
    # Caps 4 2 1 hold 7 of 8, so they are raised to 5 3 2. One each; 5 more by 4:2:1 end at 2.86 4.29 5, rounded 3 4 5.
    assert split_budget(sizes, survivors, torch.tensor([8]), torch.tensor([8])).tolist() == [[4, 2, 2]]
    # Caps 6 4 4 cut the quotas 8 2 2; what is left goes to the group with the most survivors that has room.
    sizes, survivors = torch.tensor([[20, 8, 8]]), torch.tensor([[20, 3, 3]])
    assert split_budget(sizes, survivors, torch.tensor([12]), torch.tensor([12])).tolist() == [[6, 4, 2]]


def test_a_border_halfway_between_two_tokens_goes_to_the_even_one() -> None:
    sizes, survivors = torch.tensor([[10, 13, 8, 9]]), torch.tensor([[9, 4, 3, 6]])
    # 11 beside one each, by 9:4:3:6 of 22: borders 4.5 6.5 8 11, rounded 4 6 8 11. Shares added up first make 6.5 more.
    assert split_budget(sizes, survivors, 16, 15).tolist() == [[5, 3, 3, 4]]


def test_components_are_those_of_the_full_decomposition() -> None:
    for num_tokens, width in ((30, 50), (50, 30)):  # either Gram matrix may be the smaller
        tokens = structured(1, num_tokens, width)
        loadings = exact_loadings(tokens.x, tokens.mask, torch.tensor([6]), 6)[0]
        squashed = torch.sigmoid(tokens.x[0].double()).T  # [D, N]
        expected = torch.linalg.svd(squashed - squashed.mean(0), full_matrices=False).Vh[:6].T.abs()
        torch.testing.assert_close(loadings, expected.float(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("num_tokens, width", [(300, 400), (400, 300)])  # either Gram matrix may be the smaller
def test_the_iteration_finds_the_components_of_the_full_decomposition(
    num_tokens: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = structured(2, num_tokens, width)
    arguments = tokens.x, tokens.mask, torch.tensor([16]), 16
    expected = exact_loadings(*arguments)
    monkeypatch.setattr("diffprune.methods.prunesid.exact_loadings", None)  # and so by another way
    torch.testing.assert_close(subspace_loadings(*arguments), expected, rtol=1e-4, atol=1e-5)


def test_the_iteration_stands_a_steep_spectrum() -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(size, 200, generator=generator))[0] for size in (200, 256))
    x = (10 * left * torch.arange(1, 201) ** -2.0 @ right.T)[
        None
    ]  # the Gram matrix's spectrum falls with the 4th power
    arguments = x, torch.ones(1, 200, dtype=torch.bool), torch.tensor([20]), 20
    torch.testing.assert_close(subspace_loadings(*arguments), exact_loadings(*arguments), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("k", [32, 64, 100])
def test_components_found_either_way_choose_the_same_tokens(k: int) -> None:
    tokens = structured(k, width=320)
    choices = [prunesid(components=kind).select(tokens, torch.tensor([k])) for kind in ("auto", "subspace", "exact")]
    assert torch.equal(choices[0], choices[1]) and torch.equal(choices[1], choices[2])


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_tokens_of_few_directions_are_chosen_without_nan(rank: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 120, rank, generator=generator) @ torch.randn(rank, 150, generator=generator)
    tokens = VisualTokens(x=x, cls_attention=torch.rand(1, 120, generator=generator))
    loadings = subspace_loadings(tokens.x, tokens.mask, torch.tensor([8]), 8)
    assert loadings.isfinite().all()
    assert len(set(prunesid().select(tokens, torch.tensor([32]))[0].tolist())) == 32


def test_columns_become_orthonormal_in_their_own_span() -> None:
    columns = torch.randn(2, 30, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    basis = orthonormal(columns * torch.tensor([1e9, 1.0, 1e-9, 1.0, 1e3], dtype=torch.float64))
    torch.testing.assert_close(basis.transpose(1, 2) @ basis, torch.eye(5).double().expand(2, -1, -1))
    torch.testing.assert_close(basis @ (basis.transpose(1, 2) @ columns), columns)


def test_caps_rise_by_the_least_that_holds_the_budget() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(0, 12, (50, 6), generator=generator)
    caps = torch.minimum(torch.randint(0, 5, (50, 6), generator=generator), sizes)
    k = (sizes.sum(-1) * torch.rand(50, generator=generator)).long()
    raised = raise_caps(caps, sizes, k)
    for cap, size, budget, found in zip(caps, sizes, k, raised, strict=True):
        while int(cap.sum()) < int(budget):
            cap = torch.minimum(cap + 1, size)
        assert found.tolist() == cap.tolist()


def released_choice(x: torch.Tensor, attention: torch.Tensor, k: int) -> list[int]:
    """The rule, group by group."""
    squashed = torch.sigmoid(x.double()).T
    loadings = torch.linalg.svd(squashed - squashed.mean(0), full_matrices=False).Vh[: k // 4].T.abs()
    group = loadings.argmax(-1).tolist()
    unit = torch.nn.functional.normalize(x, dim=-1)
    similarity = unit @ unit.T
    theta = k / 32 * float(similarity.triu(1).sum() / (len(x) * (len(x) - 1) / 2))
    members = [[i for i in range(len(x)) if group[i] == g] for g in range(k // 4)]
    ranked, survivors = [], []
    for own in members:
        waiting = sorted(own, key=lambda token: -float(attention[token]))
        chosen: list[int] = []
        for token in waiting:
            if all(float(similarity[token, other]) <= theta for other in chosen):
                chosen.append(token)
        survivors.append(len(chosen))
        ranked.append(chosen + [token for token in waiting if token not in chosen])
    cap = [min(5 * math.ceil(k / 64), len(own), count) for own, count in zip(members, survivors, strict=True)]
    while sum(cap) < k:
        cap = [min(value + 1, len(own)) for value, own in zip(cap, members, strict=True)]
    low = [min(1, len(own)) for own in members]
    spare = k - sum(low) - 1
    ends = [0, *(round(Fraction(end * spare, sum(survivors))) for end in accumulate(survivors))]  # halves to even
    quota = [min(cap[g], low[g] + ends[g + 1] - ends[g]) for g in range(len(members))]
    for g in sorted(range(len(members)), key=lambda g: -survivors[g]):
        quota[g] += min(cap[g] - quota[g], spare + sum(low) - sum(quota))
    return [token for own, count in zip(ranked, quota, strict=True) for token in own[:count]]


@pytest.mark.parametrize("k", [128, 64, 32])
def test_the_native_choice_is_the_rule_group_by_group(k: int) -> None:
    tokens = structured(k)
    assert tokens.cls_attention is not None
    native = kept(prunesid(native=True, components="exact").select(tokens, torch.tensor([k])))[0]
    assert native == released_choice(tokens.x[0], tokens.cls_attention[0], k)
    assert len(set(native)) == k - 1  # [CLS] is the release's k-th


def test_any_budget_is_met_exactly_whatever_was_struck_out() -> None:
    tokens = structured(5)
    for k in (1, 2, 16, 128, 575):
        keep = prunesid().select(tokens, torch.tensor([k]))[0]
        assert len(set(keep.tolist())) == k


def test_the_randomised_components_follow_torch_s_seed() -> None:
    tokens, k = structured(3, 80, 40), torch.tensor([24])
    method = prunesid(components="lowrank")
    choices = []
    for seed in (0, 0):
        torch.manual_seed(seed)
        choices.append(method.select(tokens, k))
    assert torch.equal(*choices)
    assert len(set(choices[0][0].tolist()) & set(prunesid().select(tokens, k)[0].tolist())) > 12


def test_native_needs_room_for_cls_and_a_group() -> None:
    with pytest.raises(ValueError, match="keep=3 leaves native PruneSID no group; it needs K of at least 4"):
        prunesid(native=True).select(structured(0, 12, 8), torch.tensor([3]))


def test_native_leaves_room_for_cls_where_there_are_as_many_groups_as_k() -> None:
    """Three groups of one image, in two of which a token may stay, beside an image of a larger K."""
    method, tokens = prunesid(native=True, tokens_per_group=1, components="exact"), make_tokens((12, 12))
    together = kept(method.select(tokens, torch.tensor([3, 10])))
    alone = [kept(method.select(tokens.take([row]), torch.tensor([k])))[0] for row, k in ((0, 3), (1, 10))]
    assert [len(row) for row in together] == [2, 9] and together == alone


@pytest.mark.parametrize("option, value", [("components", "svd"), ("tokens_per_group", 0)])
def test_an_option_with_a_wrong_value_is_refused_by_name(option: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{option}={value!r}"):
        build_method("prunesid", **{option: value})


def test_a_picture_keeps_the_same_beside_one_with_another_budget() -> None:
    generator = torch.Generator().manual_seed(5)
    x, attention = torch.randn(2, 300, 200, generator=generator), torch.rand(2, 300, generator=generator)
    mask = torch.arange(300) < torch.tensor([300, 220])[:, None]
    both = VisualTokens(x=x, mask=mask, cls_attention=attention.masked_fill(~mask, 0.0))
    k = torch.tensor([72, 64])
    together = prunesid().select(both, k)
    for row, count in enumerate((300, 220)):
        alone = VisualTokens(x=x[row : row + 1, :count], cls_attention=attention[row : row + 1, :count])
        assert kept(prunesid().select(alone, k[row : row + 1]))[0] == [i for i in together[row].tolist() if i >= 0]
        assert kept(prunesid().select(alone, int(k[row])))[0] == kept(prunesid().select(alone, k[row : row + 1]))[0]


# --- where nobody may look at the device ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "num_tokens, width, k", [(576, 320, 64), (576, 320, 128), (300, 64, 100), (100, 300, 12), (12, 16, 5), (1, 4, 1)]
)
@pytest.mark.parametrize("padding", [0, 1])
def test_a_choice_nobody_looks_at_is_the_same(
    num_tokens: int, width: int, k: int, padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = structured(k, num_tokens, width)
    if padding and num_tokens > k:
        tokens = dataclasses.replace(tokens, mask=torch.arange(num_tokens)[None] < num_tokens - padding)
    expected = prunesid().select(tokens, k)
    with never_looking(monkeypatch):
        keep = prunesid().select(tokens, k)
    assert torch.equal(keep, expected)


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_tokens_of_few_directions_are_chosen_unseen(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 60, rank, generator=generator) @ torch.randn(rank, 150, generator=generator)
    tokens = VisualTokens(x=x, cls_attention=torch.rand(1, 60, generator=generator))
    with never_looking(monkeypatch):
        keep = prunesid().select(tokens, 32)
    assert len(set(keep[0].tolist())) == 32


def test_a_large_matrix_is_decomposed_whether_it_may_wait_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = structured(0, 300, 290)
    with never_looking(monkeypatch), pytest.raises(RuntimeError, match="_linalg_eigh waits for the device"):
        prunesid().select(tokens, 300)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("num_tokens, k", [(576, 64), (576, 128), (2880, 320), (12, 5)])
def test_a_captured_choice_is_the_plain_one(num_tokens: int, k: int) -> None:
    tokens, method = structured(k, num_tokens, 1024), prunesid()
    assert tokens.cls_attention is not None
    tokens = VisualTokens(x=tokens.x.half().cuda(), cls_attention=tokens.cls_attention.cuda())
    with torch.inference_mode():
        expected = method.select(tokens, k)
        with waiting_refused():  # warm for the capture, and by the same way
            assert method.select(tokens, k).shape == expected.shape
        with capturing() as graph:
            keep = method.select(tokens, k)
        graph.replay()
    assert torch.equal(keep, expected)
