"""The runner: what `eval` measures is what `generate` deploys, with every kind of method, and scored by task."""

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from diffprune.evaluate.answers import read_sheet, write_sheet
from diffprune.evaluate.encoded import encode_questions
from diffprune.evaluate.rows import quality_rows
from diffprune.evaluate.runner import (
    Measurement,
    answer,
    choose,
    evaluate,
    first_logits,
    spelled,
    throttled_inputs,
)
from diffprune.evaluate.scoring import make_sheet
from diffprune.evaluate.throttled import Throttle
from diffprune.methods.base import NEEDS
from diffprune.model import PrunedVLM
from diffprune.results import check_rows
from tests import tiny
from tests.evaluate.memory import MEMORY, PICTURES

METHODS = {
    "choosing": [("random", 5), ("divprune", 0.4), ("uniform_grid", 1), ("diffprune", 0.3)],
    "merging": [("visionzip", 6), ("tome", 6), ("average_pool", 4)],
    "reading the text": [("mmtok", 5), ("text_cluster", 0.4)],
    "inside the language model": [("fastv", 0.5), ("pyramiddrop", 0.4), ("sparsevlm", 6)],
}


def pruned(family: str, method="full", keep: int | float = 1.0, **options) -> PrunedVLM:
    torch.manual_seed(0)
    vlm = PrunedVLM(*tiny.build(family), method=method, keep=keep, **options)
    if method == "diffprune":
        torch.nn.init.normal_(vlm.method.scorer.head.weight)  # it starts with all logits equal
    return vlm


@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize("family", ["llava", "llava_next", "qwen2_5_vl"])
def test_what_is_measured_is_what_generate_deploys(family: str, kind: str) -> None:
    """Prompts with one picture, two and none, asked one by one and in batches."""
    vlm = pruned(family)
    made = {(name, keep): pruned(family, name, keep) for name, keep in METHODS[kind]}
    needs = frozenset[str]().union(*(one.method.needs for one in made.values())) & NEEDS
    encoded = encode_questions(vlm, MEMORY.build(["words"], count=5), needs=needs, batch_size=2)
    for (name, keep), deployed in made.items():
        expected = [
            deployed.generate(list(question.images) or None, question.prompt, max_new_tokens=3, do_sample=False)
            for question in encoded.asked
        ]
        for batch_size in (1, 3):
            said = answer(deployed, encoded, keep=keep, batch_size=batch_size, max_new_tokens=3)
            assert said == expected, (name, batch_size)
        assert len(set(expected)) > 1, "the tiny model does look"


def test_pictures_are_left_out_where_a_measurement_is_blind() -> None:
    vlm = pruned("llava")
    encoded = encode_questions(vlm, MEMORY.build(["letters"], count=3))
    _, blind = evaluate(vlm, encoded, [Measurement("blind", 1.0, 0, vlm.method, blind=True)], batch_size=2)
    assert blind.said == [vlm.generate(None, prompt, max_new_tokens=8, do_sample=False) for prompt in encoded.prompts]


def test_a_picture_is_encoded_once_for_all_methods_budgets_and_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    vlm = pruned("llava")
    encoded: list[int] = []
    kind = type(vlm.backbone)
    encode = kind.encode

    def counting(self, batch, needs=frozenset()):
        encoded.append(batch.num_images)
        return encode(self, batch, needs)

    monkeypatch.setattr(kind, "encode", counting)
    questions = encode_questions(vlm, MEMORY.build(["letters", "words"], count=8), needs=NEEDS & vlm.backbone.provides)
    planned = [
        Measurement(name, keep, 0, vlm.with_method(name).method)
        for name in ("random", "visionzip", "fastv")
        for keep in (4, 0.5)
    ]
    evaluate(vlm, questions, planned)
    assert sum(encoded) == len(PICTURES) == len(questions.images)


def test_answers_are_said_without_the_blanks_around_them(monkeypatch: pytest.MonkeyPatch) -> None:
    vlm = pruned("llava")
    monkeypatch.setattr(type(vlm.backbone.tokenizer), "batch_decode", lambda *_, **__: [" a b\n", "\tc"])
    assert spelled(vlm, torch.zeros(2, 3, dtype=torch.long)) == ["a b", "c"]


def test_the_distance_of_first_tokens_is_from_the_full_model_to_the_pruned_one() -> None:
    model, processor = tiny.build("llava")
    vlm = PrunedVLM(copy.deepcopy(model), processor, method="full")  # a copy: the tiny models are shared
    with torch.no_grad():
        vlm.base.lm_head.weight.mul_(30.0)  # sharp enough that the direction shows
    encoded = encode_questions(vlm, MEMORY.build(["letters"], count=3))
    few = vlm.with_method("uniform_grid", keep=2)
    _, measured = evaluate(vlm, encoded, [Measurement("uniform_grid", 2, 0, few.method)], batch_size=1)

    def log_probs(model: PrunedVLM, question: Any) -> torch.Tensor:
        with first_logits(model) as first:
            model.generate(list(question.images), question.prompt, max_new_tokens=1, do_sample=False)
        return first[0].log_softmax(-1)[0]

    pairs = [(log_probs(vlm, question), log_probs(few, question)) for question in encoded.asked]
    expected = [(full.exp() * (full - own)).sum().item() for full, own in pairs]
    reverse = [(own.exp() * (own - full)).sum().item() for full, own in pairs]
    assert measured.values["first_token_kl"] == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert all(abs(one - other) > 0.01 * one for one, other in zip(expected, reverse, strict=True))


def test_the_noise_of_a_throttled_picture_follows_from_its_own_pixels() -> None:
    vlm = pruned("llava", "diffprune", 4)
    vlm.method.start_training()
    batch = vlm.prepare([[tiny.picture(1)], [tiny.picture(2)]], ["what?", "what?"])
    tokens = vlm.encode(batch)
    assert tokens is not None

    def embeds(*seeds: int) -> torch.Tensor:
        lm = throttled_inputs(vlm, batch, replace(tokens, seeds=seeds), 4, Throttle(tau=1.0))
        return lm.inputs_embeds.detach()

    before, after = embeds(3, 8), embeds(3, 9)
    assert torch.equal(before[0], after[0]) and not torch.allclose(before[1], after[1])
    assert torch.equal(embeds(8, 3)[1], embeds(9, 3)[1])


def test_questions_of_text_alone_are_answered_too() -> None:
    vlm = pruned("llava")
    task = MEMORY.build(["words"], count=4).tasks[0]
    from diffprune.evaluate.sources import Questions

    text_alone = Questions((replace(task, questions=[one for one in task.questions if not one.images]),))
    encoded = encode_questions(vlm, text_alone)
    assert encoded.pictures is None
    said = answer(vlm.with_method("random", keep=2), encoded, keep=2, max_new_tokens=3)
    assert said == [vlm.generate(None, prompt, max_new_tokens=3, do_sample=False) for prompt in encoded.prompts]


@pytest.mark.parametrize("keep", [3, 0.333])
def test_a_share_is_taken_of_each_picture_s_own_tokens(keep: int | float) -> None:
    vlm = pruned("qwen2_5_vl", "random")
    tokens = encode_questions(vlm, MEMORY.build(["letters"], count=3)).tokens
    counts = tokens.counts.tolist()
    assert len(set(counts)) > 1  # ragged
    chosen = choose(vlm, tokens, keep=keep, batch_size=2)
    assert chosen is not None
    assert (chosen >= 0).sum(-1).tolist() == [3 if keep == 3 else int(0.333 * count + 0.5) for count in counts]


def test_rows_are_scored_by_task_and_kept_with_their_questions(tmp_path) -> None:
    model, processor = tiny.always_says("A")
    vlm = PrunedVLM(model, processor)
    encoded = encode_questions(vlm, MEMORY.build(["letters", "words"], count=4), needs=frozenset({"cls_attention"}))
    reported: list[tuple[str, int, int]] = []
    planned = [Measurement("random", 4, seed, vlm.with_method("random", seed=seed).method) for seed in (0, 1)]
    planned.append(Measurement("cut", 4, 0, vlm.with_method("hidden_norm", layer=1).method))
    answers = evaluate(vlm, encoded, planned, progress=lambda *state: reported.append(state))
    assert {said for one in answers for said in one.said} == {"A"}
    assert reported[-1] == ("answer", 4 * len(encoded.prompts), 4 * len(encoded.prompts))
    assert all(math.isfinite(one.seconds) and one.seconds > 0 for one in answers)
    rows = quality_rows(answers, answers[0])
    check_rows(rows)
    by_task = {(row["method"], row["seed"], row["task"]): row for row in rows if "task" in row}
    assert len(by_task) == 4 * 2 and by_task["full", 0, "letters"]["score"] == 50.0
    lengths = [
        int(vlm.prepare([list(one.images)], [one.prompt]).features["attention_mask"].sum()) for one in encoded.asked
    ]
    shown = [len(one.images) for one in encoded.asked]  # 16 tokens each, of which random choice keeps 4
    for task, some in (("letters", slice(0, 4)), ("words", slice(4, 8))):
        whole, dropped = sum(lengths[some]) / 4, sum(shown[some]) / 4 * 12
        assert by_task["full", 0, task]["prompt_tokens"] == by_task["cut", 0, task]["prompt_tokens"] == whole
        assert by_task["random", 1, task]["prompt_tokens"] == whole - dropped
    summaries = [row for row in rows if "retention" in row]
    assert summaries[0]["prompt_tokens"] == sum(lengths) / 8
    assert [(row["method"], row["n_seeds"]) for row in summaries] == [("full", 1), ("random", 2), ("cut", 1)]
    for row in summaries:  # `words`, where nothing is right, is left out
        assert row["retention"] == pytest.approx(100.0) and row["unchanged"] == 1.0
    # A picture has 16 tokens in the first layer and 4 in the two others; five prompts have one, two have two.
    assert [one.average for one in answers] == [None, None, None, (16 + 4 + 4) / 3 * (5 + 2 * 2) / 8]
    write_sheet(tmp_path / "answers.json", make_sheet(encoded.questions, answers))
    again = read_sheet(tmp_path / "answers.json")
    assert [question["prompt"] for question in again.questions] == encoded.prompts
    assert [one.average for one in again.answers] == [one.average for one in answers]
    assert [one.said for one in again.answers] == [one.said for one in answers]
    assert quality_rows(again.answers, again.answers[0]) == rows  # of each task its own means
