"""Conversations: the loss is on every answer, in the model's own template, and a single answer stays what it was."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from diffprune.backbones.prompts import IGNORE, Batch
from diffprune.config import BackboneConfig, BudgetConfig, DataConfig, RunConfig
from diffprune.inside import loop
from diffprune.methods.options import build_method
from diffprune.model import PrunedVLM
from diffprune.train.feed import Sample, prepare_pictures
from diffprune.train.objective import Objective
from diffprune.train.trainer import Trainer
from tests import tiny
from tests.contracts.vlm import splice_all
from tests.train import runs

FIRST, LATER = ("What is it?", "a cat"), (("Where?", "to the left"), ("Sure?", "yes"))
PICTURES = [tiny.picture(1, (40, 30)), tiny.picture(2, (40, 30))]


def vlm_of(family: str = "llava", method: str = "full", **options: object) -> PrunedVLM:
    model, processor = tiny.build(family)
    vlm = PrunedVLM(model, processor)
    made = build_method(method, block=vlm.backbone.block, language=vlm.backbone.language, **options)
    return PrunedVLM(model, processor, method=made, keep=4)


def talk(vlm: PrunedVLM, later: tuple[tuple[str, str], ...] = LATER) -> Batch:
    return vlm.prepare(PICTURES[:1], [FIRST[0]], [FIRST[1]], later=[later])


def said(vlm: PrunedVLM, ids: Tensor) -> str:
    text = vlm.backbone.tokenizer.decode(ids, skip_special_tokens=False)
    return text.replace(vlm.backbone.image_token, "")


def targets(batch: Batch) -> list[int]:
    assert batch.labels is not None
    return batch.labels[batch.labels != IGNORE].tolist()


@pytest.mark.parametrize("family", ["llava", "llava_next", "qwen2_5_vl", "internvl", "smolvlm"])
def test_every_answer_is_learnt_and_no_question(family: str) -> None:
    vlm = vlm_of(family)
    backbone = vlm.backbone
    answers = [FIRST[1], *(answer for _, answer in LATER)]
    batch = talk(vlm)
    assert targets(batch) == [token for answer in answers for token in backbone._answer_ids(answer)]
    whole, end = said(vlm, batch.features["input_ids"][0]), backbone.tokenizer.eos_token
    tail = whole[whole.index("assistant:") :].removeprefix("assistant:").lstrip(" ")
    assert tail == f"a cat{end}user: Where?assistant:  to the left{end}user: Sure?assistant:  yes{end}"


def test_a_template_s_own_end_of_turn_is_not_doubled() -> None:
    vlm = vlm_of()
    end = vlm.backbone.tokenizer.eos_token
    template = vlm.processor.chat_template
    vlm.processor.chat_template = template.replace("\n{% endfor %}", end + "\n{% endfor %}")
    try:
        assert vlm.backbone._between(["one?", "two?"]) == [f"\nuser: two?{end}\nassistant: "]
        vlm.processor.chat_template = template.replace("\n{% endfor %}", " {% endfor %}")  # LLaVA's: a space, no end
        assert vlm.backbone._between(["one?", "two?"]) == ["user: two? assistant: "]
    finally:
        vlm.processor.chat_template = template


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_the_loss_is_that_of_each_answer_after_all_that_was_said_before(family: str) -> None:
    vlm = vlm_of(family)
    backbone = vlm.backbone
    end = backbone.tokenizer.eos_token
    prompt = backbone._prompt(FIRST[0], 1, chat=True)
    total, count = torch.zeros(()), 0
    for answer, between in zip([FIRST[1], "to the left", "yes"], [*backbone._between([*"abc"]), ""], strict=True):
        alone = vlm.prepare(PICTURES[:1], [prompt], [answer], chat=False)
        number = len(targets(alone))
        total, count = total + vlm.loss(alone, hard=True) * number, count + number
        asked = "Where?" if answer == "a cat" else "Sure?"
        prompt += " " + answer + end + between.replace("b" if asked == "Where?" else "c", asked, 1)
    assert vlm.loss(talk(vlm), hard=True).item() == pytest.approx(float(total / count), rel=1e-4)


def test_single_answers_are_what_they_were() -> None:
    vlm = vlm_of()
    questions, answers = ["What is it?", "A longer question?"], ["a cat", "no"]
    one = vlm.prepare(PICTURES, questions, answers)
    same = prepare_pictures(vlm, [Sample(i, PICTURES[i], questions[i], answers[i]) for i in range(2)])
    assert same is not None and one.features.keys() == same.features.keys()
    assert all(torch.equal(one.features[key], same.features[key]) for key in one.features)
    assert torch.equal(one.labels, same.labels)
    behind = one.labels != IGNORE
    assert behind.sum(-1).tolist() == [len(vlm.backbone._answer_ids(answer)) for answer in answers]
    assert behind[:, -1].all()  # no target but in the tail


def test_talks_of_different_length_are_learnt_as_one_by_one() -> None:
    vlm = vlm_of("llava", "diffprune")
    samples = [Sample(0, PICTURES[0], *FIRST, later=LATER), Sample(1, PICTURES[1], "A question that is longer?", "no")]
    config = RunConfig(backbone=BackboneConfig(name="llava"), budget=BudgetConfig(keep=4), data=DataConfig(name="x"))
    objective = Objective(vlm, config, runs.Endless(config.data, config.seed))
    number = torch.tensor(10.0)
    losses = [float(objective(part, 0, 0.5, number)[0].detach()) for part in (samples, samples[:1], samples[1:])]
    assert losses[0] == pytest.approx(losses[1] + losses[2], rel=1e-4)


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_no_answer_is_among_the_text_that_methods_read(family: str) -> None:
    vlm = vlm_of(family)
    asked = vlm.prepare(PICTURES[:1], [FIRST[0]])
    expected = asked.features["input_ids"][vlm.backbone.text_embeddings(asked, [0])[1]]
    for later in ((), LATER):
        batch = talk(vlm, later)
        _, mask = vlm.backbone.text_embeddings(batch, [0])
        assert torch.equal(batch.features["input_ids"][mask], expected)


@pytest.mark.parametrize("method", ["fastv", "pyramiddrop"])
def test_later_questions_have_no_say_in_what_is_kept_inside_the_language_model(method: str) -> None:
    vlm = vlm_of("llava", method)
    found = []
    for later in ((), LATER):
        batch = talk(vlm, later)
        tokens = vlm.encode(batch)
        assert tokens is not None
        counts = vlm.prompt_counts(batch, vlm.counts(tokens))
        with torch.no_grad():
            lm = splice_all(vlm, batch, tokens)
            states, words, *_ = loop.dropped_states(vlm.backbone, lm, vlm.method, counts)
        found.append((states[words != IGNORE], words[words != IGNORE].tolist()))
    (first, short), (states, long) = found
    assert long[: len(short)] == short and len(long) > len(short)
    assert (states[: len(short)] - first).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("family", "later", "sentence"),
    [
        ("paligemma", LATER, "paligemma has no chat template, so a conversation of 3 questions cannot be laid out"),
        ("llava", (("see <image>?", "no"),), "a later question holds <image>; pictures belong to the first one"),
        ("llava", (("a\0b?", "no"),), "cannot lay out 2 questions in a row"),
    ],
)
def test_a_talk_that_cannot_be_laid_out_is_refused_in_one_sentence(family: str, later, sentence: str) -> None:
    vlm = vlm_of(family)
    text = vlm.backbone.placeholder_prompt(1) if family == "paligemma" else FIRST[0]
    with pytest.raises(ValueError, match=sentence):
        vlm.prepare(PICTURES[:1], [text], [FIRST[1]], later=[later])
    with pytest.raises(ValueError, match="2 later conversations for 1 prompts"):
        vlm.prepare(PICTURES[:1], [text], [FIRST[1]], later=[(), ()])


def test_a_run_counts_and_learns_all_answers() -> None:
    vlm = vlm_of()
    sample = Sample(0, PICTURES[0], *FIRST, later=LATER)
    assert sample.answers == ["a cat", "to the left", "yes"]
    batch = prepare_pictures(vlm, [sample])
    assert batch is not None and torch.equal(batch.labels, talk(vlm).labels)
    assert Trainer.count_targets(SimpleNamespace(vlm=vlm), sample) == len(targets(batch))  # type: ignore[arg-type]
