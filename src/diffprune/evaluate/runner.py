"""Answer questions by the deployed path (encode, choose, drop, generate) with every method and budget, and score them.

Pictures are encoded once and asked about many times; every method and budget answers the same questions. Pictures may
differ in size, and then in their number of tokens; a prompt has one, several or none. What does not fit into memory is
taken part by part, and what was answered is written down batch by batch.
"""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diffprune.backbones.base import with_needs
from diffprune.backbones.pictures import MADE_LATER, join_rows
from diffprune.backbones.prompts import Batch
from diffprune.evaluate.answers import FIRST_TOKEN_KL, NUM_KEPT, Answers, Entry
from diffprune.evaluate.downscale import shrunk_questions
from diffprune.evaluate.encoded import (
    EncodedQuestions,
    Progress,
    PromptBatches,
    all_asked,
    encode_questions,
    parts_of,
    prompt_batch,
    question_batches,
    question_order,
)
from diffprune.evaluate.journal import Journal, Reply
from diffprune.evaluate.scoring import score_answers
from diffprune.evaluate.sources import Questions
from diffprune.evaluate.throttled import Throttle
from diffprune.methods.base import Pruner, take
from diffprune.model import PrunedVLM
from diffprune.restriction import restrict
from diffprune.types import LMInputs, VisualTokens

FULL = "full"
HELD = 512  # pictures in memory at a time


@dataclass(frozen=True, slots=True)
class Measurement(Entry):
    """One method at one budget: what chooses, and how it is listed.

    Attributes:
        throttle: Tokens are throttled as in training, with noise drawn from each picture's pixels, and none dropped.
        blind: The prompts have no pictures.
        oracle: The pruner is the one that the source of the questions makes for the pictures at hand.
        shrunk: Pictures are made smaller until they have `keep` tokens, and none is dropped.
        by: Who answers, where that is not the model that encodes: another copy of it, for studies.
    """

    pruner: Pruner
    throttle: Throttle | None = None
    blind: bool = False
    oracle: bool = False
    shrunk: bool = False
    by: PrunedVLM | None = None


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
) -> list[str]:
    """The model's answer to every prompt with `keep` tokens of each of its pictures, or with no picture at all.

    With `throttle` the tokens are throttled as in training instead of dropped. `batches` are the prompts as
    `question_batches` gives them, for who asks them many times.
    """
    if blind:
        encoded, batches = encoded.with_pictures(vlm, None), None
    chosen = None
    if encoded.pictures is not None and throttle is None:
        chosen = choose(vlm, encoded.tokens, keep=keep, batch_size=batch_size)
    answers = [""] * len(encoded.ids)
    for asked, batch in question_batches(vlm, encoded, batch_size) if batches is None else batches:
        rows = encoded.rows_of(asked)
        tokens = encoded.tokens.take(rows) if rows else None
        kept = None if chosen is None or not rows else chosen[rows]
        new, _ = deployed_ids(vlm, batch, tokens, keep, kept=kept, throttle=throttle, max_new_tokens=max_new_tokens)
        for index, text in zip(asked, spelled(vlm, new), strict=True):
            answers[index] = text
    return answers


def spelled(vlm: PrunedVLM, ids: Int[Tensor, "B T"]) -> list[str]:
    """New tokens as text."""
    return [text.strip() for text in vlm.backbone.tokenizer.batch_decode(ids, skip_special_tokens=True)]


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
) -> tuple[Int[Tensor, "B T"], list[float]]:
    """New token ids of a batch whose pictures are encoded already: what `generate` gives after encoding them.

    And how long each prompt was, the tokens that stay before the language model counted.

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
    ids = vlm.decoder.generate(lm, counts, max_new_tokens=max_new_tokens, do_sample=False)
    return ids, lm.attention_mask.sum(-1).double().tolist()


def throttled_inputs(
    vlm: PrunedVLM, batch: Batch, tokens: VisualTokens, keep: int | float, throttle: Throttle
) -> LMInputs:
    """The language model's inputs as in training; a picture's noise follows from its pixels alone."""
    assert tokens.seeds is not None
    noise = [torch.Generator(tokens.x.device).manual_seed(seed) for seed in tokens.seeds]
    counts, step = vlm.counts(tokens, keep), {"tau": throttle.tau, "remove_below": throttle.remove_below}
    tokens, kept = restrict(vlm.rule, tokens, counts, generator=noise, **step)
    return vlm.splice(batch, tokens, kept)


@contextmanager
def first_logits(vlm: PrunedVLM) -> Iterator[list[Tensor]]:
    """What the language model's head gives first, [B, V] in float32: the logits of the first new token.

    Read as they go by, so that no second prefill is run; the model is as it was afterwards.
    """
    found: list[Tensor] = []

    def read(module: torch.nn.Module, inputs: object, output: Tensor) -> None:
        if not found:
            found.append((output[:, -1] if output.ndim == 3 else output).float())

    handle = vlm.base.lm_head.register_forward_hook(read)
    try:
        yield found
    finally:
        handle.remove()


# Every measurement over one part -------------------------------------------------------------------------------------


@dataclass
class Run:
    """A measurement that is being made: the model it deploys, and what it has chosen of a part's pictures."""

    entry: Measurement
    vlm: PrunedVLM
    chosen: Int[Tensor, "I K"] | None = None
    view: EncodedQuestions | None = None
    seconds: float = 0.0

    def begin(self, encoded: EncodedQuestions, batch_size: int) -> None:
        """Turn to the pictures of another part."""
        one = self.entry
        if one.oracle:
            self.vlm = self.vlm.with_method(encoded.oracle())
        if one.blind:
            encoded = encoded.with_pictures(self.vlm, None)
        elif one.shrunk:
            encoded = shrunk_questions(self.vlm, encoded, one.keep, batch_size=batch_size)
        self.view, self.chosen = encoded, None
        if encoded.pictures is not None and one.throttle is None and not one.shrunk:
            self.chosen = choose(self.vlm, encoded.tokens, keep=one.keep, batch_size=batch_size)

    def reply(self, asked: Sequence[int], batch: Batch, max_new_tokens: int) -> tuple[Reply, Float[Tensor, "B V"]]:
        """What it says to some prompts and how long these were, and its first-token logits."""
        assert self.view is not None
        start, rows = time.perf_counter(), self.view.rows_of(asked)
        tokens = self.view.tokens.take(rows) if rows else None
        kept = None if self.chosen is None or not rows else self.chosen[rows]
        keep = 1.0 if self.entry.shrunk else self.entry.keep
        with first_logits(self.vlm) as first:
            new, lengths = deployed_ids(
                self.vlm, batch, tokens, keep, kept=kept, throttle=self.entry.throttle, max_new_tokens=max_new_tokens
            )
        said = spelled(self.vlm, new)
        self.seconds += time.perf_counter() - start
        return {"said": said, "prompt_tokens": lengths}, first[0]

    def num_kept(self, asked: Sequence[int]) -> list[float | None]:
        """Tokens that stay of a picture, mean over those of each prompt; None where there is no number."""
        assert self.view is not None
        if self.entry.throttle is not None:
            return [None] * len(asked)
        counts = self.view.num_visual
        count = (lambda n: n) if self.entry.shrunk else self.vlm.budget.count
        return [sum(map(count, counts[index])) / len(counts[index]) if counts[index] else None for index in asked]

    def averages(self, asked: Sequence[int]) -> list[float | None]:
        """Visual tokens a decoder layer holds for each prompt, mean over layers, by the method's own rule.

        None where tokens are dropped before the language model: then every layer holds those that are kept.
        """
        assert self.view is not None
        method = self.vlm.method
        if not method.is_inside or self.entry.throttle is not None:
            return [None] * len(asked)
        layers, counts = len(self.vlm.backbone.language_model.layers), self.view.num_visual
        return [
            method.average(layers, sum(counts[index]), sum(map(self.vlm.budget.count, counts[index])))
            for index in asked
        ]


def make_runs(vlm: PrunedVLM, measurements: Iterable[Measurement]) -> list[Run]:
    """The measurements with the full model before them, each with the model that it deploys."""
    assert vlm.method.name == FULL, "answers are compared with the full model's"
    everything = [Measurement(method=FULL, keep=1.0, seed=0, pruner=vlm.method), *measurements]
    return [Run(one, (one.by or vlm).with_method(one.pruner, keep=one.keep)) for one in everything]


@torch.inference_mode()
def answer_part(
    runs: Sequence[Run],
    encoded: EncodedQuestions,
    journal: Journal,
    *,
    places: Sequence[int] | None = None,
    batch_size: int = 64,
    max_new_tokens: int = 8,
    progress: Progress | None = None,
) -> None:
    """Ask every measurement the prompts that are not answered yet, batch by batch.

    Args:
        places: Of the prompts among those of all parts; default: there is one part.
    """
    vlm = runs[0].vlm
    among_all = list(range(len(encoded.ids))) if places is None else places
    for run in runs:
        run.begin(encoded, batch_size)
    order = question_order(vlm, encoded)
    for start in range(0, len(order), batch_size):
        open_ones = set(journal.missing([among_all[index] for index in order[start : start + batch_size]]))
        asked = [index for index in order[start : start + batch_size] if among_all[index] in open_ones]
        if not asked:
            continue
        batches: dict[int, Batch] = {}  # by view: most measurements share one
        full: Tensor | None = None
        replies: list[Reply] = []
        for number, run in enumerate(runs):
            assert run.view is not None
            if id(run.view) not in batches:
                batches[id(run.view)] = prompt_batch(vlm, run.view, asked)
            batch = batches[id(run.view)]
            reply, logits = run.reply(asked, batch, max_new_tokens)
            full = logits.log_softmax(-1) if full is None else full
            replies.append(reply | _measured(run, asked, logits, full))
            if progress:
                done = len(runs) * (len(journal.replies)) + (number + 1) * len(asked)
                progress("answer", done, len(runs) * journal.count)
        journal.add([among_all[index] for index in asked], replies)


def _measured(run: Run, asked: Sequence[int], logits: Tensor, full: Tensor) -> Reply:
    """What is written down of one measurement's answers to a batch besides what it said."""
    own = logits.log_softmax(-1)
    distance = (full.exp() * (full - own)).sum(-1).clamp_min(0.0)
    values: Reply = {
        FIRST_TOKEN_KL: [round(value, 6) if math.isfinite(value) else None for value in distance.tolist()],
        "first_token_same": [float(same) for same in (full.argmax(-1) == own.argmax(-1)).tolist()],
        NUM_KEPT: run.num_kept(asked),
        "average": run.averages(asked),
    }
    return {key: value for key, value in values.items() if any(one is not None for one in value)}


# Scores --------------------------------------------------------------------------------------------------------------


def evaluate(
    vlm: PrunedVLM,
    encoded: EncodedQuestions,
    measurements: Iterable[Measurement],
    *,
    batch_size: int = 64,
    max_new_tokens: int = 8,
    progress: Progress | None = None,
) -> list[Answers]:
    """Answer and score the questions with each measurement; the first is the full model, which `vlm` must be."""
    runs = make_runs(vlm, measurements)
    journal = Journal(None, {}, runs=len(runs), count=len(encoded.ids))
    answer_part(runs, encoded, journal, batch_size=batch_size, max_new_tokens=max_new_tokens, progress=progress)
    answers = collect(encoded.questions, [run.entry for run in runs], journal)
    return [replace(one, seconds=run.seconds) for one, run in zip(answers, runs, strict=True)]


def evaluate_questions(
    vlm: PrunedVLM,
    questions: Questions,
    measurements: Sequence[Measurement],
    journal: Journal,
    *,
    needs: frozenset[str] = frozenset(),
    held: int = HELD,
    batch_size: int = 64,
    max_new_tokens: int = 8,
    progress: Progress | None = None,
) -> list[Answers]:
    """As `encode_questions` and `evaluate`, part by part; what the journal holds already is not asked again.

    Args:
        held: Pictures in memory at a time.
        needs: Of all the methods.
    """
    questions = questions.for_model(vlm)
    asked = all_asked(questions)
    runs: list[Run] = []
    for places in parts_of(asked, held):
        if not journal.missing(places):
            continue
        runs = runs or make_runs(vlm, measurements)
        encoded = encode_questions(vlm, questions, needs=needs, batch_size=batch_size, places=places, progress=progress)
        answer_part(
            runs,
            encoded,
            journal,
            places=places,
            batch_size=batch_size,
            max_new_tokens=max_new_tokens,
            progress=progress,
        )
    full = Entry(FULL, 1.0, 0)
    return collect(questions, [full, *(Entry(one.method, one.keep, one.seed) for one in measurements)], journal)


def collect(questions: Questions, entries: Sequence[Entry], journal: Journal) -> list[Answers]:
    """The answers of a journal that has them all, scored."""
    found = []
    for number, entry in enumerate(entries):
        columns = {key: journal.column(number, key) for key in journal.keys(number)}
        found.append(score_answers(questions.tasks, entry, columns.pop("said"), values=columns))
    return found
