"""A smaller picture as a control, the questions it gets wrong, and how far first tokens are from the full model's."""

from pathlib import Path

import pytest
import torch

from diffprune.evaluate import files
from diffprune.evaluate.answers import Answers, Entry
from diffprune.evaluate.downscale import DOWNSCALE, require_forms, shrink, shrunk_questions, unreached
from diffprune.evaluate.encoded import encode_questions
from diffprune.evaluate.files import read_questions
from diffprune.evaluate.hard import hard_rows
from diffprune.evaluate.pruners import takes_weights
from diffprune.evaluate.runner import Measurement, evaluate
from diffprune.evaluate.sources import Questions
from diffprune.model import PrunedVLM
from tests import tiny
from tests.evaluate.memory import MEMORY, PICTURES
from tests.evaluate.own_questions import write_jsonl

FAMILIES = ["qwen2_5_vl", "llava_next", "llava_onevision", "internvl", "idefics3", "smolvlm"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_form_has_the_tokens_that_it_says(family: str) -> None:
    """Counted by the family's own rule, and by encoding the picture in that form."""
    vlm = PrunedVLM(*tiny.build(family))
    encoded = encode_questions(vlm, MEMORY.build(["letters"], count=3))
    full = encoded.tokens.counts.tolist()
    forms = [list(vlm.backbone.forms(picture.size)) for picture in PICTURES]
    assert [of_picture[0].num_visual for of_picture in forms] == full
    least = [min(form.num_visual for form in of_picture) for of_picture in forms]
    assert min(few / many for few, many in zip(least, full, strict=True)) < 1, "some picture can be made smaller"
    keep = max(max(least) / min(full), 0.6)
    assert not unreached(vlm, encoded.questions, [keep])
    smaller = shrunk_questions(vlm, encoded, keep, batch_size=2)
    chosen = [shrink(vlm, picture.size, keep) for picture in PICTURES]
    assert smaller.tokens.counts.tolist() == [form.num_visual for form in chosen if form is not None]
    assert all(few <= vlm.budget_of(keep).count(many) for few, many in zip(smaller.tokens.counts, full, strict=True))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava_next", "llava_onevision"])
def test_a_strip_has_no_form_that_rounding_makes_a_line(family: str) -> None:
    forms = list(PrunedVLM(*tiny.build(family)).backbone.forms((3000, 20)))
    assert len(forms) > 1 and all(max(form.size) <= 200 * min(form.size) for form in forms)


@pytest.mark.parametrize("family", ["llava", "paligemma"])
def test_a_family_of_one_size_is_told_so(family: str) -> None:
    with pytest.raises(ValueError, match=f"the {family} family scales every picture to one size"):
        require_forms(PrunedVLM(*tiny.build(family)))


def test_a_budget_below_the_smallest_form_has_no_row_and_a_sentence() -> None:
    vlm = PrunedVLM(*tiny.build("llava_next"))
    said = unreached(vlm, MEMORY.build(["letters"], count=3), [0.9999, 1])
    assert "downscale has no row at keep=1: a picture of 5" in said[1] and "tokens in llava_next" in said[1]


def test_no_picture_is_decoded_before_it_is_asked_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    questions = read_questions(write_jsonl(tmp_path, 8))
    monkeypatch.setattr(files, "open_image", lambda _: pytest.fail("decoded"))
    assert 1 in unreached(PrunedVLM(*tiny.build("llava_next")), questions, [0.9999, 1])


def test_one_decoded_picture_is_in_memory_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    vlm = PrunedVLM(*tiny.build("qwen2_5_vl"))
    encoded, together = encode_questions(vlm, MEMORY.build(["letters"], count=3)), []
    opens = Questions.open
    monkeypatch.setattr(Questions, "open", lambda self, images: together.append(len(images)) or opens(self, images))
    shrunk_questions(vlm, encoded, 0.6, batch_size=2)
    assert set(together) == {1}


def test_the_smaller_picture_is_answered_as_generate_answers_it() -> None:
    vlm = PrunedVLM(*tiny.build("qwen2_5_vl"))
    encoded = encode_questions(vlm, MEMORY.build(["letters"], count=1))
    counts = [form.num_visual for form in vlm.backbone.forms(PICTURES[0].size)]
    keep = min(counts) / counts[0]
    assert keep < 1
    one = Measurement(DOWNSCALE, keep, 0, vlm.method, shrunk=True)
    full, smaller = evaluate(vlm, encoded, [one], max_new_tokens=3)
    expected = []
    for question in encoded.asked:
        form = shrink(vlm, question.images[0].size, keep)
        assert form is not None
        picture = question.images[0].resize(form.size, 3)  # bicubic
        expected.append(vlm.generate([picture], question.prompt, max_new_tokens=3, do_sample=False))
    assert smaller.said == expected and min(smaller.values["first_token_kl"]) > 0
    assert smaller.more_keys["num_kept"] < full.more_keys["num_kept"]


@pytest.mark.parametrize(("method", "keep"), [("divprune", 4), ("fastv", 0.5)])
def test_the_first_token_is_compared_with_the_full_model_s(method: str, keep: int | float) -> None:
    """The divergence by hand from `vlm.logits`, where a method drops before the language model."""
    vlm = PrunedVLM(*tiny.build("llava"))
    encoded = encode_questions(vlm, MEMORY.build(["letters"], count=3), needs=frozenset({"cls_attention"}))
    pruned = vlm.with_method(method, keep=keep)
    full, own = evaluate(vlm, encoded, [Measurement(method, keep, 0, pruned.method)], max_new_tokens=2)
    assert full.values["first_token_kl"] == [0.0] * 3 and full.values["first_token_same"] == [1.0] * 3
    kl = own.values["first_token_kl"]
    assert all(value is not None and value > 0 for value in kl)
    for place, question in enumerate(encoded.asked if not pruned.method.is_inside else ()):
        batch = vlm.prepare([list(question.images)], [question.prompt])
        theirs, ours = (one.logits(batch)[0][0, -1].double().log_softmax(-1) for one in (vlm, pruned))
        assert kl[place] == pytest.approx(float((theirs.exp() * (theirs - ours)).sum()), abs=1e-4)
        assert own.values["first_token_same"][place] == float(torch.equal(theirs.argmax(), ours.argmax()))


def marked(method: str, right: str, seed: int = 0) -> Answers:
    units = [100.0 * int(mark) for mark in right]
    score = {"a": sum(units) / len(units)}
    return Answers(Entry(method, 1.0 if method == "full" else 8, seed), list(right), score, score, {"a": units})


def test_hard_questions_are_right_with_the_full_model_and_wrong_with_the_smaller_picture() -> None:
    full, smaller = marked("full", "1" * 80 + "0" * 20), marked(DOWNSCALE, "0" * 60 + "1" * 40)
    ours = [marked("diffprune", "1" * 45 + "0" * 55), marked("diffprune", "1" * 45 + "0" * 55, seed=1)]
    runs = [full, smaller, *ours, marked("random", "0" * 100)]
    origins = {("diffprune", 8, seed): {"recipe": "bridge", "choice": "diverse"} for seed in (0, 1)}
    rows, few = hard_rows(runs, versus="diffprune", origins=origins)
    assert not few and [row["method"] for row in rows] == ["diffprune", "random"]  # downscale has none
    assert rows[0]["retention"] == 75.0 and rows[0]["num_hard"] == 60 and rows[0]["n_seeds"] == 2
    assert (rows[0]["recipe"], rows[0]["choice"], rows[0]["ci_over"]) == ("bridge", "diverse", "seeds and questions")
    assert rows[1]["retention"] == 0.0 and rows[1]["lead"] == 75.0 and rows[1]["versus"] == "diffprune"
    assert rows[1]["lead_holds"] and "recipe" not in rows[1]
    low, high = rows[0]["ci95"]
    assert 50 < low < 75 < high < 100


def test_seeds_that_differ_widen_the_interval_of_hard_questions() -> None:
    full, smaller = marked("full", "1" * 100), marked(DOWNSCALE, "0" * 100)

    def width(second: str) -> float:
        rows, _ = hard_rows([full, smaller, marked("a", "1" * 50 + "0" * 50), marked("a", second, seed=1)])
        low, high = rows[0]["ci95"]
        return high - low

    assert width("1" * 80 + "0" * 20) > 3 * width("1" * 50 + "0" * 50)


def test_too_few_hard_questions_are_told_instead_of_a_percentage() -> None:
    full, smaller = marked("full", "1" * 49 + "0" * 51), marked(DOWNSCALE, "0" * 100)
    rows, few = hard_rows([full, smaller, marked("random", "1" * 100)])
    assert rows == [] and few == ["49 questions are hard at keep=8, too few for a percentage (below 50)"]
    with pytest.raises(ValueError, match="downscale has wrong, and it is not among the methods"):
        hard_rows([full])


def test_a_saved_scorer_is_not_asked_for_a_smaller_picture() -> None:
    scorer = PrunedVLM(*tiny.build("llava"), method="diffprune", keep=4).method
    assert not takes_weights(DOWNSCALE, scorer) and takes_weights("diffprune-diverse", scorer)
