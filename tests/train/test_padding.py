"""Samples of different length are padded behind in training: attention needs no mask then, and the loss is the same."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from diffprune.backbones.splice import real_columns_first
from diffprune.model import PrunedVLM
from tests import tiny
from tests.contracts.vlm import throttle

CAUSAL = ["llava", "llava_next", "qwen2_5_vl", "qwen3_vl"]


def ragged(family: str) -> tuple[PrunedVLM, Any]:
    vlm = PrunedVLM(*tiny.build(family), method="diffprune", keep=4)
    pictures = [tiny.picture(0), tiny.picture(1)]
    return vlm, vlm.prepare(pictures, ["?", "what is in it?"], ["a", "a longer answer"])


@pytest.mark.parametrize("family", CAUSAL)
def test_padding_behind_changes_no_answer(family: str) -> None:
    vlm, batch = ragged(family)
    with torch.no_grad():
        tokens = vlm.encode(batch)
        assert tokens is not None
        lm, _ = throttle(vlm, batch, tokens, tau=0.5)
        assert lm.labels is not None and not bool(lm.attention_mask.all())
        wanted = lm.labels[:, 1:] != -100
        logits = vlm.backbone.logits(lm)[:, :-1][wanted]
        expected = functional.cross_entropy(logits, lm.labels[:, 1:][wanted])
        assert vlm.decoder.loss(lm, None, None)[0].item() == pytest.approx(expected.item(), rel=1e-5)
        behind = real_columns_first(lm)
    assert bool(behind.attention_mask.all())
    assert behind.labels is not None and (behind.labels[:, -1] == -100).tolist() == [True, False]


@pytest.mark.parametrize("family", CAUSAL)
def test_the_language_model_is_given_no_mask(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vlm, batch = ragged(family)
    tokens = vlm.encode(batch)
    assert tokens is not None
    lm, _ = throttle(vlm, batch, tokens, tau=0.01, remove_below=0.1)  # with gaps in the positions
    masks: list[object] = []
    attend = functional.scaled_dot_product_attention

    def watch(*states: Any, attn_mask: Any = None, is_causal: bool = False, **options: Any) -> Any:
        masks.append((attn_mask, is_causal))
        return attend(*states, attn_mask=attn_mask, is_causal=is_causal, **options)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", watch)
    vlm.decoder.loss(lm, None, None)
    assert masks == [(None, True)] * tiny.LAYERS


def test_a_prefix_that_sees_itself_whole_keeps_its_mask() -> None:
    vlm, batch = ragged("paligemma")
    with torch.no_grad():
        apart = [
            vlm.loss(vlm.prepare([tiny.picture(row)], [question], [answer]), keep=4, hard=True, num_targets=1).item()
            for row, (question, answer) in enumerate((("?", "a"), ("what is in it?", "a longer answer")))
        ]
        together = vlm.loss(batch, keep=4, hard=True, num_targets=1).item()
    assert together == pytest.approx(sum(apart), rel=1e-5)
