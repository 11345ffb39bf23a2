"""DynamicViT's selector: local and global halves, a choice for each token by itself, and the losses around it."""

import dataclasses

import pytest
import torch

from diffprune.methods._keep_or_drop import draw_keep, local_and_global, log_odds, ratio_penalty
from diffprune.methods.base import Distillation, Restricted
from diffprune.methods.dynamicvit import DynamicViT
from tests import tiny
from tests.contracts.vlm import pruned, splice_all
from tests.methods.examples import kept, make_method, make_tokens

K = torch.tensor([4, 3, 2])


def dynamicvit(**options: object) -> DynamicViT:
    method = make_method("dynamicvit", **options)
    assert isinstance(method, DynamicViT)
    return method


def test_a_token_keeps_its_first_half_and_gets_the_mean_of_the_second() -> None:
    x = torch.tensor([[[1.0, 2.0, 10.0, 20.0], [3.0, 4.0, 30.0, 60.0], [9.0, 9.0, 900.0, 900.0]]])
    out = local_and_global(x, torch.tensor([[True, True, False]]))
    assert out[0, :2].tolist() == [[1.0, 2.0, 20.0, 40.0], [3.0, 4.0, 20.0, 40.0]]


def test_the_penalty_is_the_squared_distance_of_the_shares() -> None:
    chosen = torch.tensor([[1.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    mask = torch.tensor([[True, True, True, True], [True, True, False, False]])
    # Row 0 keeps 3 of 4 and should keep 1: (3/4 - 1/4)^2 = 1/4. Row 1 keeps 1 of 2 and should keep 2: 1/4.
    assert ratio_penalty(chosen, torch.tensor([1, 2]), mask).mean().item() == 0.25


def test_each_token_is_drawn_by_its_own_odds() -> None:
    log_probs = torch.tensor([0.9, 0.1]).log().expand(1, 4000, 2)
    drawn = draw_keep(
        log_probs, torch.ones(1, 4000, dtype=torch.bool), tau=1.0, generator=torch.Generator().manual_seed(0)
    )
    assert set(drawn.unique().tolist()) == {0.0, 1.0}
    assert drawn.mean().item() == pytest.approx(0.9, abs=0.02)
    assert log_odds(log_probs)[0, 0].item() == pytest.approx(2.1972, abs=1e-4)  # log 9


def test_the_k_likeliest_tokens_stay() -> None:
    method, tokens = dynamicvit(), make_tokens()
    likely = method.scorer(tokens.x, tokens.mask)[..., 0].masked_fill(~tokens.mask, -torch.inf)
    wanted = [sorted(likely[row].topk(int(k)).indices.tolist()) for row, k in enumerate(K)]
    assert kept(method.select(tokens, K)) == wanted


def test_training_leaves_the_tokens_as_they_are_and_hides_some() -> None:
    method, tokens = dynamicvit(ratio_weight=3.0), make_tokens()
    restricted = method.restrict(tokens, K, tau=0.1)
    assert restricted.soft_mask is not None and torch.equal(restricted.soft_mask, restricted.alpha)
    assert torch.equal(restricted.x[tokens.mask], tokens.x[tokens.mask])
    torch.testing.assert_close(restricted.penalty, 3.0 * ratio_penalty(restricted.alpha, K, tokens.mask))
    assert restricted.distillation == Distillation(0.5, 0.0)
    assert dynamicvit(answer_weight=0.0, token_weight=0.0).restrict(tokens, K, tau=1.0).distillation is None


def test_the_distance_from_the_unpruned_model_is_nothing_where_nothing_is_masked() -> None:
    vlm = pruned("llava", "dynamicvit", keep=4)
    batch = vlm.prepare([tiny.picture(1)], ["what?"], ["a star"])
    tokens = vlm.encode(batch)
    assert tokens is not None
    lm = splice_all(vlm, batch, tokens)
    whole, half = torch.ones(lm.input_ids.shape), (~lm.visual).float()
    plain = vlm.decoder.loss(lm, None, None)[0]
    both = Distillation(answers=1.0, tokens=1.0)
    losses = [
        vlm.decoder.loss(
            dataclasses.replace(lm, soft_mask=soft_mask),
            None,
            Restricted(tokens.x, soft_mask, soft_mask, distillation=held),
        )[0]
        for soft_mask, held in ((whole, both), (half, None), (half, Distillation(1.0, 0.0)))
    ]
    torch.testing.assert_close(losses[0], plain, rtol=1e-5, atol=1e-5)
    assert losses[2] > losses[1] + 1e-4


def test_a_weight_below_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ratio_weight=-1\.0 would reward"):
        dynamicvit(ratio_weight=-1.0)
