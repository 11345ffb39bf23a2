"""What `native` promises: every method takes it, and where a release counts or orders otherwise it does so here."""

from typing import Any

import pytest
import torch
from torch import Tensor

from diffprune.methods.atp_llava import ATPLLaVA
from diffprune.methods.base import Pruner
from diffprune.methods.cdpruner import CDPruner
from diffprune.methods.glimpse_prune import GlimpsePrune
from diffprune.methods.options import build_method
from diffprune.registry import METHODS
from diffprune.types import Budget
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
    assert vlm.counts(vlm.encode(batch)).tolist() == [4]  # 4.8 of 16
    assert vlm.with_method("dynamic_llava", layer=1).counts(vlm.encode(batch)).tolist() == [5]


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
