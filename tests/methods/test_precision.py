"""Methods that learn, on tokens in half precision: with weights in float32 and with weights as narrow as the tokens."""

import copy
import dataclasses

import pytest
import torch

from diffprune.methods.base import LayerPruner, ScoringPruner
from diffprune.model import PrunedVLM
from diffprune.registry import METHODS
from tests import tiny
from tests.methods.examples import make_method, make_tokens

LEARNED = [name for name in METHODS.names() if METHODS.get(name).trained]
INSIDE = [name for name in LEARNED if issubclass(METHODS.get(name), LayerPruner)]
HALVES = (torch.float16, torch.bfloat16)


@pytest.mark.parametrize("name", [name for name in LEARNED if name not in INSIDE])
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("narrow_weights", [False, True])
def test_half_tokens_are_chosen_from_and_scored_in_float32(name: str, half: torch.dtype, narrow_weights: bool) -> None:
    method, tokens = make_method(name), make_tokens()
    tokens = dataclasses.replace(tokens, x=tokens.x.to(half))
    wide = dataclasses.replace(tokens, x=tokens.x.float())
    with torch.inference_mode():
        expected = method.score(wide) if isinstance(method, ScoringPruner) else None
        method.to(half if narrow_weights else torch.float32)
        kept = method.select(tokens, 5)
        assert kept.shape == (3, 5) and (kept >= 0).all()
        if isinstance(method, ScoringPruner) and expected is not None:
            logits = method.score(tokens)
            assert logits.dtype == torch.float32
            span = (expected.amax() - expected.amin()).item()
            torch.testing.assert_close(logits, expected, rtol=0.0, atol=0.05 * span if narrow_weights else 1e-6 * span)


@pytest.mark.parametrize("name", INSIDE)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("narrow_weights", [False, True])
def test_a_half_language_model_is_pruned(name: str, half: torch.dtype, narrow_weights: bool) -> None:
    torch.manual_seed(0)
    options = {"layer": 1} if name == "dynamic_llava" else {}
    model, processor = tiny.build("llava")
    vlm = PrunedVLM(copy.deepcopy(model).to(half), processor, method=name, keep=4, **options)
    vlm.method.to(half if narrow_weights else torch.float32)
    images = [tiny.picture(1, (40, 30))]
    ids = vlm.generate(images, "what is it?", max_new_tokens=2, eos_token_id=[], return_ids=True)
    assert ids.shape == (1, 2)
