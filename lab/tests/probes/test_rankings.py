"""Rankings by random directions, and what two tables of losses have in common."""

import pytest
import torch

from diffprune.model import PrunedVLM
from diffprune_lab.probes.agreement import Captions, correlation, fixed_logits, random_rankings
from tests import tiny


@pytest.fixture(scope="module")
def some() -> tuple[PrunedVLM, list[Captions]]:
    """A tiny model and a few captions."""
    vlm = PrunedVLM(*tiny.build("llava"), method="diffprune", keep=4)
    batch = vlm.prepare([tiny.picture(0), tiny.picture(1)], ["a", "b"], ["c", "d"])
    tokens = vlm.encode(batch)
    assert tokens is not None
    return vlm, [Captions(batch=batch, tokens=tokens, ids=[0, 1], seed=42, remove_below=1e-3)]


def test_rankings_come_in_opposites_and_padding_counts_for_nothing() -> None:
    vlm = PrunedVLM(*tiny.build("llava_next"), method="full")
    batch = vlm.prepare([tiny.picture(0, (60, 30)), tiny.picture(1, (30, 30))], ["a", "b"])
    tokens = vlm.encode(batch)
    assert tokens is not None and not tokens.mask.all()
    ((first, second, third, fourth),) = random_rankings([tokens], 4, seed=1)
    real = tokens.mask
    torch.testing.assert_close(first[real], -third[real])
    torch.testing.assert_close(second[real], -fourth[real])
    assert not torch.allclose(first[real].abs(), second[real].abs())
    with torch.autocast("cpu", torch.bfloat16):
        assert random_rankings([tokens], 4, seed=1)[0][0].dtype == torch.float32
    for row, mask in zip(first, real, strict=True):
        assert row[mask].mean().item() == pytest.approx(0, abs=1e-4)
        assert row[mask].std(correction=0).item() == pytest.approx(1, rel=1e-3)


def test_correlation_is_within_rows_and_0_without_variation() -> None:
    table = torch.tensor([[1.0, 2.0, 3.0], [11.0, 12.0, 13.0]])
    assert correlation(table, 5 + 2 * table) == pytest.approx(1)
    assert correlation(table, -table + torch.tensor([[0.0], [90.0]])) == pytest.approx(-1)
    assert correlation(table, torch.ones(2, 3)) == 0
    assert correlation(table, torch.full((2, 3), torch.nan)) == 0


def test_a_method_has_its_own_scorer_again_after_an_error(some) -> None:
    vlm, captions = some
    own = vlm.method.scorer
    with pytest.raises(RuntimeError), fixed_logits(vlm.method, captions[0].tokens.x[..., 0]):
        assert vlm.method.scorer is not own
        raise RuntimeError
    assert vlm.method.scorer is own
