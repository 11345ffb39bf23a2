"""Shapes made on first use: answered as by the reference path, once made on the fast path, and no more than allowed."""

import logging
from typing import Any

import pytest
import torch

from diffprune.fast import buckets, build
from tests import tiny
from tests.fast.compiled import QUESTIONS, answer, compiled, reference


@pytest.fixture
def sayings(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.WARNING, logger="diffprune")
    return lambda: [record.message for record in caplog.records]


def start(vlm: Any, images: Any, text: str = "what?", **kwargs: Any) -> Any:
    return vlm.fast.start(vlm.prepare([images], [text]), **kwargs)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava_next", "llava_onevision"])
@pytest.mark.parametrize("method", ["feature_norm", "diffprune", "random"])
def test_a_picture_of_a_new_size_is_compiled_for_once(family: str, method: str, sayings: Any) -> None:
    vlm = compiled(family, method, on_demand=4)
    images = [tiny.picture(1, (180, 60))]
    run = start(vlm, images)
    assert run.picture is not None and run.splicer is not None
    made = (len(vlm.fast.pictures), len(vlm.fast.buckets), vlm.fast.growth.left)
    for seed in range(3):
        images = [tiny.picture(seed, (180, 60))]
        assert torch.equal(answer(vlm, images, QUESTIONS[seed]), reference(vlm, images, QUESTIONS[seed]))
    assert (len(vlm.fast.pictures), len(vlm.fast.buckets), vlm.fast.growth.left) == made and sayings() == []


def test_another_budget_a_longer_text_and_more_rows_are_compiled_for_once(sayings: Any) -> None:
    vlm = compiled("llava", "feature_norm", on_demand=6)
    long = "why " * 40
    for text, keep in (("what?", 3), (long, 5), (long, 3)):
        for _ in range(2):
            run = start(vlm, [tiny.picture(1)], text, keep=keep)
            assert run.splicer is not None and run.num_kept == (keep,)
            found = answer(vlm, [tiny.picture(2)], text, keep=keep)
            assert torch.equal(found, reference(vlm, [tiny.picture(2)], text, keep=keep))
    three = [tiny.picture(seed) for seed in range(3)]
    assert torch.equal(answer(vlm, three, QUESTIONS), reference(vlm, three, QUESTIONS))
    assert max(bucket.batch for bucket in vlm.fast.buckets) == 4 and sayings() == []
    largest = max(vlm.fast.buckets, key=lambda bucket: bucket.batch)
    assert largest.cache[0].keys.data_ptr() != vlm.fast.buckets[0].cache[0].keys.data_ptr()  # it needs more room


def test_a_text_between_the_buckets_takes_the_longer_one_that_is_there() -> None:
    vlm = compiled("llava", "feature_norm", keep=[5, 0.5], on_demand=1)
    before, text, images = len(vlm.fast.buckets), "?", [tiny.picture(1)]
    image_id = vlm.backbone.image_token_id
    while int((vlm.prepare([images], [text]).features["input_ids"] != image_id).sum()) < 66:
        text += "?"
    run = start(vlm, images, text)
    assert run.splicer is not None and run.bucket.length == 72 and len(vlm.fast.buckets) == before
    assert vlm.fast.growth.left == 1


def test_beyond_the_limit_the_reference_code_goes_on_and_says_so_once(sayings: Any) -> None:
    vlm = compiled("qwen2_5_vl", "feature_norm", on_demand=2)
    for size in ((180, 60), (60, 180), (200, 60), (180, 60), (60, 200)):
        images = [tiny.picture(1, size)]
        assert torch.equal(answer(vlm, images, "what?"), reference(vlm, images, "what?"))
    assert vlm.fast.growth.left == 0
    (said,) = [line for line in sayings() if "no encoder" in line]
    assert "compile(image_sizes=[(" in said


def test_without_room_for_a_new_bucket_one_sentence_says_so_and_the_reference_path_answers(
    sayings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    vlm = compiled("llava", "feature_norm", on_demand=4)

    def full(*_: Any) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(buckets.CacheStore, "reserve", full)
    long = "why " * 60
    for _ in range(2):
        assert torch.equal(answer(vlm, [tiny.picture(1)], long), reference(vlm, [tiny.picture(1)], long))
    assert vlm.fast.growth.left == 4
    first, second = sayings()
    assert first == "a new shape cannot be compiled and runs as without compile(): there is no room on the device"
    assert "the prompt is longer than the 69 columns compiled for" in second


def test_a_splice_that_cannot_be_made_is_the_reference_code_s(sayings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    vlm = compiled("llava", "feature_norm", on_demand=4)

    def broken(*_: Any) -> None:
        raise RuntimeError("the capture failed")

    monkeypatch.setattr(build.Builder, "make_splicer", broken)
    long = "why " * 60
    for _ in range(2):
        assert torch.equal(answer(vlm, [tiny.picture(1)], long), reference(vlm, [tiny.picture(1)], long))
    assert sayings()[0] == "a new shape cannot be compiled and runs as without compile(): the capture failed"


def test_no_more_shapes_are_tried_than_may_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    vlm, tried = compiled("llava", "feature_norm", on_demand=2), []

    def broken(*arguments: Any) -> None:
        tried.append(arguments)
        raise RuntimeError("the capture failed")

    monkeypatch.setattr(build.Builder, "add_chooser", broken)
    for keep in (2, 3, 4, 6):
        assert torch.equal(
            answer(vlm, [tiny.picture(1)], "what?", keep=keep), reference(vlm, [tiny.picture(1)], "what?", keep=keep)
        )
    assert len(tried) == 2


@pytest.mark.parametrize("method", ["diffprune", "feature_norm", "random", "tome"])
@pytest.mark.parametrize("family", ["llava", "llava_next"])
def test_several_pictures_of_a_prompt_are_encoded_and_chosen_by_graphs(family: str, method: str, sayings: Any) -> None:
    vlm = compiled(family, method, on_demand=4)
    rows = [[tiny.picture(1), tiny.picture(2)], None, [tiny.picture(3)]]
    run = start(vlm, rows[0], "what are these?")
    assert run.picture is not None and run.picture.batch == 2 and run.splicer is None
    assert (run.chooser is not None and run.chooser.prune is not None) == (
        method in ("diffprune", "feature_norm", "tome")
    )
    assert run.kept is not None and len(run.kept) == 2  # of each picture, though there is one prompt
    for images, text in ((rows[:1], ["what are these?"]), (rows, ["what are these?", "hello", "what?"])):
        assert torch.equal(answer(vlm, images, text), reference(vlm, images, text))
    assert sayings() == []


def test_several_pictures_that_are_cut_otherwise_than_one_are_encoded_by_the_reference_code() -> None:
    vlm = compiled("llava_onevision", "feature_norm", on_demand=4)
    rows = [[tiny.picture(1), tiny.picture(2)]]
    assert start(vlm, rows[0]).picture is None
    assert torch.equal(answer(vlm, rows, ["what?"]), reference(vlm, rows, ["what?"]))


def test_a_method_inside_the_language_model_gets_buckets_with_its_cuts() -> None:
    vlm = compiled("llava", "fastv", on_demand=4)
    found = answer(vlm, [tiny.picture(1)], "what?", keep=3)
    assert torch.equal(found, reference(vlm, [tiny.picture(1)], "what?", keep=3))
    assert start(vlm, [tiny.picture(1)], keep=3).bucket.cuts.left == {2: 3}


def test_parts_may_be_made_in_a_request_of_inference_mode_and_used_in_any_other() -> None:
    vlm = compiled("llava", "feature_norm", on_demand=4)
    with torch.inference_mode():
        run = start(vlm, [tiny.picture(1)], keep=3)
        first = run.logits.clone()
    with torch.no_grad():
        again = start(vlm, [tiny.picture(1)], keep=3).logits
    assert torch.equal(first, again) and not again.is_inference()


@pytest.mark.parametrize("value", [-1, 2.5, True, "4"])
def test_a_limit_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=f"on_demand={value!r} is no number of shapes; give 0 or more"):
        compiled("llava", on_demand=value)


def test_without_room_for_more_rows_the_rows_are_what_is_named(sayings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    vlm = compiled("llava", "feature_norm", on_demand=4)

    def full(*_: Any) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(buckets.CacheStore, "reserve", full)
    images = [tiny.picture(seed) for seed in range(3)]
    assert torch.equal(answer(vlm, images, ["what?"] * 3), reference(vlm, images, ["what?"] * 3))
    assert "the batch is larger than the 2 rows compiled for" in sayings()[-1]
