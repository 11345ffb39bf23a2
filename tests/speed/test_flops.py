"""Counted operations and bytes."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from diffprune.methods.options import build_method
from diffprune.nn import BlockSpec, Scorer
from diffprune.shapes import SHAPES, build
from diffprune.speed.flops import (
    _side,
    block_flops,
    decoder_weights,
    encoder_flops,
    kv_bytes,
    layer_tokens,
    patches_per_token,
    prefill_flops,
    projector_flops,
    scorer_flops,
)
from tests import tiny


@pytest.fixture(scope="module")
def llava() -> SimpleNamespace:
    return SHAPES["llava-1.5-7b"](False)[0]


@pytest.mark.parametrize("num_tokens", [1, 7, 40])
def test_the_count_is_what_torch_counts_with_half_of_the_attention(num_tokens: int) -> None:
    model, _ = tiny.build("llava")
    language = model.model.language_model
    implementation = language.config._attn_implementation
    language.config._attn_implementation = "eager"  # its products are plain ones, which torch counts in full
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            hidden = language(inputs_embeds=torch.zeros(1, num_tokens, tiny.WIDTH), use_cache=False).last_hidden_state
            model.lm_head(hidden[:, -1])
    finally:
        language.config._attn_implementation = implementation
    config = model.config.text_config
    half = config.num_hidden_layers * 2 * num_tokens**2 * config.hidden_size
    counted = counter.get_total_flops() - half
    assert prefill_flops(config, num_tokens) == pytest.approx(counted, rel=1e-3)  # some versions rotate by a product


def test_the_paper_s_two_numbers_come_out_at_about_100_text_tokens(llava) -> None:
    assert prefill_flops(llava.text_config, 576 + 100) / 1e12 == pytest.approx(8.89, rel=0.02)
    assert prefill_flops(llava.text_config, 64 + 100) / 1e12 == pytest.approx(2.13, rel=0.02)


def test_pyramiddrop_costs_about_what_the_paper_says(llava) -> None:
    stages = build_method("pyramiddrop").stages(32, 576, 64)  # type: ignore[attr-defined]
    tokens = layer_tokens(stages, 32, 576, 100)
    assert tokens[0] == 676 and tokens[8] == 388 and tokens[-1] == 164
    assert prefill_flops(llava.text_config, tokens) / 1e12 == pytest.approx(4.89, rel=0.05)


def test_the_same_tokens_in_every_layer_cost_the_same_given_once_or_layer_by_layer(llava) -> None:
    assert prefill_flops(llava.text_config, [104] * 32) == prefill_flops(llava.text_config, 104)
    assert kv_bytes(llava.text_config, [104] * 32) == kv_bytes(llava.text_config, 104) == 104 * 32 * 2 * 4096 * 2


def test_grouped_heads_keep_fewer_keys() -> None:
    qwen = SHAPES["qwen2.5-vl-7b"](False)[0].text_config
    assert kv_bytes(qwen, 100, batch=3) == 3 * 100 * 28 * 2 * 4 * 128 * 2


@pytest.mark.parametrize("name", ["llava-1.5-7b", "qwen2.5-vl-7b"])
def test_the_weights_read_are_those_of_the_built_model(name: str) -> None:
    config, _ = SHAPES[name](False)
    model = build(config, "meta", torch.float16)
    read = sum(
        value.numel()
        for key, value in model.named_parameters()
        if value.ndim == 2 and ("language_model.layers" in key or "lm_head" in key)
    )
    assert decoder_weights(config.text_config) == read


@pytest.mark.parametrize("gated", [False, True])
def test_scorer_operations_are_what_torch_counts(gated: bool) -> None:
    spec = BlockSpec(width=16, heads=2, mlp_width=48, gated=gated)
    plain = sdpa_kernel(SDPBackend.MATH)  # torch does not count what its fused kernel for CPUs does
    with FlopCounterMode(display=False) as counter, torch.no_grad(), plain:
        Scorer(spec, depth=2)(torch.zeros(1, 12, 16))
    assert scorer_flops(spec, 12) == pytest.approx(counter.get_total_flops(), rel=1e-6)


@pytest.mark.parametrize(("name", "num_visual"), [("llava-1.5-7b", 576), ("qwen2.5-vl-7b", 16)])
def test_encoder_operations_are_what_torch_counts(name: str, num_visual: int) -> None:
    config, _ = SHAPES[name](True)
    model = build(config, "cpu", torch.float32).eval()
    model.set_attn_implementation("eager")
    features = {"pixel_values": torch.zeros(1, 3, 336, 336)}
    tower = model.model.vision_tower if "llava" in name else model.model.visual
    if "qwen" in name:
        features = {"hidden_states": torch.zeros(64, 3 * 2 * 14 * 14), "grid_thw": torch.tensor([[1, 8, 8]])}
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        tower(**features)
    counted = counter.get_total_flops()
    if "qwen" in name:  # its tower ends with the merger
        counted -= projector_flops(config, num_visual)
    assert encoder_flops(config, num_visual) == pytest.approx(counted, rel=0.01)


def test_a_window_hears_less_than_the_whole_picture() -> None:
    spec = BlockSpec(width=16, heads=2, mlp_width=32)
    assert block_flops(spec, 100, 10) < block_flops(spec, 100) == block_flops(spec, 100, 1000)


@pytest.mark.parametrize(("family", "tower"), [("internvl", "vision_tower"), ("idefics3", "vision_model")])
def test_a_token_of_several_patches_costs_the_tower_all_of_them(family: str, tower: str) -> None:
    model, _ = tiny.build(family)
    model.set_attn_implementation("eager")
    config, size = model.config, _side(model.config.vision_config.image_size)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        getattr(model.model, tower)(torch.zeros(1, 3, size, size))
    num_visual = (size // _side(config.vision_config.patch_size)) ** 2 // patches_per_token(config)
    assert patches_per_token(config) == 4
    assert encoder_flops(config, num_visual) == pytest.approx(counter.get_total_flops(), rel=0.01)
