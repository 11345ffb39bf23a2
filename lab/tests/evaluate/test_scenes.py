"""The scenes tasks through the runner: what is measured is what `generate` would say, scored and summed up."""

import json
import math

import pytest
import torch

from diffprune.evaluate.answers import read_sheet, write_sheet
from diffprune.evaluate.encoded import EncodedQuestions, encode_questions
from diffprune.evaluate.rows import quality_rows
from diffprune.evaluate.runner import Measurement, answer, choose, evaluate
from diffprune.evaluate.scoring import make_sheet, score_answers
from diffprune.evaluate.sources import find_tasks
from diffprune.evaluate.throttled import Throttle
from diffprune.methods.options import build_method
from diffprune.model import PrunedVLM
from diffprune.results import check_rows
from diffprune_lab.scenes import make_scene, pack, render
from diffprune_lab.scenes.encode import encode_scenes, to_images
from diffprune_lab.scenes.source import SCENES_TASKS
from diffprune_lab.scenes.tasks import TASKS
from lab.tests import tiny_scenes

SOME = ("gqa", "mmbench", "mme", "textvqa")


@pytest.fixture(scope="module")
def encoded() -> EncodedQuestions:
    questions = SCENES_TASKS.build(SOME, count=2)
    return encode_questions(tiny_scenes.pruned(), questions, needs=frozenset({"cls_attention", "text"}), batch_size=3)


def pictures_of(encoded: EncodedQuestions) -> list:
    images = to_images(render(pack(encoded.images)))
    return [images[row] for (row,) in encoded.rows]


def test_a_picture_is_encoded_as_its_processor_would_have_it() -> None:
    vlm = tiny_scenes.pruned("cls_attention")
    scenes = [make_scene("test", index) for index in range(3)]
    images = to_images(render(pack(scenes)))
    ours = encode_scenes(vlm, scenes, frozenset({"cls_attention"})).tokens
    theirs = vlm.encode(vlm.prepare(images, ["what?"] * 3))
    assert theirs is not None and theirs.cls_attention is not None and ours.cls_attention is not None
    assert ours.seeds == theirs.seeds and ours.grid == theirs.grid
    torch.testing.assert_close(ours.x, theirs.x)
    torch.testing.assert_close(ours.cls_attention, theirs.cls_attention)
    torch.testing.assert_close(ours.boxes, theirs.boxes)


def test_each_picture_is_held_once_and_every_question_asked(encoded: EncodedQuestions) -> None:
    assert len(set(encoded.images)) == len(encoded.images) == len(encoded.tokens)
    assert [encoded.images[row] for (row,) in encoded.rows] == [question.images[0] for question in encoded.asked]
    assert len(encoded.prompts) == 2 + 4 * 2 + 2 * 2 + 2  # rotations of MMBench, pairs of MME
    assert len(encoded.images) < len(encoded.prompts)


@pytest.mark.parametrize(
    ("method", "keep"),
    [("full", 1.0), ("random", 9), ("cls_attention", 0.1111), ("uniform_grid", 1), ("diffprune", 5), ("oracle", 6)],
)
def test_answers_are_those_of_generate(encoded: EncodedQuestions, method: str, keep: int | float) -> None:
    """Encoding, choosing and padding once for many prompts changes no answer."""
    torch.manual_seed(0)
    vlm = tiny_scenes.pruned(encoded.oracle() if method == "oracle" else method, keep)
    if method == "diffprune":
        torch.nn.init.normal_(vlm.method.scorer.head.weight)  # it starts with all logits equal
    ours = answer(vlm, encoded, keep=keep, batch_size=5, max_new_tokens=4)
    theirs = [
        vlm.generate([image], prompt, keep=keep, max_new_tokens=4, do_sample=False)
        for image, prompt in zip(pictures_of(encoded), encoded.prompts, strict=True)
    ]
    assert ours == theirs
    assert len(set(ours)) > 1  # the tiny model does look


def test_blind_answers_are_those_of_generate_without_a_picture(encoded: EncodedQuestions) -> None:
    vlm = tiny_scenes.pruned()
    ours = answer(vlm, encoded, keep=1.0, blind=True, batch_size=5, max_new_tokens=4)
    assert ours == [vlm.generate(None, prompt, max_new_tokens=4, do_sample=False) for prompt in encoded.prompts]


def test_a_method_that_reads_the_prompt_chooses_for_each_prompt(encoded: EncodedQuestions) -> None:
    class FirstWord(type(build_method("random"))):
        """Keeps tokens in an order drawn from the prompt's embeddings."""

        needs = frozenset({"text"})

        def score(self, tokens):
            assert tokens.text is not None
            return tokens.text.sum((1, 2))[:, None] * torch.arange(tokens.x.shape[1]).cos()

    vlm = tiny_scenes.pruned(FirstWord(), keep=4)
    assert choose(vlm, encoded.tokens, keep=4) is None
    assert len(answer(vlm, encoded, keep=4, max_new_tokens=2)) == len(encoded.prompts)


def test_throttling_that_weakens_nothing_answers_like_the_full_model(encoded: EncodedQuestions) -> None:
    torch.manual_seed(0)
    vlm = tiny_scenes.pruned("diffprune", attention="none")
    full = answer(tiny_scenes.pruned(), encoded, keep=1.0, max_new_tokens=2)
    assert answer(vlm, encoded, keep=1.0, throttle=Throttle(tau=0.1), max_new_tokens=2) == full
    drowned = answer(vlm, encoded, keep=1, throttle=Throttle(tau=0.1), max_new_tokens=2)
    assert drowned != full


def test_throttled_answers_are_the_same_in_any_batch(encoded: EncodedQuestions) -> None:
    torch.manual_seed(0)
    vlm = tiny_scenes.pruned("diffprune")
    torch.nn.init.normal_(vlm.method.scorer.head.weight)
    throttle = Throttle(tau=0.1, remove_below=1e-3)
    several, one = (
        answer(vlm, encoded, keep=6, throttle=throttle, batch_size=size, max_new_tokens=2) for size in (5, 1)
    )
    assert several == one


def test_each_budget_is_spent_exactly(encoded: EncodedQuestions) -> None:
    for keep, wanted in ((7, 7), (0.25, 9), (100, 36)):
        chosen = choose(tiny_scenes.pruned("random"), encoded.tokens, keep=keep, batch_size=2)
        assert chosen is not None and chosen.shape == (len(encoded.tokens), wanted)
        assert (chosen.diff(dim=1) > 0).all() and (chosen >= 0).all()


def test_rows_of_a_run_carry_the_contract_s_keys(encoded: EncodedQuestions) -> None:
    model, processor = tiny_scenes.always_says("yes")
    vlm = PrunedVLM(model, processor)
    yes = encode_questions(vlm, SCENES_TASKS.build(("pope", "mme", "textvqa"), count=6))
    reported: list[tuple[str, int, int]] = []
    runs = [Measurement("random", 4, seed, build_method("random", seed=seed)) for seed in (0, 1)]
    answers = evaluate(vlm, yes, runs, progress=lambda *state: reported.append(state))
    assert {said for one in answers for said in one.said} == {"yes"}
    rows = quality_rows(answers, answers[0])
    check_rows(rows)
    by_task = {(row["method"], row["seed"], row["task"]): row for row in rows if "task" in row}
    assert len(by_task) == 3 * 3
    assert by_task["full", 0, "scenes/pope"]["score"] == pytest.approx(200 / 3)  # F1 of always yes
    assert by_task["full", 0, "scenes/mme"]["score"] == pytest.approx(25.0)  # half of the questions, no pair
    assert by_task["full", 0, "scenes/mme"]["score_raw"] == pytest.approx(0.25 * 200 * 6)
    summaries = [row for row in rows if "retention" in row]
    assert [(row["method"], row["n_seeds"]) for row in summaries] == [("full", 1), ("random", 2)]
    for row in summaries:  # TextVQA, where nothing is right, is left out
        assert row["retention"] == pytest.approx(100.0) and row["unchanged"] == 1.0
        assert row["ci95"] == pytest.approx([100.0, 100.0])
    assert reported[-1] == ("answer", 3 * len(yes.prompts), 3 * len(yes.prompts))
    assert all(math.isfinite(one.seconds) and one.seconds > 0 for one in answers)


def test_the_average_over_layers_is_the_method_s_own_and_stays_with_the_answers(tmp_path) -> None:
    model, processor = tiny_scenes.always_says("yes")
    vlm = PrunedVLM(model, processor)
    yes = encode_questions(vlm, SCENES_TASKS.build(("pope",), count=2), needs=frozenset({"cls_attention"}))
    runs = [
        Measurement("cut", 0.25, 0, build_method("hidden_norm", layer=1)),
        Measurement("random", 9, 0, build_method("random")),
    ]
    answers = evaluate(vlm, yes, runs)
    assert [one.average for one in answers] == [None, (36 + 9) / 2, None]
    write_sheet(tmp_path / "answers.json", make_sheet(yes.questions, answers))
    again = read_sheet(tmp_path / "answers.json").answers
    assert [one.average for one in again] == [None, 22.5, None]
    assert {row["average"] for row in quality_rows(again, again[0]) if row["method"] == "cut"} == {22.5}
    assert not any("average" in row for row in quality_rows(again, again[0]) if row["method"] != "cut")


def test_a_model_that_has_nothing_right_gets_no_summary() -> None:
    model, processor = tiny_scenes.always_says("green")
    vlm = PrunedVLM(model, processor)
    answers = evaluate(vlm, encode_questions(vlm, SCENES_TASKS.build(("textvqa",), count=2)), [])
    assert not [row for row in quality_rows(answers, answers[0]) if "retention" in row]


def test_answers_are_kept_beside_their_questions(encoded: EncodedQuestions, tmp_path) -> None:
    vlm = tiny_scenes.pruned()
    said = answer(vlm, encoded, keep=1.0, max_new_tokens=2)
    scored = score_answers(encoded.tasks, Measurement("full", 1.0, 0, vlm.method), said)
    write_sheet(tmp_path / "answers.json", make_sheet(encoded.questions, [scored]))
    kept = json.loads((tmp_path / "answers.json").read_text())
    assert [question["prompt"] for question in kept["questions"]] == encoded.prompts
    assert kept["runs"][0]["said"] == said
    assert kept["notes"] == {"scenes/textvqa": "answers normalised as EvalAI does"}  # of the four the only open answers


def test_task_names_are_checked() -> None:
    assert find_tasks("scenes") == (SCENES_TASKS, tuple(f"scenes/{kind}" for kind in TASKS))
    assert find_tasks("scenes/pope,scenes/gqa,scenes/pope") == (SCENES_TASKS, ("scenes/pope", "scenes/gqa"))
    with pytest.raises(ValueError, match="there is no task 'popp'"):
        find_tasks("scenes/gqa,popp")
    with pytest.raises(ValueError, match="no task was named"):
        find_tasks("")
