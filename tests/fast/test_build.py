"""What is compiled: sizes, comparisons with what it was made of, and what is refused."""

import logging
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

from diffprune.fast import build, verify
from diffprune.model import PrunedVLM
from tests import tiny
from tests.contracts.vlm import pruned
from tests.fast.compiled import QUESTIONS, answer, compiled, reference
from tests.fast.faults import Miscompiler, NoCompiler
from tests.tiny import llava_next


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
@pytest.mark.parametrize("text_bucket", [1, 64])
def test_a_language_model_that_is_not_what_its_parts_say_is_refused_however_small_the_cache(
    family: str, text_bucket: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"batch_sizes": (1,), "text_buckets": (text_bucket,), "max_new_tokens": 1}
    vlm = compiled(family, "feature_norm", keep=1, **options)
    columns = vlm.fast.store.num_columns()
    assert (columns == 8) == (text_bucket == 1)  # fewer than the probe prompt has tokens
    read = build.read_decoder

    def misread(*arguments: Any, **settings: Any) -> Any:
        weights = read(*arguments, **settings)
        return replace(weights, final_norm=weights.final_norm * torch.linspace(0.5, 2, len(weights.final_norm)))

    monkeypatch.setattr(build, "read_decoder", misread)
    with pytest.raises(ValueError, match="the fast path gives other logits than the language model"):
        compiled(family, "feature_norm", keep=1, **options)


@pytest.mark.parametrize("method", ["feature_norm", "pyramiddrop"])
@pytest.mark.parametrize("wrong", ["over_prompt", "one_token", "one_block", ""])
def test_what_the_compiler_gets_wrong_runs_without_it_and_says_so(
    method: str, wrong: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "Compiler", Miscompiler)
    monkeypatch.setattr(Miscompiler, "wrong", wrong)
    with caplog.at_level(logging.WARNING):
        vlm = compiled("llava", method)
    said = [record.getMessage() for record in caplog.records if "torch.compile" in record.getMessage()]
    decoder_is_wrong = wrong in ("over_prompt", "one_token")
    assert vlm.fast.decoder.compiled == (not decoder_is_wrong)
    assert len(said) == (1 if decoder_is_wrong else 2 if wrong else 0), "a tower is compiled for each batch size"
    asked: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "return_ids": True}
    found = vlm.generate([tiny.picture(1)], QUESTIONS[1], **asked)
    vlm.fast = None
    assert torch.equal(found, vlm.generate([tiny.picture(1)], QUESTIONS[1], **asked))


@pytest.mark.parametrize("method", ["diffprune", "pyramiddrop"])
def test_without_a_c_compiler_everything_runs_as_it_is_and_one_sentence_says_so(
    method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "Compiler", NoCompiler)
    with caplog.at_level(logging.WARNING):
        vlm = compiled("llava", method)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("torch.compile cannot be used here (") and "\n" not in said
    assert "Failed to find C compiler" in said and said.endswith("; layers are captured as they are")
    assert not vlm.fast.decoder.compiled and vlm.fast.pictures
    images = [tiny.picture(1)]
    assert torch.equal(answer(vlm, images, QUESTIONS[1]), reference(vlm, images, QUESTIONS[1]))


def test_an_error_that_is_no_compiler_s_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise TypeError("not the compiler")

    monkeypatch.setattr(build.Bucket, "build", broken)
    with pytest.raises(TypeError, match="not the compiler"):
        compiled("llava", "feature_norm")


def test_without_room_for_the_comparison_what_was_compiled_is_used_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full_card(*_: Any) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(build, "Compiler", Miscompiler)
    monkeypatch.setattr(verify, "same_logits", full_card)
    with caplog.at_level(logging.WARNING):
        vlm = compiled("llava", "feature_norm", batch_sizes=(1,), text_buckets=(64,))
    assert vlm.fast.decoder.compiled
    assert [record.getMessage() for record in caplog.records] == [
        "no room to compare 1 x 69 compiled columns with plain layers"
    ]


@pytest.mark.parametrize("newline", ["rows", "all", "none"])
@pytest.mark.parametrize("method", ["full", "feature_norm"])
def test_buckets_have_room_for_the_newlines_that_stay(
    method: str, newline: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, processor = llava_next.build()
    vlm = PrunedVLM(tiny.finish(model, processor), processor, method=method, keep=5, newline=newline)
    length = len(vlm.prepare([[tiny.picture(1)]], ["what?"]).features["input_ids"][0])
    asked: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "return_ids": True}
    wanted = vlm.generate([tiny.picture(1)], "what?", **asked)
    size = tiny.picture(1).size
    exact = length - vlm.encode(vlm.prepare([[tiny.picture(1)]], ["what?"])).slots.shape[1]  # text tokens
    vlm.compile(text_buckets=(exact,), max_new_tokens=4, image_sizes=[size])
    with caplog.at_level(logging.WARNING):
        assert torch.equal(vlm.generate([tiny.picture(1)], "what?", **asked), wanted)
    assert not [record for record in caplog.records if "fast path" in record.getMessage()]


def test_cuts_between_layers_are_refused_where_newlines_stand_between_the_tokens() -> None:
    with pytest.raises(ValueError, match="cannot run 'pyramiddrop' on llava_next, whose visual tokens have newlines"):
        compiled("llava_next", "pyramiddrop")


def test_private_weights_are_an_option_that_states_its_bytes() -> None:
    vlm = compiled("llava", "full")
    text = vlm.base.config.text_config
    qkv = text.hidden_size * text.head_dim * (text.num_attention_heads + 2 * text.num_key_value_heads)
    vision = vlm.base.config.vision_config
    tower = 2 * 3 * (vision.hidden_size**2 + vision.hidden_size)  # blocks up to the features, biases too
    wanted = 3 * (qkv + 2 * text.hidden_size * text.intermediate_size) + tower
    assert vlm.fast.report.extra_bytes["weights"] == wanted * 4
    assert compiled("llava", "full", fuse=False).fast.report.extra_bytes["weights"] == 0


def test_methods_around_one_model_can_share_what_was_compiled() -> None:
    first = compiled("llava", "full")
    other = compiled("llava", vlm=first.with_method("feature_norm", keep=5), share=first.fast)
    assert other.fast.decoder is first.fast.decoder and other.fast.tower is first.fast.tower
    assert torch.equal(answer(other, [tiny.picture(1)], "what?"), reference(other, [tiny.picture(1)], "what?"))
    with pytest.raises(ValueError, match="another base model"):
        compiled("qwen2_vl", share=first.fast)


def test_the_base_model_is_not_touched() -> None:
    vlm = pruned("llava", "feature_norm", keep=5)
    before = {key: (value.data_ptr(), value.clone()) for key, value in vlm.base.state_dict().items()}
    compiled("llava", vlm=vlm)
    answer(vlm, [tiny.picture(1)], "what?")
    for key, value in vlm.base.state_dict().items():
        assert value.data_ptr() == before[key][0] and torch.equal(value, before[key][1])


def test_a_model_is_compiled_once() -> None:
    vlm = compiled("llava", "feature_norm")
    with pytest.raises(ValueError, match=r"compiled already; set vlm\.fast = None first"):
        vlm.compile()
    assert isinstance(vlm.generate([tiny.picture(1)], "what?", max_new_tokens=2, do_sample=False), str)


def test_a_family_with_pictures_of_any_size_wants_to_know_which() -> None:
    with pytest.raises(ValueError, match=r"image_sizes=\[\(width, height\), \.\.\.\]"):
        pruned("qwen2_5_vl", "full").compile()


def test_a_language_model_of_another_make_is_refused() -> None:
    vlm = pruned("paligemma", "full")
    with pytest.raises(ValueError, match="language model of paligemma"):
        vlm.compile(image_sizes=[(56, 56)])
    assert vlm.fast is None


def test_a_method_inside_the_language_model_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="runs those that score every token, with original positions"):
        pruned("llava", "sparsevlm", keep=5).compile()
    with pytest.raises(ValueError, match="runs those that score every token, with original positions"):
        pruned("llava", "pyramiddrop", keep=5, native=True).compile()


NO_ROOM = [
    torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported elsewhere"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
]


@pytest.mark.parametrize("error", NO_ROOM, ids=lambda error: str(error)[:30])
@pytest.mark.parametrize("is_hidden", [False, True], ids=["said", "behind another"])
def test_a_device_without_room_is_one_sentence(
    error: RuntimeError, is_hidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        try:
            raise error.with_traceback(None)
        finally:
            if is_hidden:  # as the end of a capture does
                raise RuntimeError("operation failed due to a previous error during capture")

    vlm = pruned("llava", "feature_norm", keep=5)
    monkeypatch.setattr(build.CacheStore, "reserve", full)
    with pytest.raises(ValueError, match="no room for the fast path; give fewer or smaller batch_sizes") as refused:
        vlm.compile()
    assert vlm.fast is None and refused.value.__cause__ is None
    assert isinstance(vlm.generate([tiny.picture(1)], "what?", max_new_tokens=2), str)


def test_what_was_built_before_the_room_was_gone_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []

    def full(builder: Any, *_: Any) -> None:
        built.append(weakref.ref(builder))
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(build.Builder, "make_buckets", full)
    with pytest.raises(ValueError, match="no room for the fast path"):
        pruned("llava", "feature_norm", keep=5).compile()
    assert built and built[0]() is None


def test_an_error_that_has_nothing_to_do_with_room_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(build.CacheStore, "reserve", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        pruned("llava", "feature_norm", keep=5).compile()
