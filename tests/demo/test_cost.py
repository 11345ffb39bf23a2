"""Counted operations."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from diffprune.demo.cost import prefill_flops
from tests import tiny_scenes


@pytest.mark.parametrize("num_tokens", [1, 7, 40])
def test_the_count_is_what_torch_counts_with_half_of_the_attention(num_tokens: int) -> None:
    model, _ = tiny_scenes.build()
    language = model.model.language_model
    implementation = language.config._attn_implementation
    language.config._attn_implementation = "eager"  # its products are plain ones, which torch counts in full
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            hidden = language(inputs_embeds=torch.zeros(1, num_tokens, 32), use_cache=False).last_hidden_state
            model.lm_head(hidden[:, -1])
    finally:
        language.config._attn_implementation = implementation
    config = model.config.text_config
    half = config.num_hidden_layers * 2 * num_tokens**2 * config.hidden_size
    counted = counter.get_total_flops() - half
    assert prefill_flops(config, num_tokens) == pytest.approx(counted, rel=1e-3)  # some versions rotate by a product


def test_the_paper_s_two_numbers_come_out_at_about_100_text_tokens() -> None:
    llama = SimpleNamespace(
        hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=32,
        intermediate_size=11008, vocab_size=32064,
    )  # fmt: skip
    assert prefill_flops(llama, 576 + 100) / 1e12 == pytest.approx(8.89, abs=0.02)
    assert prefill_flops(llama, 64 + 100) / 1e12 == pytest.approx(2.13, abs=0.02)
