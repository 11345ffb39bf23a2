"""HoloV: quotas per crop."""

from itertools import pairwise

import pytest
import torch

from diffprune.methods.holov import HoloV, split_budget
from diffprune.methods.options import build_method
from diffprune.types import VisualTokens
from tests.methods.examples import kept


def holov(**options: object) -> HoloV:
    method = build_method("holov", **options)
    assert isinstance(method, HoloV)
    return method


def seeded(k: int, width: int = 64) -> VisualTokens:
    generator = torch.Generator().manual_seed(k)
    x = torch.randn(1, 576, width, generator=generator)
    attention = torch.rand(1, 576, generator=generator) ** 4 / 100
    return VisualTokens(x=x, cls_attention=attention, grid=((24, 24),))


def test_a_crop_s_quota_follows_its_attention() -> None:
    attention = torch.tensor([[0.1, 0.2, 0.1, 0.1, 0.3, 0.2, 0.4, 0.3]])  # 1.18 and 2.82 of 4
    tokens = VisualTokens(x=torch.randn(1, 8, 4, generator=torch.Generator().manual_seed(0)), cls_attention=attention)
    assert kept(holov(crops=2).select(tokens, torch.tensor([4]))) == [[1, 4, 6, 7]]
    assert kept(holov(crops=2, native=True).select(tokens, torch.tensor([4]))) == [[1, 6, 4, 7]]  # by attention


def test_what_rounding_leaves_goes_to_the_heaviest_crops() -> None:
    score, sizes = torch.tensor([[1.0, 3.0, 2.0, 2.0]]), torch.tensor([[9, 9, 9, 9]])
    assert split_budget(score, sizes, torch.tensor([10]), exact=True).tolist() == [[1, 4, 3, 2]]  # 1.25 3.75 2.5 2.5


def test_a_quota_past_its_crop_goes_on_to_the_others() -> None:
    tokens = VisualTokens(
        x=torch.randn(1, 4, 4, generator=torch.Generator().manual_seed(0)),
        cls_attention=torch.tensor([[0.01, 0.02, 0.8, 0.9]]),
    )
    assert kept(holov(crops=2).select(tokens, torch.tensor([3]))) == [[1, 2, 3]]
    # The release fills up with all-zero tokens, and leaves a crop that is kept whole in raster order.
    assert kept(holov(crops=2, native=True).select(tokens, torch.tensor([3]))) == [[2, 3]]


def released_choice(x: torch.Tensor, attention: torch.Tensor, k: int) -> list[int]:
    """The rule, run by run."""
    num_runs = max(1, int(1024 / 576 * len(x) / k))
    size, longer = divmod(len(x), num_runs)
    borders = [0]
    for run in range(num_runs):
        borders.append(borders[-1] + size + (run < longer))
    runs = [range(start, end) for start, end in pairwise(borders)]
    scores = []
    for run in runs:
        if len(run) == 1:  # as it is, not a thousandfold
            scores.append(attention[run.start])
            continue
        own = x[run.start : run.stop]
        unit = own / (own.norm(dim=1, keepdim=True) + 1e-6)
        similarity = (unit @ unit.T) * (1 - torch.eye(len(run)))
        mean = similarity.sum(1) / (len(run) - 1)
        spread = ((similarity - mean[:, None]) ** 2).sum(1) / (len(run) - 1)
        a = attention[run.start : run.stop] * 1000
        scores.append((a + 0.09 * spread * (a.abs().mean() / (spread.abs().mean() + 1e-6))).mean())
    weights = torch.stack(scores) / (torch.stack(scores).sum() + 1e-6)
    quota = (weights * k).floor().long()
    for run in weights.topk(k - int(quota.sum())).indices.tolist():
        quota[run] += 1
    kept_tokens: list[int] = []
    for run, count in zip(runs, quota.tolist(), strict=True):
        ranked = sorted(run, key=lambda token: -float(attention[token]))
        kept_tokens += list(run) if count >= len(run) else ranked[:count]
    return kept_tokens


@pytest.mark.parametrize("k", [128, 64, 32, 100])
def test_the_native_choice_is_the_rule_run_by_run(k: int) -> None:
    tokens = seeded(k)
    assert tokens.cls_attention is not None
    native = kept(holov(native=True).select(tokens, torch.tensor([k])))[0]
    assert native == released_choice(tokens.x[0], tokens.cls_attention[0], k)
    assert len(set(native)) == k


def test_natively_a_run_of_one_token_weighs_a_thousandth_of_the_others() -> None:
    attention = torch.tensor([[0.2, 0.1, 0.9, 0.9]])  # runs 0 1, then 2 and 3 alone
    tokens = VisualTokens(x=torch.randn(1, 4, 4, generator=torch.Generator().manual_seed(0)), cls_attention=attention)
    assert kept(holov(crops=3).select(tokens, torch.tensor([2]))) == [[2, 3]]
    assert kept(holov(crops=3, native=True).select(tokens, torch.tensor([2]))) == [[0, 1]]
    tokens = seeded(2)
    assert tokens.cls_attention is not None
    found = kept(holov(native=True).select(tokens, torch.tensor([2])))[0]  # 64 runs of two and 448 of one
    assert found == released_choice(tokens.x[0], tokens.cls_attention[0], 2)


def test_in_the_release_alpha_has_no_say() -> None:
    tokens, k = seeded(64, width=8), torch.tensor([64])  # few channels: a spread far above the rounding guard
    assert torch.equal(holov(alpha=0.0).select(tokens, k), holov(alpha=5.0).select(tokens, k))
    paper = [holov(variant="paper", alpha=alpha).select(tokens, k) for alpha in (0.0, 5.0)]
    assert not torch.equal(*paper)


def test_the_paper_s_crops_are_blocks_of_the_picture() -> None:
    attention = torch.full((4, 4), 0.1)
    attention[:2, 2:] = torch.tensor([[0.9, 0.8], [0.7, 0.6]])  # the top right block
    tokens = VisualTokens(x=torch.ones(1, 16, 2), cls_attention=attention.view(1, 16), grid=((4, 4),))
    kept_by_paper = kept(holov(variant="paper", crops=4).select(tokens, torch.tensor([5])))[0]
    assert {2, 3, 6, 7} < set(kept_by_paper)
    with pytest.raises(ValueError, match=r"VisualTokens\.grid"):
        holov(variant="paper").select(VisualTokens(x=tokens.x, cls_attention=tokens.cls_attention), torch.tensor([5]))


def test_projected_tokens_are_compared_where_they_are_given() -> None:
    tokens = seeded(64, width=8)
    projected = torch.randn(1, 576, 6, generator=torch.Generator().manual_seed(9))
    k = torch.tensor([64])
    method = holov(variant="paper", alpha=5.0)
    other = VisualTokens(x=tokens.x, cls_attention=tokens.cls_attention, grid=tokens.grid, projected=projected)
    same = VisualTokens(x=projected, cls_attention=tokens.cls_attention, grid=tokens.grid)
    assert torch.equal(method.select(other, k), method.select(same, k))
    assert not torch.equal(method.select(other, k), method.select(tokens, k))


@pytest.mark.parametrize("option, value", [("variant", "code"), ("crops", 0)])
def test_an_option_with_a_wrong_value_is_refused_by_name(option: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{option}={value!r}"):
        build_method("holov", **{option: value})
