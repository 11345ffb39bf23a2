"""Dynamic-LLaVA's image-token predictor: hidden states in, a choice per token out, and a heavy penalty on the share."""

import pytest
import torch

from diffprune.inside.state import LayerState
from diffprune.methods._keep_or_drop import log_odds, ratio_penalty
from diffprune.methods.dynamic_llava import DynamicLLaVA
from tests.methods.examples import kept, make_method


def dynamic_llava(**options: object) -> DynamicLLaVA:
    method = make_method("dynamic_llava", **options)
    assert isinstance(method, DynamicLLaVA)
    return method


def state() -> LayerState:
    torch.manual_seed(0)
    return LayerState(
        layer=2,
        hidden=torch.randn(2, 8, 24),
        attention_mask=torch.ones(2, 8, dtype=torch.bool),
        visual=torch.tensor([[2, 3, 5, 6], [1, 4, -1, -1]]),
    )


def test_the_likeliest_visual_tokens_stay_and_text_has_no_say() -> None:
    method, some = dynamic_llava(), state()
    odds = log_odds(method.predictor(some.hidden[:1, [2, 3, 5, 6]], torch.ones(1, 4, dtype=torch.bool)))
    assert kept(method.select_at(some, torch.tensor([2, 1])))[0] == sorted(odds[0].topk(2).indices.tolist())
    some.hidden[0, [0, 1, 4, 7]] = 100.0
    again = log_odds(method.predictor(some.tokens, some.visual >= 0))
    torch.testing.assert_close(again[:1], odds, rtol=1e-4, atol=1e-5)


def test_a_step_draws_a_choice_and_weighs_its_share_a_hundredfold() -> None:
    method, some = dynamic_llava(), state()
    k, valid = torch.tensor([1, 1]), some.visual >= 0
    decision = method.decide(some, k, tau=0.5, generator=torch.Generator().manual_seed(0))
    assert set(decision.soft_mask.unique().tolist()) <= {0.0, 1.0} and (decision.soft_mask[~valid] == 0).all()
    torch.testing.assert_close(decision.penalty, 100.0 * ratio_penalty(decision.soft_mask, k, valid))
    decision.penalty.sum().backward()  # type: ignore[union-attr]
    assert all(weight.grad is not None for weight in method.predictor.parameters())


def test_the_predictor_has_the_release_s_widths_at_the_release_s_size() -> None:
    from diffprune.methods.options import build_method
    from diffprune.nn.language import LanguageSpec
    from tests.methods.examples import SPEC

    method = build_method("dynamic_llava", block=SPEC, language=LanguageSpec(width=4096, heads=32, layers=32))
    assert isinstance(method, DynamicLLaVA)
    shapes = [tuple(layer.weight.shape) for layer in method.predictor.head.layers if isinstance(layer, torch.nn.Linear)]
    assert shapes == [(256, 512), (128, 256), (2, 128)]
    assert len(method.predictor.blocks) == 2 and method.predictor.blocks[0].spec.heads == 8  # type: ignore[union-attr]


def test_budgets_mean_what_they_mean_for_fastv() -> None:
    assert dynamic_llava().stages(32, 576, 32) == {2: 32}
    assert dynamic_llava(budget="average").stages(32, 576, 64) == {2: 30}
    with pytest.raises(ValueError, match="give 37 or more"):
        dynamic_llava(budget="average").stages(32, 576, 32)
    with pytest.raises(ValueError, match="width=2 is too narrow"):
        dynamic_llava(width=2)
