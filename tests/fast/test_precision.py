"""Linear maps in 8 bits: how far they are off, and where they are left out."""

import logging
from typing import Any

import pytest
import torch

from diffprune.fast import build, verify
from diffprune.fast.decoder import apply
from diffprune.fast.precision import LARGEST, Scaled, scaled_map, to_eight_bits, why_not_eight_bits
from tests import tiny
from tests.contracts.vlm import pruned
from tests.fast.compiled import answer, compiled, reference


def test_rows_of_any_size_keep_their_own_three_bits_after_the_leading_one() -> None:
    x = (
        torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
        * torch.tensor([1e-6, 1e-3, 1, 30, 1e4, 0])[:, None]
    )
    small, scale = to_eight_bits(x)
    back = small.float() * scale
    assert ((back - x).norm(dim=-1)[:5] / x.norm(dim=-1)[:5] < 0.04).all() and (back[5] == 0).all()
    assert torch.equal(small.float().abs().amax(-1)[:5], torch.full((5,), LARGEST))


@pytest.mark.parametrize("shape", [(3, 32), (2, 5, 32), (1, 1, 32)])
@pytest.mark.parametrize("with_bias", [True, False])
def test_a_product_in_8_bits_is_off_by_a_few_percent(shape: tuple[int, ...], with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    weight, x = torch.randn(48, 32, generator=generator), torch.randn(shape, generator=generator)
    bias = torch.randn(48, generator=generator) if with_bias else None
    linear = scaled_map((weight, bias))
    assert isinstance(linear, Scaled)
    found, wanted = apply(x, linear), torch.nn.functional.linear(x, weight, bias)
    assert found.dtype == x.dtype and found.shape == wanted.shape
    assert (found - wanted).norm() / wanted.norm() < 0.06
    exact = (linear.weight.float() * linear.scale.t()).t()
    small, scale = to_eight_bits(x.flatten(0, -2))
    emulated = ((small.float() * scale) @ exact).unflatten(0, shape[:-1]) + (0 if bias is None else bias)
    torch.testing.assert_close(found, emulated, atol=0.05, rtol=1e-2)


def test_widths_that_such_products_do_not_take_stay_as_they_are() -> None:
    for shape in ((30, 32), (32, 30)):
        linear = (torch.randn(shape), None)
        assert scaled_map(linear) is linear


def test_where_the_device_cannot_one_sentence_says_so_and_the_model_s_precision_is_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="diffprune"):
        vlm = compiled("llava", "feature_norm", precision="fp8")
    assert [record.message for record in caplog.records] == [
        "precision='fp8' is left out, and the model's own is used: cpu has no 8-bit matrix products that are faster"
    ]
    assert vlm.fast.report.precision == "float32" and vlm.fast.report.logit_error is None
    assert torch.equal(answer(vlm, [tiny.picture(1)], "what?"), reference(vlm, [tiny.picture(1)], "what?"))


def test_a_card_or_a_torch_without_such_products_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    assert why_not_eight_bits(cuda).startswith("NVIDIA A100 has no 8-bit matrix products")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch, "ones", lambda *shape, device: torch.zeros(shape) + 1)
    monkeypatch.delattr(torch, "_scaled_mm")
    assert "cannot" in why_not_eight_bits(cuda)


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(ValueError, match="precision='int3' is not known; give 'model' or 'fp8'"):
        compiled("llava", precision="int3")


@pytest.fixture
def eight_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in 8 bits on this device too, where they are exact and slow."""
    monkeypatch.setattr(build, "why_not_eight_bits", lambda device: "")


@pytest.mark.usefixtures("eight_bits")
@pytest.mark.parametrize("error", [float("nan"), 0.7])
def test_logits_that_no_rounding_explains_are_not_used(
    error: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(verify, "logit_error", lambda *_: error)
    with caplog.at_level(logging.WARNING, logger="diffprune"):
        vlm = compiled("llava", "feature_norm", precision="fp8")
    assert f"precision='fp8' is left out, and the model's own is used: logits are off by {error:.2g}" in caplog.text
    assert "more than max_logit_error=0.5" in caplog.text
    assert vlm.fast.report.precision == "float32" and not isinstance(vlm.fast.decoder.weights.layers[0].out, Scaled)


@pytest.mark.usefixtures("eight_bits")
def test_who_compiles_says_how_far_off_they_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "logit_error", lambda *_: 0.7)
    assert (
        compiled("llava", "feature_norm", precision="fp8", max_logit_error=float("inf")).fast.report.precision == "fp8"
    )
    assert compiled("llava", "feature_norm", precision="fp8", max_logit_error=0.7).fast.report.logit_error == 0.7
    monkeypatch.setattr(verify, "logit_error", lambda *_: float("nan"))
    assert compiled("llava", "full", precision="fp8", max_logit_error=float("inf")).fast.report.precision == "float32"


@pytest.mark.parametrize("value", [0, -1, True, "0.5", float("nan")])
def test_a_limit_that_is_no_number_above_0_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"is no number above 0; give one, as 0\.5"):
        compiled("llava", max_logit_error=value)


@pytest.mark.usefixtures("eight_bits")
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl", "llava_next"])
def test_a_model_in_8_bits_says_how_far_its_logits_are_off(family: str) -> None:
    vlm = compiled(family, "feature_norm", precision="fp8")
    report, layers = vlm.fast.report, vlm.fast.decoder.weights.layers
    assert all(isinstance(each, Scaled) for each in (*layers[0].qkv, layers[0].out, *layers[0].gate_up, layers[0].down))
    batch = vlm.prepare([[tiny.picture(1)], [tiny.picture(2)]], ["what?", "is it red?"])
    found, wanted = vlm.fast.start(batch).logits, vlm.logits(batch)[0][:, -1]
    error = float((found - wanted).norm() / wanted.norm())
    assert report.precision == "fp8" and 0.001 < report.logit_error < 0.2 and 0.001 < error < 0.2
    assert answer(vlm, [tiny.picture(1)], "what?").shape == (1, 6)


@pytest.mark.usefixtures("eight_bits")
def test_methods_share_8_bits_with_their_like_alone() -> None:
    first = compiled("llava", "full", precision="fp8")
    like = compiled("llava", vlm=first.with_method("feature_norm", keep=5), share=first.fast, precision="fp8")
    assert like.fast.decoder is first.fast.decoder and like.fast.report.logit_error == first.fast.report.logit_error
    other = compiled("llava", vlm=first.with_method("feature_norm", keep=5), share=first.fast)
    assert other.fast.decoder is not first.fast.decoder and other.fast.tower is first.fast.tower
    assert torch.equal(answer(other, [tiny.picture(1)], "what?"), reference(other, [tiny.picture(1)], "what?"))


@pytest.mark.usefixtures("eight_bits")
def test_8_bits_hold_a_quarter_of_what_32_do() -> None:
    text: Any = pruned("llava").base.config.text_config
    heads, width = text.num_attention_heads + text.num_key_value_heads, text.head_dim
    maps = 2 * text.hidden_size * heads * width + 3 * text.hidden_size * text.intermediate_size
    rows = (heads + text.num_key_value_heads) * width + 2 * text.hidden_size + 2 * text.intermediate_size
    vlm = compiled("llava", "feature_norm", precision="fp8")
    assert vlm.fast.decoder.weights.own_bytes == text.num_hidden_layers * (maps + 4 * rows)
