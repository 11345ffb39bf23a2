"""What every method before the language model promises, on tiny models of the three families of the paper.

Its promises on plain tensors are in `test_methods.py`. Here the tokens come from real encoders: pictures of different
size, newlines between them, groups of patches in window order, and what is kept reaches a language model.
"""

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from diffprune.backbones.prompts import Batch
from diffprune.methods.base import LayerPruner, MergingPruner
from diffprune.methods.options import build_method
from diffprune.model import PrunedVLM
from diffprune.registry import METHODS
from diffprune.types import LMInputs
from tests import tiny
from tests.contracts.vlm import pruned

FAMILIES = ("llava", "llava_next", "qwen2_5_vl")
NAMES = [name for name in METHODS.names() if not issubclass(METHODS.get(name), LayerPruner)]
PICTURES = [tiny.picture(1, (100, 70)), tiny.picture(2, (64, 120))]
QUESTIONS = ["what is it?", "where is the small red thing, please?"]
KEEP = 5

pytestmark = [pytest.mark.parametrize("family", FAMILIES), pytest.mark.parametrize("name", NAMES)]


@cache
def around(family: str, name: str) -> PrunedVLM:
    """The method around the tiny model, every weight random: a head of zeros ranks nothing."""
    backbone = pruned(family).backbone
    torch.manual_seed(0)
    method = build_method(name, block=backbone.block, language=backbone.language)
    for parameter in method.parameters():
        nn.init.normal_(parameter, mean=0.05, std=0.2)
    return pruned(family, method.eval(), keep=KEEP)


@cache
def both(family: str) -> Batch:
    return pruned(family).prepare(PICTURES, QUESTIONS)


@cache
def alone(family: str, row: int) -> Batch:
    return pruned(family).prepare([PICTURES[row]], [QUESTIONS[row]])


@cache
def untouched(family: str) -> Tensor:
    """What the stock model says, everything kept."""
    batch = both(family)
    with torch.no_grad():
        return pruned(family).base(**batch.features).logits[batch.features["attention_mask"].bool()]


@cache
def answered(family: str, name: str) -> tuple[Tensor, LMInputs]:
    """What the two prompts give together, with K tokens of each picture."""
    return around(family, name).logits(both(family))


def tokens_of(lm: LMInputs) -> list[list[int]]:
    """For each prompt the visual tokens that the language model is given, in their order, counted from its picture's
    first."""
    assert lm.origin is not None
    num_tokens = lm.origin.tokens.x.shape[1]
    return [
        [place - row * num_tokens for place in index[index >= 0].tolist()] for row, index in enumerate(lm.origin.index)
    ]


def test_the_language_model_is_given_k_real_tokens_of_each_picture_in_raster_order(family: str, name: str) -> None:
    vlm, (_, lm) = around(family, name), answered(family, name)
    assert lm.origin is not None
    counts = lm.origin.tokens.counts.tolist()
    assert min(counts) > KEEP
    for tokens, count in zip(tokens_of(lm), counts, strict=True):
        assert len(tokens) == (count if name == "full" else KEEP)
        assert tokens == sorted(set(tokens)) and tokens[0] >= 0 and tokens[-1] < count
    assert lm.visual.sum(-1).tolist() == [len(tokens) for tokens in tokens_of(lm)]
    if not isinstance(vlm.method, MergingPruner):  # what is given is the picture's own tokens
        whole = vlm.backbone.project(lm.origin.tokens.x).flatten(0, 1)
        torch.testing.assert_close(lm.inputs_embeds[lm.visual], whole[lm.origin.index[lm.visual]])


def test_two_prompts_together_answer_as_one_by_one(family: str, name: str) -> None:
    logits, lm = answered(family, name)
    for row in range(2):
        own, single = around(family, name).logits(alone(family, row))
        assert tokens_of(lm)[row] == tokens_of(single)[0]
        real = lm.attention_mask[row].bool()
        assert torch.equal(lm.position_ids[..., row, real], single.position_ids[..., 0, :])
        torch.testing.assert_close(logits[row, real], own[0], rtol=1e-4, atol=1e-4)


def test_a_budget_of_all_tokens_is_the_untouched_model(family: str, name: str) -> None:
    batch, wanted = both(family), untouched(family)
    logits, lm = around(family, name).logits(batch, keep=1.0)
    assert torch.equal(lm.attention_mask, batch.features["attention_mask"])
    assert (logits[lm.attention_mask.bool()] - wanted).abs().max() < 1e-5 * max(1.0, float(wanted.abs().max()))
