"""The fast path against the reference path: the same logits, the same answers, and what does not fit says so once."""

import logging
from typing import Any

import pytest
import torch

from diffprune.fast import NotCompiled
from diffprune.methods.base import Card, Kept, MergingPruner
from diffprune.types import VisualTokens
from tests import tiny
from tests.contracts.vlm import EveryOther, pruned
from tests.fast.compiled import QUESTIONS, SIZES, answer, compiled, reference

INSIDE = ("fastv", "pyramiddrop")


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
    assert run.splicer is not None
    if method != "full":
        assert run.chooser is not None and run.chooser.prune is not None
    torch.testing.assert_close(run.logits, wanted, atol=1e-5, rtol=0)
    torch.testing.assert_close(vlm.fast.ttft(batch), wanted.argmax(-1))


@pytest.mark.parametrize(
    ("family", "method"),
    [
        *(("llava", method) for method in ("diffprune", "cls_attention", "random", "holov", "visionzip", *INSIDE)),
        *(("qwen2_5_vl", method) for method in ("diffprune", "cls_attention", "pyramiddrop")),
        *(("llava_next", method) for method in ("full", "diffprune", "cls_attention", "visionzip", "tome", "random")),
        *(("llava_onevision", method) for method in ("full", "diffprune", "tome", "random")),
        *((family, "diffprune-diverse") for family in ("llava", "llava_next", "llava_onevision")),
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


@pytest.mark.parametrize("method", ["diffprune", "diffprune-diverse"])
def test_a_scorer_of_merged_groups_is_compiled_as_such(method: str) -> None:
    vlm = compiled("qwen2_5_vl", method, vlm=pruned("qwen2_5_vl", method, keep=5, groups="merged"))
    batch = vlm.prepare([[tiny.picture(1)], [tiny.picture(2)]], QUESTIONS[:2])
    run = vlm.fast.start(batch)
    torch.testing.assert_close(run.chooser.logits, vlm.method.score(vlm.encode(batch)), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(run.logits, vlm.logits(batch)[0][:, -1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("method", ["diffprune", "diffprune-diverse"])
def test_a_scorer_of_joined_tiles_is_compiled_as_such(method: str) -> None:
    vlm = compiled("llava_next", method, vlm=pruned("llava_next", method, keep=5, tiles="joined"))
    batch = vlm.prepare([[tiny.picture(1, SIZES["llava_next"][0])]], QUESTIONS[:1])
    run = vlm.fast.start(batch)
    torch.testing.assert_close(run.chooser.logits, vlm.method.score(vlm.encode(batch)), atol=1e-5, rtol=1e-4)


def test_other_families_answer_the_same_where_only_the_language_model_is_fast(sayings: Any) -> None:
    for family in ("internvl", "idefics3", "smolvlm"):
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


def test_features_added_between_layers_run_as_before(sayings: Any) -> None:
    vlm = compiled("qwen3_vl", "feature_norm", image_sizes=[(100, 70)])
    assert torch.equal(answer(vlm, [tiny.picture(1)], "what?"), reference(vlm, [tiny.picture(1)], "what?"))
    assert "adds features between decoder layers" in sayings()[0]


def test_a_request_outside_the_buckets_is_refused_by_the_stages() -> None:
    vlm = compiled("llava", "feature_norm")
    with pytest.raises(NotCompiled, match="2 rows compiled for"):
        vlm.fast.prepare(vlm.prepare([[tiny.picture(1)]] * 3, ["what?"] * 3))


@pytest.mark.parametrize("method", ["diffprune", "feature_norm", "divprune", "tome", "random"])
@pytest.mark.parametrize("family", ["llava", "llava_next", "qwen2_5_vl"])
def test_every_picture_may_have_its_own_budget(family: str, method: str, sayings: Any) -> None:
    vlm = compiled(family, method, keep=(5, 9), batch_sizes=(1, 3))
    images = [tiny.picture(seed) for seed in (1, 2, 3)]
    run = vlm.fast.start(vlm.prepare([[image] for image in images], QUESTIONS), keep=[5, 9, 3])
    assert run.picture is not None and run.num_kept == (5, min(9, run.picture.num_tokens), 3)
    assert (run.ranking is not None) == (method in ("diffprune", "feature_norm"))  # which keep the largest scores
    for keep in ([5, 9, 3], [9, 0.25, 1], [5, 5, 5]):
        assert torch.equal(answer(vlm, images, QUESTIONS, keep=keep), reference(vlm, images, QUESTIONS, keep=keep))
    assert not [line for line in sayings() if "cannot answer" in line]  # all of them on the fast path
    with pytest.raises(ValueError, match="2 budgets for 3 pictures"):
        answer(vlm, images, QUESTIONS, keep=[5, 5])


@pytest.mark.parametrize("keep", [3, 0.5, [3]])
def test_a_budget_without_a_method_is_refused_as_without_compile(keep: Any) -> None:
    vlm = compiled("llava", "full")
    with pytest.raises(ValueError, match="needs something that chooses what is kept"):
        answer(vlm, [tiny.picture(1)], QUESTIONS[0], keep=keep)
    assert torch.equal(
        answer(vlm, [tiny.picture(1)], QUESTIONS[0], keep=1.0), reference(vlm, [tiny.picture(1)], QUESTIONS[0])
    )


def test_under_autocast_the_reference_path_answers_and_says_so(sayings: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        vlm = compiled("llava", "diffprune")
        found = answer(vlm, [tiny.picture(1)], QUESTIONS[0])
        assert torch.equal(found, reference(vlm, [tiny.picture(1)], QUESTIONS[0]))
    assert "torch.autocast is on" in sayings()[0]
    assert torch.equal(answer(vlm, [tiny.picture(1)], QUESTIONS[0]), reference(vlm, [tiny.picture(1)], QUESTIONS[0]))
    assert len(sayings()) == 1


def test_a_prompt_that_ends_with_its_picture_is_cut_between_layers_by_the_reference_path(sayings: Any) -> None:
    vlm, found = compiled("llava", "pyramiddrop"), []
    for seed in range(4):
        prompt: dict[str, Any] = {"images": [tiny.picture(seed)], "text": "a sign <image>", "chat": False}
        found.append(torch.equal(answer(vlm, **prompt), reference(vlm, **prompt)))
    assert all(found)
    assert "and a prompt ends with its picture" in sayings()[0]


def test_what_stands_behind_an_ended_answer_is_what_was_asked_for_inside_the_language_model_too() -> None:
    vlm = compiled("llava", "pyramiddrop")
    images = [tiny.picture(seed) for seed in (1, 2)]
    end = reference(vlm, images, QUESTIONS[:2])[0, 0]
    asked: dict[str, Any] = {"eos_token_id": end, "pad_token_id": 7}
    wanted = reference(vlm, images, QUESTIONS[:2], **asked)
    assert torch.equal(answer(vlm, images, QUESTIONS[:2], **asked), wanted)
    assert wanted.shape[1] > 1 and (wanted[0, 1:] == 7).all()
