"""Graphs on a CUDA device: captured where they should be, and the same answers as the reference path."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from diffprune.fast import build
from diffprune.model import PrunedVLM
from tests import tiny
from tests.fast.faults import Miscompiler

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # torch's compiler has advice of its own for each kind of GPU
]

BEFORE = ("diffprune", "feature_norm", "holov")


@pytest.fixture(autouse=True)
def full_float32() -> Iterator[None]:
    """Convolutions in float32 proper: by default torch runs them in TF32, and the fast path has a product in place."""
    allowed = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = allowed


def on_gpu(family: str, method: str, **options: Any) -> PrunedVLM:
    import importlib

    torch.manual_seed(0)
    model, processor = importlib.import_module(f"tests.tiny.{family}").build()
    vlm = PrunedVLM(tiny.finish(model, processor).cuda(), processor, method=method, keep=5)
    if method.startswith("diffprune"):
        for parameter in vlm.method.parameters():  # a head of zeros would hide what the scorer's blocks do
            torch.nn.init.normal_(parameter, std=0.2)
    sizes = None if family == "llava" else [(100, 70)]
    small: dict[str, Any] = {"batch_sizes": (1, 2), "text_buckets": (64,), "max_new_tokens": 6, "image_sizes": sizes}
    report = vlm.compile(**{**small, **options})
    assert report.captured
    return vlm


@pytest.mark.parametrize(
    ("family", "method"),
    [
        *((family, method) for family in ("llava", "qwen2_5_vl") for method in (*BEFORE, "pyramiddrop")),
        *(("llava_next", method) for method in BEFORE),
        *(("llava_onevision", method) for method in ("diffprune", "feature_norm")),
    ],
)
@pytest.mark.parametrize("compile_layers", [True, False])
def test_a_captured_model_answers_as_the_reference_path(family: str, method: str, compile_layers: bool) -> None:
    vlm = on_gpu(family, method, compile_layers=compile_layers)
    assert vlm.fast.decoder.compiled == compile_layers, "what was compiled gave other values than the plain functions"
    batch = vlm.prepare([[tiny.picture(1)], [tiny.picture(2)]], ["what?", "what does the sign say?"])
    run = vlm.fast.start(batch)
    captured = vlm.fast.captured(run)
    assert captured["encode"] and captured["prefill"] and captured["decode"]
    assert captured["splice"]
    assert captured["prune"] == (method != "pyramiddrop")  # which has nothing to choose before the language model
    assert_same_answers(vlm)


def assert_same_answers(vlm: PrunedVLM) -> None:
    asked: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "return_ids": True}
    for seed in range(3):
        found = vlm.generate([tiny.picture(seed)], "what is it?", **asked)
        fast, vlm.fast = vlm.fast, None
        wanted = vlm.generate([tiny.picture(seed)], "what is it?", **asked)
        vlm.fast = fast
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("method", ["feature_norm", "pyramiddrop"])
@pytest.mark.parametrize("wrong", ["over_prompt", "one_token", "one_block"])
def test_what_the_compiler_gets_wrong_is_captured_without_it(
    method: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "Compiler", Miscompiler)
    monkeypatch.setattr(Miscompiler, "wrong", wrong)
    vlm = on_gpu("llava", method)
    assert vlm.fast.decoder.compiled == (wrong == "one_block")  # which is the tower's
    assert_same_answers(vlm)


@pytest.mark.parametrize("family", ["llava_next", "qwen2_5_vl"])
def test_a_shape_made_on_first_use_is_captured_like_the_others(family: str) -> None:
    vlm = on_gpu(family, "diffprune", on_demand=4)
    asked: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "return_ids": True}
    for size, keep in (((180, 60), 5), ((100, 70), 3)):
        found = vlm.generate([tiny.picture(1, size)], "what is it?", keep=keep, **asked)
        run = vlm.fast.start(vlm.prepare([[tiny.picture(1, size)]], ["what is it?"]), keep=keep)
        assert all(vlm.fast.captured(run).values())
        fast, vlm.fast = vlm.fast, None
        wanted = vlm.generate([tiny.picture(1, size)], "what is it?", keep=keep, **asked)
        vlm.fast = fast
        assert torch.equal(found, wanted)
    assert vlm.fast.growth.left < 4


def test_without_room_the_model_is_as_before_and_can_be_compiled_smaller() -> None:
    vlm = on_gpu("llava", "feature_norm")
    vlm.fast = None
    asked: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "return_ids": True}
    wanted = vlm.generate([tiny.picture(1)], "what is it?", **asked)
    gc.collect()
    room = torch.cuda.memory_reserved() + 2**24
    torch.cuda.set_per_process_memory_fraction(room / torch.cuda.get_device_properties(0).total_memory)
    try:
        with pytest.raises(ValueError, match="the GPU has no room for the fast path"):
            vlm.compile(batch_sizes=(512,), text_buckets=(1024,), max_new_tokens=64)
        assert vlm.fast is None
        assert torch.equal(vlm.generate([tiny.picture(1)], "what is it?", **asked), wanted)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert vlm.compile(text_buckets=(64,), max_new_tokens=6).captured
    assert torch.equal(vlm.generate([tiny.picture(1)], "what is it?", **asked), wanted)


def test_a_graph_gives_the_same_twice_and_follows_its_inputs() -> None:
    vlm = on_gpu("llava", "feature_norm")
    batches = [vlm.prepare([[tiny.picture(seed)]], ["what?"]) for seed in (1, 2)]
    logits = [vlm.fast.start(batch).logits.clone() for batch in (*batches, batches[0])]
    assert torch.equal(logits[0], logits[2]) and not torch.equal(logits[0], logits[1])
