"""Answer questions by the deployed path (encode, choose, drop, generate) with every method and budget, and score them.

Pictures are encoded once and asked about many times; every method and budget answers the same questions. Pictures may
differ in size, and then in their number of tokens; a prompt has one, several or none.
"""

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from diffprune.backbones.base import with_needs
from diffprune.backbones.pictures import MADE_LATER, join_rows
from diffprune.backbones.prompts import Batch
from diffprune.evaluate.answers import Answers, Entry, Sheet
from diffprune.evaluate.pictures import (
    EncodedPictures,
    Ids,
    pad_left,
    prompt_ids,
    require_several,
)
from diffprune.evaluate.sources import Questions
from diffprune.evaluate.task import Question, Task
from diffprune.evaluate.throttled import Throttle
from diffprune.methods.base import Pruner, take
from diffprune.model import PrunedVLM
from diffprune.restriction import restrict
from diffprune.types import LMInputs, VisualTokens

Progress = Callable[[str, int, int], None]  # stage, how much of it is done, of how much
PromptBatches = list[tuple[list[int], Batch]]  # places of the prompts among all, and these prompts


@dataclass(frozen=True, slots=True)
class Measurement(Entry):
    """One method at one budget: what chooses, and how it is listed.

    With `throttle` tokens are throttled as in training, with noise drawn from each picture's pixels, and none dropped.
    With `blind` the prompts have no pictures.
    """

    pruner: Pruner
    throttle: Throttle | None = None
    blind: bool = False


# Questions and pictures ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EncodedQuestions:
    """Questions of several tasks, and each picture they are about encoded once.

    Attributes:
        images: The pictures, as the questions name them.
        pictures: These encoded; None where no question has any.
        rows: Of each prompt the rows of `pictures` that it is about.
        ids: The prompts as the model reads them, with the placeholders of their pictures.
    """

    questions: Questions
    images: tuple[Any, ...]
    pictures: EncodedPictures | None
    rows: tuple[tuple[int, ...], ...]
    ids: tuple[Ids, ...]

    @property
    def tasks(self) -> tuple[Task, ...]:
        return self.questions.tasks

    @property
    def asked(self) -> list[Question]:
        """Every question, task after task."""
        return [question for task in self.tasks for question in task.questions]

    @property
    def tokens(self) -> VisualTokens:
        """The visual tokens of the pictures."""
        assert self.pictures is not None, "no question has a picture"
        return self.pictures.tokens

    @property
    def prompts(self) -> list[str]:
        return [question.prompt for question in self.asked]

    def rows_of(self, prompts: Sequence[int]) -> list[int]:
        """The pictures of some prompts, one after the other."""
        return [row for index in prompts for row in self.rows[index]]

    def oracle(self) -> Pruner:
        """The pruner that knows these pictures, where their source does."""
        seeds = self.tokens.seeds
        assert seeds is not None
        return self.questions.oracle(self.images, seeds)


@torch.inference_mode()
def encode_questions(
    vlm: PrunedVLM,
    questions: Questions,
    *,
    needs: frozenset[str] = frozenset(),
    batch_size: int = 64,
    progress: Progress | None = None,
) -> EncodedQuestions:
    """Encode the pictures of questions, with whatever the methods to come need.

    Args:
        needs: Of all the methods that will be measured.
    """
    questions = questions.for_model(vlm)
    asked = [question for task in questions.tasks for question in task.questions]
    rows, images = _distinct(asked)
    if any(len(of_prompt) > 1 for of_prompt in rows):
        require_several(vlm)
    parts: list[EncodedPictures] = []
    for start in range(0, len(images), batch_size):
        part = images[start : start + batch_size]
        parts.append(questions.encode(vlm, part, needs - MADE_LATER))
        if progress:
            progress("encode pictures", start + len(part), len(images))
    pictures = EncodedPictures.join(parts) if parts else None
    placeholders = [[pictures.placeholders[row] for row in of_prompt] if pictures else [] for of_prompt in rows]
    ids = prompt_ids(vlm, [question.prompt for question in asked], placeholders)
    return EncodedQuestions(questions, images, pictures, rows, ids)


def _distinct(asked: Sequence[Question]) -> tuple[tuple[tuple[int, ...], ...], tuple[Any, ...]]:
    """The rows of each question's pictures, and the distinct pictures: equal ones, or one object, are one."""
    known: dict[Hashable, int] = {}
    images: list[Any] = []

    def row_of(image: Any) -> int:
        key = image if isinstance(image, Hashable) else id(image)  # pictures of PIL and arrays have no hash
        if key not in known:
            known[key] = len(images)
            images.append(image)
        return known[key]

    return tuple(tuple(map(row_of, question.images)) for question in asked), tuple(images)


def question_batches(vlm: PrunedVLM, encoded: EncodedQuestions, batch_size: int) -> PromptBatches:
    """All prompts in batches, each about its pictures.

    Prompts with answers of like length go together: a batch is decoded until its last answer has ended.
    """
    answers = [" " + question.answer for question in encoded.asked]
    spelled = vlm.backbone.tokenizer(answers, add_special_tokens=False)["input_ids"]
    batches = []
    for asked, batch in prompt_batches(vlm, encoded.ids, batch_size, first_by=[len(ids) for ids in spelled]):
        rows = encoded.rows_of(asked)
        if rows and encoded.pictures is not None:
            features = {key: value[rows] for key, value in encoded.pictures.features.items()}
            of_prompt = tuple(place for place, index in enumerate(asked) for _ in encoded.rows[index])
            batch = replace(batch, features=batch.features | features, row_of_image=of_prompt)
        batches.append((asked, replace(batch, positions=vlm.backbone.positions(batch))))
    return batches


def prompt_batches(
    vlm: PrunedVLM, ids: Sequence[Sequence[int]], batch_size: int, first_by: Sequence[int] | None = None
) -> PromptBatches:
    """Prompts in batches of like length, left-padded, each with the places of its prompts among all.

    Args:
        first_by: A number for each prompt by which they are ordered before their length.
    """
    device = vlm.base.get_input_embeddings().weight.device
    order = sorted(range(len(ids)), key=lambda index: (first_by[index] if first_by else 0, len(ids[index])))
    batches = []
    for start in range(0, len(order), batch_size):
        asked = order[start : start + batch_size]
        features = pad_left([ids[index] for index in asked], vlm.backbone.pad_id)
        batches.append((asked, Batch(features={key: value.to(device) for key, value in features.items()})))
    return batches


# Answers -------------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def answer(
    vlm: PrunedVLM,
    encoded: EncodedQuestions,
    *,
    keep: int | float,
    blind: bool = False,
    throttle: Throttle | None = None,
    batch_size: int = 64,
    batches: PromptBatches | None = None,
    max_new_tokens: int = 8,
    progress: Progress | None = None,
) -> list[str]:
    """The model's answer to every prompt with `keep` tokens of each of its pictures, or with no picture at all.

    With `throttle` the tokens are throttled as in training instead of dropped. `batches` are the prompts as
    `question_batches` gives them, for who asks them many times.
    """
    if blind:
        ids = prompt_ids(vlm, encoded.prompts, [()] * len(encoded.ids))
        batches = prompt_batches(vlm, ids, batch_size)
    elif batches is None:
        batches = question_batches(vlm, encoded, batch_size)
    chosen = None
    if encoded.pictures is not None and not blind and throttle is None:
        chosen = choose(vlm, encoded.tokens, keep=keep, batch_size=batch_size)
    answers = [""] * len(encoded.ids)
    done = 0
    for asked, batch in batches:
        rows = [] if blind else encoded.rows_of(asked)
        tokens = encoded.tokens.take(rows) if rows else None
        kept = None if chosen is None or not rows else chosen[rows]
        new = deployed_ids(vlm, batch, tokens, keep, kept=kept, throttle=throttle, max_new_tokens=max_new_tokens)
        texts = vlm.backbone.tokenizer.batch_decode(new, skip_special_tokens=True)
        for index, text in zip(asked, texts, strict=True):
            answers[index] = text.strip()
        done += len(asked)
        if progress:
            progress("answer", done, len(answers))
    return answers


def choose(
    vlm: PrunedVLM, tokens: VisualTokens, *, keep: int | float, batch_size: int = 64
) -> Int[Tensor, "B K"] | None:
    """The tokens kept of each picture, where the picture alone decides: then they are chosen once for all questions.

    None where the choice depends on the prompt, where tokens are merged, and for methods inside the language model.
    """
    method = vlm.method
    if method.is_inside or method.is_merging or "text" in method.needs:
        return None
    rows = range(len(tokens))
    kept = []
    for start in range(0, len(rows), batch_size):
        part = tokens.take(rows[start : start + batch_size])
        if "projected" in method.needs:
            part = replace(part, projected=vlm.backbone.project(part.x))
        kept.append(vlm.rule.deploy(part, vlm.counts(part, keep)).index)
    return join_rows(kept, -1)


def deployed_ids(
    vlm: PrunedVLM,
    batch: Batch,
    tokens: VisualTokens | None,
    keep: int | float,
    *,
    kept: Int[Tensor, "I K"] | None = None,
    throttle: Throttle | None = None,
    max_new_tokens: int,
) -> Int[Tensor, "B T"]:
    """New token ids of a batch whose pictures are encoded already: what `generate` gives after encoding them.

    Args:
        kept: What was chosen before; default: the method chooses now.
    """
    if tokens is not None and kept is None:
        tokens = with_needs(vlm.backbone, batch, tokens, vlm.method.needs & MADE_LATER)
    if tokens is not None and throttle is not None:
        lm = throttled_inputs(vlm, batch, tokens, keep, throttle)
    elif tokens is not None and kept is not None:
        lm = vlm.splice(batch, tokens, take(tokens, kept))
    else:
        lm = vlm.lm_inputs(batch, tokens, keep=keep)
    counts = vlm.prompt_counts(batch, vlm.counts(tokens, keep))
    return vlm.decoder.generate(lm, counts, max_new_tokens=max_new_tokens, do_sample=False)


def throttled_inputs(
    vlm: PrunedVLM, batch: Batch, tokens: VisualTokens, keep: int | float, throttle: Throttle
) -> LMInputs:
    """The language model's inputs as in training; a picture's noise follows from its pixels alone."""
    assert tokens.seeds is not None
    noise = [torch.Generator(tokens.x.device).manual_seed(seed) for seed in tokens.seeds]
    counts, step = vlm.counts(tokens, keep), {"tau": throttle.tau, "remove_below": throttle.remove_below}
    tokens, kept = restrict(vlm.rule, tokens, counts, generator=noise, **step)
    return vlm.splice(batch, tokens, kept)


# Scores --------------------------------------------------------------------------------------------------------------


def evaluate(
    vlm: PrunedVLM,
    encoded: EncodedQuestions,
    measurements: Iterable[Measurement],
    *,
    batch_size: int = 64,
    progress: Progress | None = None,
) -> list[Answers]:
    """Answer and score the questions with each measurement; the first is the full model, which `vlm` must be."""
    assert vlm.method.name == "full", "answers are compared with the full model's"
    everything = [Measurement(method="full", keep=1.0, seed=0, pruner=vlm.method), *measurements]
    done: list[Answers] = []
    batches = question_batches(vlm, encoded, batch_size)
    num_visual = encoded.tokens.counts.tolist() if encoded.pictures is not None else []
    of_prompts = [tuple(num_visual[row] for row in rows) for rows in encoded.rows]
    for one in everything:
        pruned = vlm.with_method(one.pruner, keep=one.keep)

        def report(stage: str, count: int, total: int) -> None:
            if progress:
                progress(stage, len(done) * total + count, len(everything) * total)

        start = time.perf_counter()
        said = answer(
            pruned,
            encoded,
            keep=one.keep,
            blind=one.blind,
            throttle=one.throttle,
            batch_size=batch_size,
            batches=batches,
            progress=report,
        )
        seconds = time.perf_counter() - start
        average = None if one.throttle else visual_average(pruned, of_prompts)  # nothing is dropped in training
        done.append(score_answers(encoded, one, said, seconds=seconds, average=average))
    return done


def visual_average(vlm: PrunedVLM, num_visual: Iterable[tuple[int, ...]]) -> float | None:
    """Visual tokens a decoder layer holds, mean over layers and prompts, by the method's own rule.

    None where a method drops tokens before the language model: then every layer holds those that are kept.

    Args:
        num_visual: For each prompt the tokens of its pictures before any is dropped.
    """
    method = vlm.method
    if not method.is_inside:
        return None
    times = Counter(num_visual)
    layers = len(vlm.backbone.language_model.layers)
    held = sum(
        many * method.average(layers, sum(counts), sum(map(vlm.budget.count, counts))) for counts, many in times.items()
    )
    return held / times.total()


def score_answers(
    encoded: EncodedQuestions, entry: Entry, said: list[str], *, seconds: float = 0.0, average: float | None = None
) -> Answers:
    """Score the answers task by task."""
    start = 0
    score: dict[str, float] = {}
    raw: dict[str, float] = {}
    units: dict[str, list[float]] = {}
    for task in encoded.tasks:
        end = start + len(task.questions)
        result = task.score(said[start:end])
        score[task.name], raw[task.name], units[task.name] = result.score, result.raw, result.per_question
        start = end
    return Answers(entry=entry, said=said, score=score, raw=raw, units=units, seconds=seconds, average=average)


def make_sheet(encoded: EncodedQuestions, answers: Sequence[Answers]) -> Sheet:
    """The questions with what every measurement answered to them."""
    questions = [
        {"id": question.id, "task": task.name, "prompt": question.prompt, "answer": question.answer}
        for task in encoded.tasks
        for question in task.questions
    ]
    notes = {task.name: task.metric.note for task in encoded.tasks if task.metric.note}
    return Sheet(questions, {task.name: task.chance for task in encoded.tasks}, list(answers), notes=notes)
