"""Score pruning methods on the ten scenes tasks, all through the deployed path: encode, choose, drop, generate.

Pictures are encoded once and asked many questions; every method and budget answers the same ones. They may differ in
size, and then in their number of tokens. The tasks are stand-ins for the ten benchmarks, each with its own metric.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Int, Shaped
from torch import Tensor
from torch.nn import functional as F

from diffprune.backbones import decoder
from diffprune.backbones.base import Batch, with_needs
from diffprune.evaluate.answers import Answers, Entry, Sheet
from diffprune.methods.base import LayerPruner, MergingPruner, Pruner
from diffprune.model import PrunedVLM
from diffprune.types import LMInputs, VisualTokens
from diffprune_lab.scenes import Scene
from diffprune_lab.scenes.encode import NOT_HELD, Pictures, encode_scenes, own_sizes, pad_left, prompt_ids
from diffprune_lab.scenes.oracle import Oracle
from diffprune_lab.scenes.sizes import require_way
from diffprune_lab.scenes.tasks import TASKS, Task, build_task

Progress = Callable[[str, int, int], None]  # stage, how much of it is done, of how much
PromptBatches = list[tuple[list[int], Batch]]  # places of the prompts among all, and these prompts

PADDING = {"slots": -2, "segment": -1}  # what stands behind a row's last value, where it is not 0


@dataclass(frozen=True, slots=True)
class Throttle:
    """How training ran a pruner at its end: see `PrunedVLM.throttle`."""

    tau: float
    remove_below: float = 0.0


@dataclass(frozen=True, slots=True)
class Run(Entry):
    """One method at one budget: what chooses, and how it is listed.

    With `throttle` nothing is chosen: tokens are weakened as in training, with noise drawn from each picture's pixels.
    """

    pruner: Pruner
    throttle: Throttle | None = None


@dataclass(frozen=True, slots=True)
class Gallery:
    """Questions of several tasks, and each picture they are about encoded once.

    Attributes:
        picture: The row of `tokens` that prompt i is about.
        ids: The prompts as the model reads them, with the placeholders of their picture.
        features: Of each picture, as `Pictures` has them.
        sizes: The way pictures are sized.
    """

    tasks: tuple[Task, ...]
    tokens: VisualTokens
    prompts: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]
    picture: tuple[int, ...]
    scenes: tuple[Scene, ...]
    features: dict[str, Tensor]
    sizes: str

    def oracle(self) -> Oracle:
        """The pruner that knows these pictures."""
        assert self.tokens.seeds is not None
        return Oracle.of(zip(self.tokens.seeds, self.scenes, strict=True), self.sizes)


# Questions and pictures ----------------------------------------------------------------------------------------------


def scenes_tasks(names: str | Sequence[str]) -> tuple[str, ...]:
    """Task names from "scenes" (all ten) or a list of them."""
    wanted = [name for name in (names.split(",") if isinstance(names, str) else names) if name]
    found: list[str] = []
    for name in wanted:
        if name not in (*TASKS, "scenes"):
            raise ValueError(f"there is no task {name!r}; choose scenes (all ten) or from {', '.join(TASKS)}")
        found += [task for task in (TASKS if name == "scenes" else (name,)) if task not in found]
    if not found:
        raise ValueError(f"no task was named; choose scenes (all ten) or from {', '.join(TASKS)}")
    return tuple(found)


@torch.inference_mode()
def open_gallery(
    vlm: PrunedVLM,
    tasks: Sequence[str],
    *,
    split: str = "test",
    count: int = 500,
    sizes: str | None = None,
    needs: frozenset[str] = frozenset(),
    batch_size: int = 64,
    progress: Progress | None = None,
) -> Gallery:
    """Build the tasks and encode their pictures, with whatever the methods to come need.

    Args:
        count: Scored units of each task: questions, sets of four rotations (MMBench), pairs (MME).
        sizes: How pictures are sized (`scenes.sizes.WAYS`); the model's own way where left out.
        needs: Of all the methods that will be run.
    """
    sizes = own_sizes(vlm) if sizes is None else require_way(sizes)
    built = tuple(build_task(name, split, count) for name in tasks)
    rows: dict[Scene, int] = {}
    picture = tuple(rows.setdefault(question.scene, len(rows)) for task in built for question in task.questions)
    scenes = tuple(rows)
    chunks: list[Pictures] = []
    for start in range(0, len(scenes), batch_size):
        chunk = scenes[start : start + batch_size]
        chunks.append(encode_scenes(vlm, chunk, needs - NOT_HELD, sizes=sizes))
        if progress:
            progress("encode pictures", start + len(chunk), len(scenes))
    placeholders = [ids for chunk in chunks for ids in chunk.placeholders]
    prompts = tuple(question.prompt for task in built for question in task.questions)
    return Gallery(
        tasks=built,
        tokens=join([chunk.tokens for chunk in chunks]),
        prompts=prompts,
        ids=prompt_ids(vlm, prompts, [placeholders[row] for row in picture]),
        picture=picture,
        scenes=scenes,
        features={key: torch.cat([chunk.features[key] for chunk in chunks]) for key in chunks[0].features},
        sizes=sizes,
    )


def join(chunks: Sequence[VisualTokens]) -> VisualTokens:
    """Several batches as one, all padded to the most tokens a picture has."""
    first = chunks[0]
    changes: dict[str, Any] = {
        item.name: join_rows([getattr(chunk, item.name) for chunk in chunks], PADDING.get(item.name, 0))
        for item in fields(VisualTokens)
        if isinstance(getattr(first, item.name), Tensor) and item.name != "made_mask"
    }
    full = all(chunk.is_full for chunk in chunks) and len({chunk.x.shape[1] for chunk in chunks}) == 1
    return replace(
        first,
        grid=tuple(pair for chunk in chunks for pair in chunk.grid),
        seeds=tuple(seed for chunk in chunks for seed in chunk.seeds or ()),
        planes=tuple(join_rows(planes, 0) for planes in zip(*(chunk.planes for chunk in chunks), strict=True)),
        made_mask=changes["mask"] if full else None,
        **changes,
    )


def join_rows(parts: Sequence[Shaped[Tensor, "_ _ ..."]], value: int) -> Shaped[Tensor, "_ _ ..."]:
    """Rows of several tensors below each other, padded at the end to the longest."""
    width = max(part.shape[1] for part in parts)
    padded = [F.pad(part, (0, 0) * (part.ndim - 2) + (0, width - part.shape[1]), value=value) for part in parts]
    return torch.cat(padded)


# Answers -------------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def answer(
    vlm: PrunedVLM,
    gallery: Gallery,
    *,
    keep: int | float,
    blind: bool = False,
    throttle: Throttle | None = None,
    batch_size: int = 64,
    batches: PromptBatches | None = None,
    max_new_tokens: int = 8,
    progress: Progress | None = None,
) -> list[str]:
    """The model's answer to every prompt with `keep` tokens of its picture, or with no picture at all.

    With `throttle` the tokens are weakened as in training instead of dropped. `batches` are the gallery's prompts as
    `gallery_batches` gives them, for who asks them many times.
    """
    backbone = vlm.backbone
    if blind:
        batches = prompt_batches(vlm, prompt_ids(vlm, gallery.prompts, None), batch_size)
    elif batches is None:
        batches = gallery_batches(vlm, gallery, batch_size)
    chosen = None if blind or throttle else choose(vlm, gallery.tokens, keep=keep, batch_size=batch_size)
    answers = [""] * len(gallery.prompts)
    done = 0
    for asked, batch in batches:
        if blind:
            new = _generate(vlm, backbone.splice(batch, None, None, None), max_new_tokens)
        else:
            pictures = [gallery.picture[i] for i in asked]
            tokens = gallery.tokens.take(pictures)
            if chosen is not None:
                new = _generate(vlm, vlm.splice_kept(batch, tokens, chosen[pictures]), max_new_tokens)
            else:
                tokens = with_needs(backbone, batch, tokens, vlm.method.needs & NOT_HELD)
                if throttle is not None:
                    new = _generate(vlm, weaken(vlm, batch, tokens, keep, throttle), max_new_tokens)
                else:
                    new = _generate_by_prompt(vlm, batch, tokens, keep, max_new_tokens)
        for index, text in zip(asked, backbone.tokenizer.batch_decode(new, skip_special_tokens=True), strict=True):
            answers[index] = text.strip()
        done += len(asked)
        if progress:
            progress("answer", done, len(answers))
    return answers


def gallery_batches(vlm: PrunedVLM, gallery: Gallery, batch_size: int) -> PromptBatches:
    """The gallery's prompts in batches, each about its picture.

    Prompts with answers of like length go together: a batch is decoded until its last answer has ended.
    """
    answers = [" " + question.answer for task in gallery.tasks for question in task.questions]
    spelled = vlm.backbone.tokenizer(answers, add_special_tokens=False)["input_ids"]
    batches = []
    for asked, batch in prompt_batches(vlm, gallery.ids, batch_size, first_by=[len(ids) for ids in spelled]):
        pictures = [gallery.picture[index] for index in asked]
        features = batch.features | {key: value[pictures] for key, value in gallery.features.items()}
        batch = replace(batch, features=features, row_of_image=tuple(range(len(asked))))
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


def choose(
    vlm: PrunedVLM, tokens: VisualTokens, *, keep: int | float, batch_size: int = 64
) -> Int[Tensor, "B K"] | None:
    """The tokens kept of each picture, where the picture alone decides: then they are chosen once for all questions.

    None where the prompt has a say, where tokens are merged, and where they are dropped inside the language model.
    """
    method = vlm.method
    if isinstance(method, LayerPruner | MergingPruner) or "text" in method.needs:
        return None
    rows = range(len(tokens))
    kept = []
    for start in range(0, len(rows), batch_size):
        part = tokens.take(rows[start : start + batch_size])
        if "projected" in method.needs:
            part = replace(part, projected=vlm.backbone.project(part.x))
        kept.append(vlm.rule.select(part, vlm._counts(part, keep)))
    width = max(part.shape[1] for part in kept)
    return torch.cat([F.pad(part, (0, width - part.shape[1]), value=-1) for part in kept])


def weaken(vlm: PrunedVLM, batch: Batch, tokens: VisualTokens, keep: int | float, throttle: Throttle) -> LMInputs:
    """What the language model was given in training; a picture's noise follows from its pixels alone."""
    assert tokens.seeds is not None
    noise = [torch.Generator(tokens.x.device).manual_seed(seed) for seed in tokens.seeds]
    return vlm.throttle(
        batch, tokens, tau=throttle.tau, keep=keep, generator=noise, remove_below=throttle.remove_below
    )[0]


def _generate(vlm: PrunedVLM, lm: LMInputs, max_new_tokens: int) -> Int[Tensor, "B T"]:
    return vlm.backbone.generate(lm, max_new_tokens=max_new_tokens, do_sample=False)


def _generate_by_prompt(
    vlm: PrunedVLM, batch: Batch, tokens: VisualTokens, keep: int | float, max_new_tokens: int
) -> Int[Tensor, "B T"]:
    """Answers of methods that choose anew for each prompt."""
    if not isinstance(vlm.method, LayerPruner):
        return _generate(vlm, vlm.lm_inputs(batch, tokens, keep=keep), max_new_tokens)
    counts = vlm._prompt_counts(batch, tokens, keep)
    return decoder.generate(
        vlm.backbone, vlm.splice_all(batch, tokens), vlm.method, counts, max_new_tokens=max_new_tokens
    )


# Scores --------------------------------------------------------------------------------------------------------------


def visual_average(vlm: PrunedVLM, num_visual: Iterable[int]) -> float | None:
    """Visual tokens a decoder layer holds, mean over layers and prompts, by the method's own rule.

    None where a method drops tokens before the language model: then every layer holds those that are kept.

    Args:
        num_visual: Tokens of each prompt's pictures before any is dropped.
    """
    method = vlm.method
    if not isinstance(method, LayerPruner):
        return None
    times = Counter(num_visual)
    layers = len(vlm.backbone.language_model.layers)
    held = sum(many * method.average(layers, count, vlm.budget.count(count)) for count, many in times.items())
    return held / times.total()


def score_run(
    gallery: Gallery, run: Run, said: list[str], *, seconds: float = 0.0, average: float | None = None
) -> Answers:
    """Score the answers task by task."""
    start = 0
    score: dict[str, float] = {}
    raw: dict[str, float] = {}
    units: dict[str, list[float]] = {}
    for task in gallery.tasks:
        end = start + len(task.questions)
        result = task.score(said[start:end])
        score[task.name], raw[task.name], units[task.name] = result.score, result.raw, result.per_question
        start = end
    return Answers(run=run, said=said, score=score, raw=raw, units=units, seconds=seconds, average=average)


def evaluate(
    vlm: PrunedVLM,
    gallery: Gallery,
    runs: Iterable[Run],
    *,
    batch_size: int = 64,
    progress: Progress | None = None,
) -> list[Answers]:
    """Answer and score every run on the same questions; the first is the full model, which `vlm` must be."""
    assert vlm.method.name == "full", "answers are compared with the full model's"
    all_runs = [Run(method="full", keep=1.0, seed=0, pruner=vlm.method), *runs]
    done: list[Answers] = []
    batches = gallery_batches(vlm, gallery, batch_size)
    num_visual = gallery.tokens.counts[list(gallery.picture)].tolist()
    for run in all_runs:
        pruned = vlm.with_method(run.pruner, keep=run.keep)

        def told(stage: str, count: int, total: int) -> None:
            if progress:
                progress(stage, len(done) * total + count, len(all_runs) * total)

        start = time.perf_counter()
        said = answer(
            pruned,
            gallery,
            keep=run.keep,
            throttle=run.throttle,
            batch_size=batch_size,
            batches=batches,
            progress=told,
        )
        seconds = time.perf_counter() - start
        average = None if run.throttle else visual_average(pruned, num_visual)  # nothing is dropped in training
        done.append(score_run(gallery, run, said, seconds=seconds, average=average))
    return done


def make_sheet(gallery: Gallery, answers: Sequence[Answers]) -> Sheet:
    """The gallery's questions with what every run said to them."""
    questions = [
        {"id": question.id, "task": task.name, "prompt": question.prompt, "answer": question.answer}
        for task in gallery.tasks
        for question in task.questions
    ]
    return Sheet(questions, {task.name: task.chance for task in gallery.tasks}, list(answers))
