"""What `native` promises: every method takes it, and where a release counts or orders otherwise it does so here."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from diffprune.classifier import PrunedClassifier
from diffprune.methods.atp_llava import ATPLLaVA
from diffprune.methods.base import MergingPruner, Pruner
from diffprune.methods.cdpruner import CDPruner
from diffprune.methods.glimpse_prune import GlimpsePrune
from diffprune.methods.options import build_method
from diffprune.model import PrunedVLM
from diffprune.registry import METHODS
from diffprune.types import Budget, LMInputs, VisualTokens
from tests import tiny
from tests.contracts.vlm import pruned
from tests.methods.clip import joint_already
from tests.methods.examples import LANGUAGE, SPEC

ROUNDED_DOWN = ("dynamic_llava", "gots", "mmtok", "visionselector")


def built(name: str, **options: Any) -> Pruner:
    return build_method(name, block=SPEC, language=LANGUAGE, **options)


@pytest.mark.parametrize("name", METHODS.names())
def test_every_method_can_be_asked_not_to_be_as_it_was_released(name: str) -> None:
    without = built(name, native=False)
    assert without.options == built(name).options and not without.is_native
    assert without.rounding == "nearest" and without.positions == "original"
    if "native" not in METHODS.get(name).Options.__dataclass_fields__:
        assert built(name, native=True).options == without.options
        with pytest.raises(ValueError, match="has no option 'native'"):
            built(name, native="yes")


# --- shares -----------------------------------------------------------------------------------------------------------


def test_a_share_is_rounded_down_where_asked_and_never_to_none() -> None:
    assert [Budget(share).count(576) for share in (0.2, 0.1111, 0.0001)] == [115, 64, 1]
    assert [Budget(share, "down").count(576) for share in (0.2, 0.1111, 0.0001, 1.0)] == [115, 63, 1, 576]
    assert Budget(64, "down").count(576) == 64  # tokens are tokens
    mask = torch.arange(10) < torch.tensor([[10], [7]])
    assert Budget(0.25, "down").counts(mask).tolist() == [2, 1] and Budget(0.25).counts(mask).tolist() == [3, 2]


@pytest.mark.parametrize("name", METHODS.names())
def test_methods_whose_release_rounds_a_share_down_do_so_natively(name: str) -> None:
    assert built(name, native=True).rounding == ("down" if name in ROUNDED_DOWN else "nearest")


@pytest.mark.parametrize("name", ["gots", "mmtok", "visionselector"])
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_the_rounding_reaches_the_language_model(family: str, name: str) -> None:
    picture = [tiny.picture(1, (140, 84))]
    native, ours = (pruned(family, name, keep=0.5, native=native) for native in (True, False))
    num = int(pruned(family).encode(native.prepare(picture, ["what?"])).counts[0])  # type: ignore[union-attr]
    share = (num // 2 - 0.25) / num
    for vlm, count in ((native, num // 2 - 1), (ours, num // 2)):
        assert len(vlm.select(picture, keep=share)[0].keep) == count
        assert vlm.logits(vlm.prepare(picture, ["what?"]), keep=share)[1].visual.sum() == count
        assert len(vlm.with_method(name, keep=share, native=vlm is native).select(picture)[0].keep) == count
        assert len(vlm.select(picture, keep=3)[0].keep) == 3


def test_the_rounding_reaches_a_choice_inside_the_language_model() -> None:
    vlm = pruned("llava", "dynamic_llava", keep=0.3, layer=1, native=True)
    batch = vlm.prepare([tiny.picture(1)], ["what?"])
    assert vlm._prompt_counts(batch, vlm.encode(batch), None).tolist() == [4]  # 4.8 of 16
    assert vlm.with_method("dynamic_llava", layer=1)._prompt_counts(batch, vlm.encode(batch), None).tolist() == [5]


def test_the_rounding_reaches_a_classifier() -> None:
    model, processor = tiny.build("deit")
    for native, rise in ((True, 0), (False, 1)):
        classifier = PrunedClassifier(model, processor, method="visionselector", native=native)
        num = int(classifier.encode(classifier.prepare([tiny.picture(1)])).tokens.counts[0])
        assert len(classifier.select([tiny.picture(1)], keep=2.75 / num)[0].keep) == 2 + rise


# --- adaptive counts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["glimpse_prune", "atp_llava"])
def test_methods_whose_own_rule_is_a_threshold_follow_it_natively(name: str) -> None:
    assert built(name).options.budget == "exact"
    assert built(name, native=True).options.budget == "adaptive"
    assert built(name, native=True, budget="exact").options.budget == "exact"  # what is said counts
    with pytest.raises(ValueError, match="budget='most'"):
        built(name, budget="most")
    answers = {}
    for native in (True, False):
        torch.manual_seed(0)
        vlm = pruned("llava", name, keep=12, native=native)
        assert isinstance(vlm.method, GlimpsePrune | ATPLLaVA)
        counts: list[int] = []
        chosen = vlm.method.select_at

        def watched(state: Any, k: Tensor, chosen: Any = chosen, counts: list[int] = counts) -> Tensor:
            keep = chosen(state, k)
            counts.append(int((keep >= 0).sum()))
            return keep

        vlm.method.select_at = watched  # type: ignore[method-assign]
        for parameter in vlm.method.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
        if isinstance(vlm.method, GlimpsePrune):
            torch.nn.init.constant_(vlm.method.predictor.head.bias, -50.0)  # no token is likely
        assert isinstance(vlm.generate([tiny.picture(1)], "what?", max_new_tokens=2), str)
        answers[native] = counts
    assert answers[False][-1] == 12
    assert 1 <= answers[True][-1] < 12


# --- CLIP's space -----------------------------------------------------------------------------------------------------


def test_a_language_model_s_embeddings_are_never_taken_for_clip_s() -> None:
    vlm = pruned("llava", "cdpruner", keep=4, native=True)  # features, joint space and embeddings are all 64 wide
    with pytest.raises(ValueError, match="no CLIP model is attached"):
        vlm.select([tiny.picture(1)], ["what?"])
    assert isinstance(vlm.method, CDPruner)
    vlm.method.attach_clip(joint_already(64))
    with pytest.raises(ValueError, match=r"VisualTokens\.text, which is None; .*relevance='llm_embed'"):
        vlm.select([tiny.picture(1)], ["what?"])
    assert len(vlm.with_method("cdpruner", native=True, relevance="llm_embed").select([tiny.picture(1)])[0].keep) == 4


# --- order ------------------------------------------------------------------------------------------------------------

OWN_ORDER = ("holov", "prunesid", "tome", "visionzip")


def given(vlm: PrunedVLM, lm: LMInputs) -> list[int]:
    """Visual tokens in the order the language model has them, image after image, each counted from its first."""
    assert lm.origin is not None
    return [index % lm.origin.tokens.x.shape[1] for index in lm.origin.index[lm.visual].tolist()]


def released(vlm: PrunedVLM, tokens: VisualTokens, k: int) -> tuple[list[int], Tensor]:
    """Places and projected tokens in the method's own order, images one after another."""
    counts = torch.full((len(tokens),), k)
    torch.manual_seed(0)
    if isinstance(vlm.method, MergingPruner):
        x, places = vlm.method.reduce(tokens, counts)
    else:
        places = vlm.method.select(tokens, counts)
        x = tokens.x[torch.arange(len(tokens))[:, None], places.clamp_min(0)]
    return places[places >= 0].tolist(), vlm.backbone.project(x)[places >= 0]


@pytest.mark.parametrize("family", ["llava", "llava_next", "qwen2_5_vl"])
@pytest.mark.parametrize("name", OWN_ORDER)
def test_a_release_s_own_order_reaches_the_language_model_where_it_is_asked_for(family: str, name: str) -> None:
    keep = 12 if family == "llava_next" else 6
    vlm = pruned(family, name, keep=keep, native=True, order="native")
    batch = vlm.prepare([tiny.picture(1), tiny.picture(2, (150, 60))], ["what?", "where is the red thing?"])
    tokens = vlm.encode(batch)
    assert tokens is not None
    places, embeds = released(vlm, tokens, keep)
    torch.manual_seed(0)
    lm = vlm.lm_inputs(batch, tokens)
    assert given(vlm, lm) == places
    torch.testing.assert_close(lm.inputs_embeds[lm.visual], embeds)
    torch.manual_seed(0)
    raster = vlm.with_method(vlm.method)
    raster.order = "raster"
    other = raster.lm_inputs(batch, tokens)
    assert sorted(places[: len(places) // 2]) == given(raster, other)[: len(places) // 2]
    assert places != given(raster, other)
    assert torch.equal(lm.attention_mask, other.attention_mask) and torch.equal(lm.input_ids, other.input_ids)
    assert torch.equal(lm.visual, other.visual)  # newlines stay where they are
    if vlm.positions == "packed":
        assert torch.equal(lm.position_ids, other.position_ids)
    else:  # a token takes its position with it
        own = vlm.backbone.positions(batch)
        assert torch.equal(
            lm.position_ids[..., lm.visual], own.gather(-1, lm.source.expand_as(lm.position_ids))[..., lm.visual]
        )
        assert not torch.equal(lm.position_ids, other.position_ids)
        assert torch.equal(lm.position_ids[..., ~lm.visual], other.position_ids[..., ~lm.visual])
    assert not torch.allclose(vlm.backbone.logits(lm)[:, -1], vlm.backbone.logits(other)[:, -1])


def test_a_batch_in_a_release_s_order_answers_as_its_prompts_do() -> None:
    vlm = pruned("llava", "holov", keep=6, native=True, order="native")
    pictures, questions = [tiny.picture(1), tiny.picture(2)], ["what?", "where is the red thing?"]
    together, lm = vlm.logits(vlm.prepare(pictures, questions))
    for row in range(2):
        alone, _ = vlm.logits(vlm.prepare(pictures[row : row + 1], questions[row : row + 1]))
        torch.testing.assert_close(together[row, lm.attention_mask[row].bool()], alone[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_positions_that_go_with_their_tokens_decode_as_they_recompute(family: str) -> None:
    vlm = pruned(family, "holov", keep=6, native=True, order="native", positions="original")
    batch = vlm.prepare([tiny.picture(1)], ["what?"])
    lm = vlm.lm_inputs(batch, vlm.encode(batch))
    steps = lm.position_ids[..., 0, :].diff(dim=-1)
    assert (steps < 0).any()  # some token stands before one that lies before it in the picture
    ids = vlm.backbone.generate(lm, max_new_tokens=4, do_sample=False)
    for place in range(4):
        assert int(vlm.backbone.logits(lm)[0, -1].argmax()) == int(ids[0, place])
        new = ids[:, place : place + 1]
        lm = dataclasses.replace(
            lm,
            input_ids=torch.cat([lm.input_ids, new], dim=1),
            inputs_embeds=torch.cat([lm.inputs_embeds, vlm.base.get_input_embeddings()(new)], dim=1),
            attention_mask=torch.cat([lm.attention_mask, torch.ones_like(new)], dim=1),
            position_ids=torch.cat([lm.position_ids, lm.position_ids[..., -1:] + 1], dim=-1),
            visual=torch.cat([lm.visual, torch.zeros_like(new, dtype=torch.bool)], dim=1),
            source=torch.cat([lm.source, lm.source[:, -1:] + 1], dim=1),
            origin=None,
            extra={},
        )


def test_other_methods_have_raster_order_whatever_is_asked() -> None:
    batch = pruned("llava").prepare([tiny.picture(1)], ["what?"])
    for name in ("divprune", "visionzip"):
        lms = [pruned("llava", name, keep=6, order=order).logits(batch)[1] for order in ("raster", "native")]
        assert torch.equal(lms[0].inputs_embeds, lms[1].inputs_embeds)
        assert torch.equal(lms[0].source, lms[1].source)


def test_an_order_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="order='spiral' is unknown; choose raster or native"):
        pruned("llava", "holov", order="spiral")
    with pytest.raises(ValueError, match=r"order='native' .* say budget='global'"):
        pruned("llava_next", "visionzip", native=True, order="native", budget="per_tile")
    with pytest.raises(ValueError, match="the fast path keeps raster order"):
        pruned("llava", "holov", keep=4, native=True, order="native").compile()


def test_the_order_goes_with_the_model_to_other_methods_and_to_disk() -> None:
    vlm = pruned("llava", "holov", keep=4, native=True, order="native")
    assert vlm.with_method("prunesid", native=True).order == "native"
    assert vlm.describe()["order"] == "native" and pruned("llava").describe()["order"] == "raster"
