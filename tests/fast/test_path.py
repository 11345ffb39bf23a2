"""The fast path against the reference path: the same logits, the same answers, and what does not fit says so once."""

import logging
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch

from diffprune.fast import Unfit
from diffprune.fast import path as fast_path
from diffprune.methods.base import Card, Kept, MergingPruner
from diffprune.model import PrunedVLM
from diffprune.types import VisualTokens
from tests import tiny
from tests.contracts.vlm import EveryOther, pruned
from tests.fast.faults import Miscompiler
from tests.tiny import llava_next

SIZES = {
    "llava": None,
    "llava_next": [(100, 70), (64, 48)],
    "qwen2_vl": [(100, 70)],
    "qwen2_5_vl": [(100, 70), (112, 84)],
}
QUESTIONS = ["what?", "what does the sign beside it say?", "is it red or not?"]
INSIDE = ("fastv", "pyramiddrop")


def compiled(family: str, method: Any = "full", *, vlm: PrunedVLM | None = None, **options: Any) -> PrunedVLM:
    """A tiny model with its fast path, room for a few short prompts."""
    vlm = pruned(family, method, keep=5) if vlm is None else vlm
    if method == "diffprune":
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in vlm.method.parameters():
                parameter.normal_(std=0.2)
    small: dict[str, Any] = {"batch_sizes": (1, 2), "text_buckets": (64,), "max_new_tokens": 6}
    vlm.compile(**{**small, "image_sizes": SIZES.get(family), **options})
    return vlm


def reference(vlm: PrunedVLM, images: Any, text: Any, **kwargs: Any) -> torch.Tensor:
    """What the same model answers without its fast path."""
    fast, vlm.fast = vlm.fast, None
    try:
        return vlm.generate(images, text, do_sample=False, return_ids=True, **{"max_new_tokens": 6, **kwargs})
    finally:
        vlm.fast = fast


def answer(vlm: PrunedVLM, images: Any, text: Any, **kwargs: Any) -> torch.Tensor:
    return vlm.generate(images, text, do_sample=False, return_ids=True, **{"max_new_tokens": 6, **kwargs})


@pytest.fixture
def sayings(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.WARNING, logger="diffprune")
    return lambda: [record.message for record in caplog.records if "fast path" in record.message]


def test_rows_without_a_prompt_survive_cuts_that_drop_more_than_is_left() -> None:
    vlm = compiled("qwen2_vl", "fastv", batch_sizes=(2,), image_sizes=[(420, 420)])
    images = [tiny.picture(1).resize((420, 420))]
    assert torch.equal(answer(vlm, images, QUESTIONS[0]), reference(vlm, images, QUESTIONS[0]))


def test_an_answer_of_no_token_is_refused() -> None:
    vlm = compiled("llava")
    with pytest.raises(ValueError, match="max_new_tokens=0 leaves nothing to say"):
        answer(vlm, [tiny.picture(1)], QUESTIONS[0], max_new_tokens=0)


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
@pytest.mark.parametrize("text_bucket", [1, 64])
def test_a_language_model_that_is_not_what_its_parts_say_is_refused_however_small_the_cache(
    family: str, text_bucket: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"batch_sizes": (1,), "text_buckets": (text_bucket,), "max_new_tokens": 1}
    vlm = compiled(family, "feature_norm", keep=1, **options)
    columns = vlm.fast.store.num_columns()
    assert (columns == 8) == (text_bucket == 1)  # fewer than the probe prompt has tokens
    read = fast_path.read_decoder

    def misread(*arguments: Any, **settings: Any) -> Any:
        weights = read(*arguments, **settings)
        return replace(weights, final_norm=weights.final_norm * torch.linspace(0.5, 2, len(weights.final_norm)))

    monkeypatch.setattr(fast_path, "read_decoder", misread)
    with pytest.raises(ValueError, match="the fast path gives other logits than the language model"):
        compiled(family, "feature_norm", keep=1, **options)


@pytest.mark.parametrize("method", ["feature_norm", "pyramiddrop"])
@pytest.mark.parametrize("wrong", ["over_prompt", "one_token", "one_block", ""])
def test_what_the_compiler_gets_wrong_runs_without_it_and_says_so(
    method: str, wrong: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fast_path, "Compiler", Miscompiler)
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


def test_without_room_for_the_comparison_what_was_compiled_is_used_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full_card(*_: Any) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(fast_path, "Compiler", Miscompiler)
    monkeypatch.setattr(fast_path.FastPath, "_same_logits", full_card)
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


@pytest.mark.parametrize("family", list(SIZES))
@pytest.mark.parametrize(
    ("method", "fuse"), [("full", True), ("diffprune", True), ("diffprune", False), ("feature_norm", True)]
)
def test_first_logits_are_those_of_the_reference_path(family: str, method: str, fuse: bool) -> None:
    vlm = compiled(family, method, fuse=fuse)
    batch = vlm.prepare([[tiny.picture(1)], [tiny.picture(2)]], QUESTIONS[:2])
    wanted = vlm.logits(batch)[0][:, -1]
    run = vlm.fast.start(batch)
    assert run.picture is not None, "the tower is static here"
    assert (run.splicer is None) == (family == "llava_next")  # how many newlines stay depends on the choice
    if family == "llava_next" and method != "full":
        assert run.chooser is not None and run.chooser.prune is not None
    torch.testing.assert_close(run.logits, wanted, atol=1e-5, rtol=0)
    torch.testing.assert_close(vlm.fast.ttft(batch), wanted.argmax(-1))


@pytest.mark.parametrize(
    ("family", "method"),
    [
        *(("llava", method) for method in ("diffprune", "cls_attention", "random", "holov", "visionzip", *INSIDE)),
        *(("qwen2_5_vl", method) for method in ("diffprune", "cls_attention", "pyramiddrop")),
        *(("llava_next", method) for method in ("full", "diffprune", "cls_attention", "visionzip", "tome", "random")),
        ("qwen2_vl", "fastv"),
    ],
)
def test_greedy_answers_are_those_of_the_reference_path(family: str, method: str, sayings: Any) -> None:
    vlm = compiled(family, method)
    for seed, question in enumerate(QUESTIONS):
        images = [tiny.picture(seed)]
        assert torch.equal(answer(vlm, images, question), reference(vlm, images, question))
    images = [tiny.picture(seed) for seed in (3, 4)]
    assert torch.equal(answer(vlm, images, QUESTIONS[:2]), reference(vlm, images, QUESTIONS[:2]))
    assert sayings() == []


def test_other_families_answer_the_same_where_only_the_language_model_is_fast(sayings: Any) -> None:
    for family in ("llava_onevision", "internvl", "idefics3", "smolvlm"):
        vlm = compiled(family, EveryOther(), image_sizes=[(100, 70)], text_buckets=(160,))
        assert torch.equal(answer(vlm, [tiny.picture(1)], "what?"), reference(vlm, [tiny.picture(1)], "what?")), family
    assert sayings() == []


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ([(60, 180)], "a picture of 60 x 180, so it runs there as without compile(); compile(image_sizes=[(60, 180)])"),
        ([(100, 70), (64, 48)], "pictures of several sizes at once, so it runs there as without compile(); a batch of"),
    ],
)
def test_tiles_of_another_number_or_two_sizes_at_once_are_encoded_as_before_and_that_is_said(
    sizes: list[tuple[int, int]], sentence: str, sayings: Any
) -> None:
    vlm = compiled("llava_next", "feature_norm")
    images, text = [tiny.picture(seed, size) for seed, size in enumerate(sizes)], QUESTIONS[: len(sizes)]
    assert vlm.fast.start(vlm.prepare([[image] for image in images], text)).picture is None
    assert torch.equal(answer(vlm, images, text), reference(vlm, images, text))
    (said,) = sayings()
    assert said.startswith(f"the fast path has no encoder for {sentence}")


def test_cuts_between_layers_are_refused_where_newlines_stand_between_the_tokens() -> None:
    with pytest.raises(ValueError, match="cannot run 'pyramiddrop' on llava_next, whose visual tokens have newlines"):
        compiled("llava_next", "pyramiddrop")


def test_positions_may_be_packed() -> None:
    vlm = compiled("llava", vlm=pruned("llava", "feature_norm", keep=5, positions="packed"))
    assert torch.equal(answer(vlm, [tiny.picture(1)], "what?"), reference(vlm, [tiny.picture(1)], "what?"))


def test_text_alone_and_several_pictures_are_spliced_as_before_and_prefilled_fast(sayings: Any) -> None:
    vlm = compiled("llava", "feature_norm")
    rows = [[tiny.picture(1), tiny.picture(2)], None]
    for images, text in ((None, "hello"), (rows, ["what are these?", "hello"])):
        assert torch.equal(answer(vlm, images, text), reference(vlm, images, text))
    assert sayings() == []


def test_a_picture_of_a_size_not_compiled_for_is_encoded_as_before_and_that_is_said_once(sayings: Any) -> None:
    vlm = compiled("qwen2_5_vl", "feature_norm")
    for size in ((180, 60), (60, 180), (180, 60)):
        images = [tiny.picture(1, size)]
        run = vlm.fast.start(vlm.prepare([images], ["what?"]))
        assert run.picture is None and run.bucket.length == 69
        assert torch.equal(answer(vlm, images, "what?"), reference(vlm, images, "what?"))
    assert sayings() == [
        "the fast path has no encoder for a picture of 180 x 60, so it runs there as without compile(); "
        "compile(image_sizes=[(180, 60)]) has one"
    ]


def test_another_budget_than_compiled_for_gives_the_same_answer_and_is_said_once(sayings: Any) -> None:
    vlm = compiled("llava", "feature_norm", keep=[5, 0.5])
    for keep, said in ((5, 0), (8, 0), (0.5, 0), (3, 1), (2, 1)):
        found = answer(vlm, [tiny.picture(1)], "what?", keep=keep)
        assert torch.equal(found, reference(vlm, [tiny.picture(1)], "what?", keep=keep))
        assert len(sayings()) == said
    assert sayings() == [
        "the fast path has no choice for keep=3, so it runs there as without compile(); compile(keep=(5, 3)) has one"
    ]


def test_a_text_between_the_buckets_is_spliced_as_before_and_that_is_said_once(sayings: Any) -> None:
    vlm = compiled("llava", "feature_norm", keep=[5, 0.5])
    text, images = "?", [tiny.picture(1)]
    while (
        count := int((vlm.prepare([images], [text]).features["input_ids"] != vlm.backbone.image_token_id).sum())
    ) < 66:
        text += "?"
    for _ in range(2):
        assert torch.equal(answer(vlm, images, text), reference(vlm, images, text))
    assert count == 66 and vlm.fast.start(vlm.prepare([images], [text])).bucket.length == 72
    assert sayings() == [
        "the fast path has no splice for 66 text tokens beside 5 visual ones, so it runs there as without compile(); "
        "compile(text_buckets=(66,)) has one"
    ]


def test_a_method_that_keeps_fewer_than_asked_is_spliced_as_before() -> None:
    class Pairs(MergingPruner):
        """Four tokens, however many were asked for."""

        name = "pairs"
        card = Card(idea="for tests")

        def reduce(self, tokens: VisualTokens, k: torch.Tensor) -> Kept:
            x = tokens.x.unflatten(1, (4, -1)).mean(2)
            return Kept(x=x, index=(torch.arange(4) * 4).expand(len(x), -1))

    vlm = compiled("llava", Pairs())
    run = vlm.fast.start(vlm.prepare([[tiny.picture(1)]], ["what?"]))
    assert run.splicer is None and run.num_kept == (4,)
    assert torch.equal(answer(vlm, [tiny.picture(1)], "what?"), reference(vlm, [tiny.picture(1)], "what?"))


@pytest.mark.parametrize("name", ["tome", "holov"])
def test_tokens_that_come_in_a_release_s_order_are_spliced_in_raster_order(name: str) -> None:
    vlm = compiled("llava", vlm=pruned("llava", name, keep=5, native=True))
    batch = vlm.prepare([[tiny.picture(1)], [tiny.picture(2)]], QUESTIONS[:2])
    run = vlm.fast.start(batch)
    assert run.splicer is not None
    tokens = vlm.encode(batch)
    assert any(row.tolist() != sorted(row.tolist()) for row in vlm.method.select(tokens, torch.tensor([5, 5])))
    torch.testing.assert_close(run.logits, vlm.logits(batch)[0][:, -1])


def test_an_answer_ends_where_the_reference_path_ends_it() -> None:
    vlm = compiled("llava", "feature_norm")
    images = [tiny.picture(seed) for seed in (1, 2)]
    whole = reference(vlm, images, QUESTIONS[:2])
    end = int(whole[0, 2])
    found = answer(vlm, images, QUESTIONS[:2], eos_token_id=end)
    assert torch.equal(found, reference(vlm, images, QUESTIONS[:2], eos_token_id=end))
    assert (found[0] == end).any()
    alone = answer(vlm, images[:1], QUESTIONS[0], eos_token_id=end)
    assert alone.shape[1] == 1 + whole[0].tolist().index(end) < 6


def test_what_does_not_fit_runs_as_before_and_says_so_once(sayings: Any) -> None:
    vlm = compiled("llava", "feature_norm")
    long = "why " * 40
    for _ in range(2):
        assert torch.equal(answer(vlm, [tiny.picture(1)], long), reference(vlm, [tiny.picture(1)], long))
    assert sayings() == [
        "the fast path cannot answer here: the prompt is longer than the 69 columns compiled for; "
        "such requests run as without compile()"
    ]
    three = [tiny.picture(seed) for seed in range(3)]
    answer(vlm, three, ["what?"] * 3)
    answer(vlm, [tiny.picture(1)], "what?", max_new_tokens=7)
    vlm.generate([tiny.picture(1)], "what?", max_new_tokens=2, num_beams=2, do_sample=False)
    said = " ".join(sayings()[1:])
    assert len(sayings()) == 4
    assert all(part in said for part in ("2 rows compiled for", "6 tokens compiled for", "num_beams=2"))


def test_a_method_inside_the_language_model_answers_other_budgets_by_the_reference_path(sayings: Any) -> None:
    vlm = compiled("llava", "fastv")
    found = answer(vlm, [tiny.picture(1)], "what?", keep=3)
    assert torch.equal(found, reference(vlm, [tiny.picture(1)], "what?", keep=3))
    assert torch.equal(answer(vlm, None, "hello"), reference(vlm, None, "hello"))
    assert "nothing was compiled for this length and keep" in sayings()[0]


def test_the_caches_of_a_method_inside_hold_fewer_columns_after_its_cut() -> None:
    before, inside = compiled("llava", "full").fast, compiled("llava", "fastv").fast
    assert inside.buckets[0].columns == [88, 88, 80]  # 16 visual tokens, 5 from the third layer on; 64 text, 6 new
    assert inside.kv_bytes(1, 80) == before.kv_bytes(1, 80) * (88 + 88 + 80) // (3 * 88)


def test_stages_can_be_run_one_by_one_and_again() -> None:
    vlm = compiled("llava", "diffprune")
    fast = vlm.fast
    run = fast.prepare(vlm.prepare([[tiny.picture(1)]], ["what?"]))
    tokens = []
    for _ in range(2):
        for stage in (fast.encode, fast.prune, fast.splice, fast.prefill):
            stage(run)
        row = [int(run.token)]
        for _ in range(3):
            fast.decode(run)
            row.append(int(run.token))
        tokens.append(row)
    assert tokens[0] == tokens[1] == reference(vlm, [tiny.picture(1)], "what?", max_new_tokens=4)[0].tolist()
    assert torch.equal(run.kept[0], vlm.select([tiny.picture(1)], ["what?"]).keep[0])
    assert fast.captured(run) == dict.fromkeys(("encode", "prune", "splice", "prefill", "decode"), False)
    for _ in range(2):
        fast.decode(run)
    with pytest.raises(ValueError, match="max_new_tokens=6"):
        fast.decode(run)


def test_the_cache_takes_the_bytes_that_are_predicted() -> None:
    fast = compiled("llava", "feature_norm", max_new_tokens=19).fast
    bucket = fast.buckets[-1]
    held = sum(cache.keys.nbytes + cache.values.nbytes for cache in bucket.cache)
    text = fast.backbone.config.text_config
    columns = 88  # 5 visual, 64 text and 19 new ones
    assert held == fast.kv_bytes(2, 69) == 2 * 3 * 2 * text.num_key_value_heads * columns * text.head_dim * 4
    assert fast.report.extra_bytes["cache"] == held  # one memory serves all buckets
    with pytest.raises(ValueError, match="no bucket of 3 x 69; there are 1 x 69, 2 x 69"):
        fast.kv_bytes(3, 69)


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


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"batch_sizes": (0,)}, "batch_sizes holds 0"),
        ({"batch_sizes": 4}, r"batch_sizes=4 is no list; write it as batch_sizes=\(1, 8\)"),
        ({"batch_sizes": None}, "batch_sizes=None is no list"),
        ({"text_buckets": ()}, r"text_buckets=\(\) names nothing; give at least one"),
        ({"text_buckets": "64"}, r"text_buckets='64' is no list; write it as text_buckets=\(64, 128\)"),
        ({"text_buckets": (64, "128")}, "text_buckets holds '128'; give whole numbers"),
        ({"max_new_tokens": 0}, "max_new_tokens holds 0"),
        ({"keep": 0}, "keep=0 keeps nothing"),
        ({"keep": []}, r"keep=\[\] names nothing; give at least one, as in keep=64 or"),
        ({"keep": "64"}, "keep='64' is no list; write it as keep=64 or"),
        ({"image_sizes": []}, r"image_sizes=\[\] names nothing"),
        ({"image_sizes": (336, 336)}, r"image_sizes=\(336, 336\) holds 336, which is no size; write it as .*\[\(336, "),
        ({"image_sizes": [(336, 0)]}, r"holds \(336, 0\), which is no size"),
        ({"image_sizes": 336}, "image_sizes=336 is no list"),
        ({"speed": 9}, "compile\\(\\) has no option 'speed'; it takes keep, "),
    ],
)
def test_bad_sizes_are_named_and_the_reference_path_goes_on(options: dict[str, Any], sentence: str) -> None:
    vlm = pruned("llava", "feature_norm", keep=5)
    with pytest.raises(ValueError, match=sentence):
        vlm.compile(**options)
    assert vlm.fast is None and isinstance(vlm.generate([tiny.picture(1)], "what?", max_new_tokens=2), str)


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


def test_features_added_between_layers_run_as_before(sayings: Any) -> None:
    vlm = compiled("qwen3_vl", "feature_norm", image_sizes=[(100, 70)])
    assert torch.equal(answer(vlm, [tiny.picture(1)], "what?"), reference(vlm, [tiny.picture(1)], "what?"))
    assert "adds features between decoder layers" in sayings()[0]


def test_a_method_inside_the_language_model_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match="knows FastV, PyramidDrop with original positions"):
        pruned("llava", "sparsevlm", keep=5).compile()
    with pytest.raises(ValueError, match="knows FastV, PyramidDrop with original positions"):
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
    monkeypatch.setattr(fast_path.CacheStore, "reserve", full)
    with pytest.raises(ValueError, match="no room for the fast path; give fewer or smaller batch_sizes") as refused:
        vlm.compile()
    assert vlm.fast is None and refused.value.__cause__ is None
    assert isinstance(vlm.generate([tiny.picture(1)], "what?", max_new_tokens=2), str)


def test_what_was_built_before_the_room_was_gone_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []

    def full(path: Any, *_: Any) -> None:
        built.append(weakref.ref(path))
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(fast_path.FastPath, "_make_buckets", full)
    with pytest.raises(ValueError, match="no room for the fast path"):
        pruned("llava", "feature_norm", keep=5).compile()
    assert built and built[0]() is None


def test_an_error_that_has_nothing_to_do_with_room_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(fast_path.CacheStore, "reserve", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        pruned("llava", "feature_norm", keep=5).compile()


def test_a_request_outside_the_buckets_is_refused_by_the_stages() -> None:
    vlm = compiled("llava", "feature_norm")
    with pytest.raises(Unfit, match="2 rows compiled for"):
        vlm.fast.prepare(vlm.prepare([[tiny.picture(1)]] * 3, ["what?"] * 3))
