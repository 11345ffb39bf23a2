"""Families with newline tokens between rows, spliced in static shapes as the reference path splices them."""

import random
from typing import Any

import pytest
import torch

from diffprune.fast.vision import FastScorer
from diffprune.nn.scorer import Scorer
from diffprune.types import VisualTokens
from tests import tiny
from tests.contracts.vlm import pruned
from tests.fast.compiled import SIZES, answer, compiled, reference

FAMILIES = ("llava_next", "llava_onevision")
WORDS = ("is", "it", "red", "or", "not", "what", "does", "the", "sign", "say", "how", "many", "are", "there")


def questions(count: int) -> list[str]:
    draw = random.Random(0)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 6))) + "?" for _ in range(count)]


@pytest.mark.parametrize("family", FAMILIES)
def test_fifty_prompts_are_answered_as_by_the_reference_path(family: str) -> None:
    vlm = compiled(family, "diffprune", keep=(5, 0.5))
    held = set()
    for seed, question in enumerate(questions(50)):
        images, keep = [tiny.picture(seed, SIZES[family][seed % 2])], (5, 0.5)[seed % 3 == 0]
        run = vlm.fast.start(vlm.prepare([images], [question]), keep=keep)
        assert run.splicer is not None and run.picture is not None
        held.add(int(run.bucket.last[0]) - int(run.splicer.staging[0, -1]) + 1 - run.num_kept[0])
        assert torch.equal(answer(vlm, images, question, keep=keep), reference(vlm, images, question, keep=keep))
    assert len(held) > 1, "as many newlines stayed every time"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("newline", ["rows", "all", "none"])
@pytest.mark.parametrize("positions", ["original", "packed"])
def test_every_rule_for_newlines_and_positions_fills_the_columns_of_the_reference_path(
    family: str, newline: str, positions: str
) -> None:
    vlm = pruned(family, "feature_norm", keep=5, newline=newline, positions=positions)
    compiled(family, vlm=vlm)
    batch = vlm.prepare([[tiny.picture(1)], [tiny.picture(2)]], ["what?", "what does the sign beside it say?"])
    lm = vlm.lm_inputs(batch, vlm.encode(batch))
    run = vlm.fast.start(batch)
    assert run.splicer is not None
    for row in range(2):
        real = lm.attention_mask[row].bool()
        width = int(real.sum())
        assert int(run.bucket.last[row]) == width - 1
        torch.testing.assert_close(run.bucket.embeds[row, :width], lm.inputs_embeds[row, real], atol=1e-5, rtol=0)
        assert torch.equal(run.bucket.positions[row, :width], lm.position_ids[row, real])


@pytest.mark.parametrize("lengths", [(4, 4, 4), (3, 6, 3, 2)])
def test_a_compiled_scorer_looks_within_tiles_of_any_length(lengths: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    spec = pruned("llava").backbone.block
    scorer = Scorer(spec).eval()
    for parameter in scorer.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    segment = torch.cat([torch.full((length,), tile) for tile, length in enumerate(lengths)])
    segment = segment[torch.randperm(len(segment))].repeat(2, 1)  # tokens of a tile need not stand side by side
    x = torch.randn(2, segment.shape[1], spec.width)
    fast = make_fast(scorer)
    with torch.no_grad():
        wanted, hidden = scorer.read(x, segment=segment)
        tokens = VisualTokens(x=torch.zeros_like(x), segment=segment)
        torch.testing.assert_close(fast.fix(tokens)(x), wanted, atol=1e-5, rtol=1e-5)
        logits, states = fast.fix_both(tokens)(x)
    torch.testing.assert_close(logits, wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(states, hidden, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(wanted, scorer(x), atol=1e-3), "tiles make no difference here"


def make_fast(scorer: Scorer) -> FastScorer:
    from diffprune.fast.vision import Blocks

    def plain(function: Any) -> Any:
        return function

    def blocks(parts: Any, heads: int) -> Blocks:
        return Blocks(parts, heads, torch.float32, plain, fuse=True)

    return FastScorer(scorer, blocks, torch.float32, plain)


def test_a_longer_text_than_compiled_for_is_spliced_as_before_with_the_compiled_choice() -> None:
    vlm = compiled("llava_next", "feature_norm", keep=(5, 0.5))
    images, text = [tiny.picture(1, SIZES["llava_next"][0])], "why " * 13
    run = vlm.fast.start(vlm.prepare([images], [text]))
    assert run.splicer is None and run.chooser is not None and run.picture is not None
    assert torch.equal(answer(vlm, images, text), reference(vlm, images, text))
