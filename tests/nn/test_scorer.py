"""Scorers: where they may look, what padding and tiles do to them, and what they start from."""

import pytest
import torch
from torch import nn

from diffprune.nn import BilinearScorer, BlockSpec, DiagonalBlock, Scorer, make_scorer, standardise
from diffprune.nn.scorer import pack_segments

SPEC = BlockSpec(width=16, heads=2, mlp_width=32)
ROTARY = BlockSpec(width=16, heads=2, mlp_width=24, norm="rms", gated=True, activation="silu", rotary=10000.0)
CLIP_L = BlockSpec(width=1024, heads=16, mlp_width=4096, activation="quick_gelu", eps=1e-5)
QWEN2_5 = BlockSpec(width=1280, heads=16, mlp_width=3420, activation="silu", norm="rms", gated=True, rotary=10000.0)


def trained(scorer: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    for parameter in scorer.parameters():
        nn.init.normal_(parameter, mean=0.05, std=0.2)
    return scorer


@pytest.mark.parametrize("final_norm", [True, False])
def test_all_logits_start_equal_and_the_head_learns_first(final_norm: bool) -> None:
    scorer = Scorer(SPEC, final_norm=final_norm)
    logits = scorer(torch.randn(2, 5, 16))
    assert torch.equal(logits, torch.zeros(2, 5))
    logits[:, 0].sum().backward()
    assert scorer.head.weight.grad is not None and scorer.head.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("kind", ["blocks", "bilinear"])
@pytest.mark.parametrize("filler", [float("nan"), 1e20])
def test_padding_changes_no_real_logit_and_no_gradient(kind: str, filler: float) -> None:
    scorer = trained(make_scorer(kind, SPEC))
    mask = torch.tensor([[True] * 3 + [False] * 2, [True] * 5])
    clean = torch.randn(2, 5, 32)
    logits = scorer(torch.where(mask[..., None], clean, filler), mask=mask)
    torch.testing.assert_close(logits[0, :3], scorer(clean[:1, :3])[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits[1], scorer(clean[1:])[0], rtol=1e-4, atol=1e-5)
    assert (logits[~mask] == 0).all()
    logits.sum().backward()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in scorer.parameters())


def test_a_token_is_scored_in_the_light_of_its_image_and_of_no_other() -> None:
    scorer = trained(Scorer(SPEC))
    x = torch.randn(2, 5, 16)
    changed = x.clone()
    changed[0, 4] = torch.randn(16)  # adding a constant would vanish in the norms
    before, after = scorer(x), scorer(changed)
    assert (before[0] != after[0]).all()
    torch.testing.assert_close(before[1], after[1])


@pytest.mark.parametrize(
    "segment", [[[0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]], [[3, 3, 3, 3, 0, 9], [0, 1, 0, 1, 0, 0]]]
)
def test_tiles_are_scored_as_if_alone(segment: list[list[int]]) -> None:
    scorer = trained(Scorer(ROTARY))
    tiles = torch.tensor(segment)
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[1, 5] = False
    x, coords = torch.randn(2, 6, 64), torch.randint(0, 9, (2, 6, 4, 2))
    logits = scorer(x, mask=mask, coords=coords, segment=tiles)
    for row in range(2):
        for tile in tiles[row].unique():
            own = mask[row] & (tiles[row] == tile)
            if not own.any():
                continue
            alone = scorer(x[row : row + 1, own], coords=coords[row : row + 1, own])
            torch.testing.assert_close(logits[row, own], alone[0], rtol=1e-4, atol=1e-5)
    assert logits[1, 5] == 0


def test_gradients_pass_through_packed_tiles() -> None:
    scorer = trained(Scorer(SPEC))
    x = torch.randn(1, 5, 16, requires_grad=True)
    scorer(x, segment=torch.tensor([[0, 0, 1, 1, 1]]))[0, :2].sum().backward()
    assert x.grad is not None
    assert (x.grad[0, :2].abs().sum(-1) > 0).all() and (x.grad[0, 2:] == 0).all()


def test_five_tiles_become_five_rows() -> None:
    segment = torch.arange(5).repeat_interleave(576)[None]
    mask = torch.ones_like(segment, dtype=torch.bool)
    packed = pack_segments(mask, segment)
    assert packed.shape == (5, 576)
    assert torch.equal(packed.flatten(), torch.arange(2880))


def test_ragged_interleaved_tiles_are_packed_in_raster_order() -> None:
    mask = torch.tensor([[True, True, True, True], [True, True, False, False]])
    packed = pack_segments(mask, torch.tensor([[1, 0, 1, 1], [0, 0, -5, -5]]))
    assert packed.tolist() == [[1, -1, -1], [0, 2, 3], [4, 5, -1]]


def test_a_group_s_logit_is_the_mean_of_its_patches() -> None:
    scorer = trained(Scorer(SPEC))
    x = torch.randn(2, 3, 64)
    single = scorer(x.view(2, 12, 16))
    torch.testing.assert_close(scorer(x), single.view(2, 3, 4).mean(-1), rtol=1e-4, atol=1e-5)


def test_rotary_scorers_know_where_a_patch_is() -> None:
    scorer = trained(Scorer(ROTARY))
    x = torch.randn(1, 1, 16).expand(1, 4, 16)  # alike but for their places
    coords = torch.tensor([[0, 0], [0, 1], [5, 0], [9, 9]]).view(1, 4, 1, 2)
    assert torch.allclose(*scorer(x, coords=torch.zeros_like(coords))[0, :2])
    distinct = x + torch.eye(4, 16)
    assert not torch.allclose(scorer(distinct, coords=coords), scorer(distinct, coords=torch.zeros_like(coords)))
    with pytest.raises(ValueError, match=r"VisualTokens\.coords"):
        scorer(x)


def test_the_bilinear_scorer_is_the_mean_over_all_pairs() -> None:
    scorer = trained(BilinearScorer(SPEC))
    x = torch.randn(1, 5, 16)
    query, key = scorer.query(x[0]), scorer.key(x[0])
    torch.testing.assert_close(scorer(x)[0], (query @ key.T).mean(-1) / 8**0.5, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["blocks", "bilinear"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_logits_are_float32_whatever_the_model_s_precision(kind: str, dtype: torch.dtype) -> None:
    scorer = trained(make_scorer(kind, SPEC)).to(dtype)
    logits = scorer(torch.randn(1, 64, 16).to(dtype))
    assert logits.dtype == torch.float32
    assert len(logits.unique()) == 64  # no ties: in bfloat16 there would be


def test_autocast_does_not_reach_the_head() -> None:
    scorer = trained(Scorer(SPEC))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = scorer(torch.randn(1, 64, 16))
    assert logits.dtype == torch.float32 and len(logits.unique()) == 64


@pytest.mark.parametrize("kind, depth, message", [("conv", 2, "scorer='conv'"), ("blocks", -1, "scorer_depth=-1")])
def test_a_wrong_scorer_is_refused(kind: str, depth: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_scorer(kind, SPEC, depth=depth)


@pytest.mark.parametrize(
    "spec, scorer_millions, all_millions, trained_millions",
    [
        (CLIP_L, 25.2, 37.8, 35.7),
        (QWEN2_5, 39.4, 59.1, 55.8),
    ],
)
def test_parameter_counts_are_those_of_the_contract(
    spec: BlockSpec, scorer_millions: float, all_millions: float, trained_millions: float
) -> None:
    with torch.device("meta"):
        scorer, diagonal = Scorer(spec), DiagonalBlock(spec)
    parameters = [*scorer.parameters(), *diagonal.parameters()]
    assert round(sum(p.numel() for p in scorer.parameters()) / 1e6, 1) == scorer_millions
    assert round(sum(p.numel() for p in parameters) / 1e6, 1) == all_millions
    assert round(sum(p.numel() for p in parameters if p.requires_grad) / 1e6, 1) == trained_millions


def test_standardised_logits_have_mean_zero_and_deviation_one_over_real_tokens() -> None:
    torch.manual_seed(0)
    mask = torch.tensor([[True] * 6 + [False] * 2, [True] * 8])
    logits = torch.where(mask, torch.randn(2, 8) * torch.tensor([[3.0], [50.0]]) + 7, 1e6)
    for row, real in zip(standardise(logits, mask), mask, strict=True):
        torch.testing.assert_close(row[real].mean(), torch.tensor(0.0), rtol=0, atol=1e-5)
        torch.testing.assert_close(row[real].std(correction=0), torch.tensor(1.0), rtol=1e-3, atol=0)


def test_equal_logits_stay_equal_and_can_still_learn() -> None:
    logits = torch.zeros(1, 5, requires_grad=True)
    standard = standardise(logits)
    assert torch.equal(standard, torch.zeros(1, 5))
    standard[0, 0].backward()
    assert logits.grad is not None and logits.grad.isfinite().all() and logits.grad[0, 0] > 0


def test_merged_groups_are_scored_as_their_mean_patch() -> None:
    merged, plain = (trained(Scorer(ROTARY, groups=groups)) for groups in ("merged", "patches"))
    x, rows = torch.randn(2, 6, 64), torch.randint(0, 9, (2, 6, 1, 2)) * 2
    coords = rows + torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]])  # 2 x 2 patches
    mask = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    segment = torch.tensor([[0, 0, 0, 1, 1, 1]] * 2)
    for more in ({}, {"mask": mask}, {"mask": mask, "segment": segment}):
        logits, hidden = merged.read(x, coords=coords, **more)
        wanted, states = plain.read(x.unflatten(-1, (4, 16)).mean(2), coords=rows, **more)
        torch.testing.assert_close(logits, wanted)
        torch.testing.assert_close(hidden, states)
    assert not torch.allclose(merged(x, coords=coords), plain(x, coords=coords), atol=1e-3)
    shifted = merged(x, coords=coords + 1)  # the place of the first patch stands for the group's: only distances count
    torch.testing.assert_close(shifted, merged(x, coords=coords), rtol=1e-4, atol=1e-4)


def test_joined_tiles_are_scored_as_one_picture() -> None:
    apart, joined = (trained(Scorer(SPEC, tiles=tiles)) for tiles in ("apart", "joined"))
    x, segment = torch.randn(1, 6, SPEC.width), torch.tensor([[0, 0, 0, 1, 1, 1]])
    for one, other in zip(joined.read(x, segment=segment), apart.read(x), strict=True):
        torch.testing.assert_close(one, other)
    assert not torch.allclose(joined(x, segment=segment), apart(x, segment=segment), atol=1e-3)
    with pytest.raises(ValueError, match="tiles='mixed' is not known; give 'apart' or 'joined'"):
        Scorer(SPEC, tiles="mixed")


def test_another_way_to_score_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="groups='pairs' is not known; give 'patches' or 'merged'"):
        Scorer(SPEC, groups="pairs")
