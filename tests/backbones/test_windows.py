"""Language models that attend within a sliding window: where dropped tokens would move it, that is refused."""

import copy
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, MistralConfig, Qwen2Config

from diffprune.model import PrunedVLM
from tests import tiny
from tests.contracts.test_backbones import stock_greedy
from tests.contracts.vlm import EveryOther, stays

PROMPT = "what is it?"  # 44 columns with the picture of 16 tokens
REFUSED = "attends within a window of 24 tokens"


@cache
def sliding(kind: str, window: int) -> tuple[Any, Any]:
    """LLaVA around a Mistral (all layers slide) or a Qwen2 (the last one does)."""
    model, processor = tiny.build("llava")
    config = copy.deepcopy(model.config)
    shape = dict(
        {key: getattr(config.text_config, key) for key in ("vocab_size", "hidden_size", "intermediate_size")},
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=config.text_config.pad_token_id,
    )
    if kind == "mistral":
        config.text_config = MistralConfig(**shape, sliding_window=window)
    else:
        config.text_config = Qwen2Config(**shape, use_sliding_window=True, sliding_window=window, max_window_layers=2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return tiny.finish(AutoModelForImageTextToText.from_config(config), processor), processor


def around(kind: str, method: Any, window: int = 24, **rules: Any) -> PrunedVLM:
    return PrunedVLM(*sliding(kind, window), method=method, **{"keep": 5, **rules})


@pytest.mark.parametrize("kind", ["mistral", "qwen2"])
def test_keeping_everything_is_the_untouched_model_whatever_the_window(kind: str) -> None:
    vlm = around(kind, "full")
    batch = vlm.prepare([[tiny.picture(1)]], [PROMPT])
    with torch.no_grad():
        stock = vlm.base(**batch.features).logits
        wide = around(kind, "full", window=999).logits(batch)[0]
    assert (vlm.logits(batch)[0] - stock).abs().max() < 1e-5
    assert (wide - stock).abs().max() > 1e-2, "the window must matter"


@pytest.mark.parametrize("kind", ["mistral", "qwen2"])
@pytest.mark.parametrize("method", ["every_other", "hidden_norm", "fastv"])
def test_a_window_shorter_than_the_prompt_is_refused(kind: str, method: str) -> None:
    vlm = around(kind, EveryOther() if method == "every_other" else method)
    with pytest.raises(ValueError, match=REFUSED):
        vlm.generate([tiny.picture(1)], PROMPT, max_new_tokens=2)
    batch = vlm.prepare([[tiny.picture(1)]], [PROMPT], answers=["red"])
    with pytest.raises(ValueError, match=REFUSED):
        vlm.loss(batch, hard=True)
    if method == "every_other":
        with pytest.raises(ValueError, match=REFUSED):
            vlm.logits(batch)
    assert isinstance(vlm.generate(None, "hello", max_new_tokens=2), str), "without a picture nothing is dropped"


@pytest.mark.parametrize("method", ["every_other", "fastv"])
def test_an_answer_that_would_leave_the_window_is_refused_beforehand(method: str) -> None:
    vlm = around("mistral", EveryOther() if method == "every_other" else method, window=50)
    assert vlm.generate([tiny.picture(1)], PROMPT, max_new_tokens=2, return_ids=True).shape == (1, 2)
    with pytest.raises(ValueError, match=r"a window of 50 tokens and prompt and answer may take 5\d"):
        vlm.generate([tiny.picture(1)], PROMPT, max_new_tokens=12)


def test_within_the_window_dropping_is_masking() -> None:
    vlm = around("mistral", EveryOther(), window=64)
    batch = vlm.prepare([[tiny.picture(1)]], [PROMPT])
    _, lm = vlm.logits(batch)
    wanted = stock_greedy(vlm, batch, stays(batch, lm).long(), steps=6)["ids"]
    found = vlm.generate([tiny.picture(1)], PROMPT, max_new_tokens=6, do_sample=False, return_ids=True)
    assert torch.equal(found, wanted)


def test_packed_positions_need_no_refusal() -> None:
    vlm = around("mistral", EveryOther(), positions="packed")
    assert isinstance(vlm.generate([tiny.picture(1)], PROMPT, max_new_tokens=2), str)


@pytest.mark.parametrize("kind", ["mistral", "qwen2"])
def test_the_fast_path_refuses_a_window(kind: str) -> None:
    with pytest.raises(ValueError, match="its attention slides over a window of 24 tokens"):
        around(kind, "feature_norm").compile(text_buckets=(64,))


def test_an_answer_to_learn_that_would_leave_the_window_is_refused() -> None:
    vlm = around("mistral", "fastv", window=45)  # which holds the prompt
    batch = vlm.prepare([[tiny.picture(1)]], [PROMPT], answers=["a small red ring"])
    with pytest.raises(ValueError, match="a window of 45 tokens"):
        vlm.loss(batch, hard=True)


def test_soft_masks_between_layers_are_refused_where_the_window_is_shorter() -> None:
    vlm = around("mistral", "dynamic_llava")
    batch = vlm.prepare([[tiny.picture(1)]], [PROMPT], answers=["red"])
    with pytest.raises(ValueError, match=REFUSED):
        vlm.loss(batch, tau=1.0)
    wide = around("mistral", "dynamic_llava", window=99)
    assert wide.loss(batch, tau=1.0).isfinite()
