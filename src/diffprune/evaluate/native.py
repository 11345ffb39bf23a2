"""Score pruning methods on the ten scenes tasks, all through the deployed path: encode, choose, drop, generate.

Pictures are encoded once and asked many questions; every method and budget answers the same ones. The tasks are
stand-ins for the ten benchmarks, each with its benchmark's own metric.
"""

import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int, UInt8
from PIL import Image
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from diffprune.backbones import decoder
from diffprune.backbones.base import Batch, with_needs
from diffprune.backbones.images import pixel_seed
from diffprune.evaluate.retention import retention, retention_ci95
from diffprune.methods.base import LayerPruner, MergingPruner, Pruner
from diffprune.model import PrunedVLM
from diffprune.results import write_text
from diffprune.scenes import Scene, pack, render
from diffprune.scenes.oracle import Oracle
from diffprune.scenes.tasks import TASKS, Task, build_task
from diffprune.types import LMInputs, VisualTokens

Progress = Callable[[str, int, int], None]  # stage, how much of it is done, of how much

FROM_PROMPT = frozenset({"text", "projected"})  # what is made for each prompt, not once for each picture


@dataclass(frozen=True, slots=True)
class Run:
    """One method at one budget: what chooses, and how it is listed."""

    method: str
    keep: int | float
    seed: int
    pruner: Pruner


@dataclass(frozen=True, slots=True)
class Gallery:
    """Questions of several tasks, and each picture they are about encoded once.

    Attributes:
        picture: The row of `tokens` that prompt i is about.
        ids: The prompts as the model reads them, one placeholder for each visual token.
    """

    tasks: tuple[Task, ...]
    tokens: VisualTokens
    prompts: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]
    picture: tuple[int, ...]
    scenes: tuple[Scene, ...]

    def oracle(self) -> Oracle:
        """The pruner that knows these pictures."""
        assert self.tokens.seeds is not None
        return Oracle.of(zip(self.tokens.seeds, self.scenes, strict=True))


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
    needs: frozenset[str] = frozenset(),
    batch_size: int = 64,
    progress: Progress | None = None,
) -> Gallery:
    """Build the tasks and encode their pictures, with whatever the methods to come need.

    Args:
        count: Scored units of each task: questions, sets of four rotations (MMBench), pairs (MME).
        needs: Of all the methods that will be run.
    """
    built = tuple(build_task(name, split, count) for name in tasks)
    rows: dict[Scene, int] = {}
    picture = tuple(rows.setdefault(question.scene, len(rows)) for task in built for question in task.questions)
    scenes = tuple(rows)
    chunks: list[VisualTokens] = []
    for start in range(0, len(scenes), batch_size):
        chunk = scenes[start : start + batch_size]
        chunks.append(encode_scenes(vlm, chunk, needs - FROM_PROMPT))
        if progress:
            progress("encode pictures", start + len(chunk), len(scenes))
    tokens = join(chunks)
    prompts = tuple(question.prompt for task in built for question in task.questions)
    ids = prompt_ids(vlm, prompts, num_visual=tokens.x.shape[1])
    return Gallery(tasks=built, tokens=tokens, prompts=prompts, ids=ids, picture=picture, scenes=scenes)


def prompt_ids(vlm: PrunedVLM, prompts: Sequence[str], *, num_visual: int) -> tuple[tuple[int, ...], ...]:
    """Prompts as the model reads them, with `num_visual` placeholders for a picture, or without one where that is 0."""
    backbone = vlm.backbone
    texts = [backbone._prompt(prompt, 1 if num_visual else 0, chat=True) for prompt in prompts]
    image = backbone.image_token
    return tuple(
        map(tuple, backbone.tokenizer([text.replace(image, image * num_visual) for text in texts])["input_ids"])
    )


def encode_scenes(vlm: PrunedVLM, scenes: Sequence[Scene], needs: frozenset[str] = frozenset()) -> VisualTokens:
    """Visual tokens of scenes, drawn where the model runs; pixels are those the processor would give."""
    device = vlm.base.get_input_embeddings().weight.device
    pixels = render(pack(scenes), device)
    assert isinstance(pixels, Tensor)
    batch = Batch(
        features={"pixel_values": normalise(vlm.processor, pixels).to(vlm.base.dtype)},
        row_of_image=tuple(range(len(scenes))),
        sizes=((pixels.shape[-1], pixels.shape[-2]),) * len(scenes),
        seeds=tuple(pixel_seed(image) for image in to_images(pixels)),
    )
    return vlm.backbone.encode(batch, needs)


def to_images(pixels: UInt8[Tensor, "B 3 H W"]) -> list[Image.Image]:
    """The same as pictures of PIL."""
    return [Image.fromarray(image) for image in pixels.permute(0, 2, 3, 1).cpu().numpy()]


def normalise(processor: Any, pixels: UInt8[Tensor, "B 3 H W"]) -> Float[Tensor, "B 3 H W"]:
    """What the processor does to a picture that has the model's own size already."""
    image_processor = processor.image_processor
    mean, std = (
        torch.tensor(value, device=pixels.device)[:, None, None]
        for value in (image_processor.image_mean, image_processor.image_std)
    )
    return (pixels * image_processor.rescale_factor - mean) / std


def join(chunks: Sequence[VisualTokens]) -> VisualTokens:
    """Several batches of equally many tokens as one."""
    first = chunks[0]
    tensors = {
        name: torch.cat([getattr(chunk, name) for chunk in chunks])
        for name in ("x", "mask", "boxes", "cls_attention", "keys", "coords", "segment", "slots")
        if getattr(first, name) is not None
    }
    return replace(
        first,
        grid=tuple(pair for chunk in chunks for pair in chunk.grid),
        seeds=tuple(seed for chunk in chunks for seed in chunk.seeds or ()),
        **tensors,
    )


# Answers -------------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def answer(
    vlm: PrunedVLM,
    gallery: Gallery,
    *,
    keep: int | float,
    blind: bool = False,
    batch_size: int = 64,
    max_new_tokens: int = 8,
    progress: Progress | None = None,
) -> list[str]:
    """The model's answer to every prompt with `keep` tokens of its picture, or with no picture at all."""
    backbone, device = vlm.backbone, gallery.tokens.x.device
    ids = prompt_ids(vlm, gallery.prompts, num_visual=0) if blind else gallery.ids
    chosen = None if blind else choose(vlm, gallery.tokens, keep=keep, batch_size=batch_size)
    order = sorted(range(len(ids)), key=lambda index: len(ids[index]))  # prompts of like length share a batch
    answers = [""] * len(ids)
    for start in range(0, len(order), batch_size):
        asked = order[start : start + batch_size]
        padded = pad_sequence(
            [torch.tensor(ids[i]) for i in asked], batch_first=True, padding_value=-1, padding_side="left"
        )
        features = {
            "input_ids": padded.masked_fill(padded < 0, backbone.pad_id),
            "attention_mask": (padded >= 0).long(),
        }
        batch = Batch(
            features={key: value.to(device) for key, value in features.items()},
            row_of_image=() if blind else tuple(range(len(asked))),
        )
        if blind:
            new = _generate(vlm, backbone.splice(batch, None, None, None), max_new_tokens)
        else:
            pictures = [gallery.picture[i] for i in asked]
            tokens = gallery.tokens.take(pictures)
            if chosen is not None:
                new = _generate(vlm, vlm.splice_kept(batch, tokens, chosen[pictures]), max_new_tokens)
            else:
                tokens = with_needs(backbone, batch, tokens, vlm.method.needs & FROM_PROMPT)
                new = _generate_by_prompt(vlm, batch, tokens, keep, max_new_tokens)
        for index, text in zip(asked, backbone.tokenizer.batch_decode(new, skip_special_tokens=True), strict=True):
            answers[index] = text.strip()
        if progress:
            progress("answer", start + len(asked), len(order))
    return answers


def choose(
    vlm: PrunedVLM, tokens: VisualTokens, *, keep: int | float, batch_size: int = 64
) -> Int[Tensor, "B K"] | None:
    """The tokens kept of each picture, where the picture alone decides: then they are chosen once for all questions.

    None where the prompt has a say, where tokens are merged, and where they are dropped inside the language model.
    """
    method = vlm.method
    if isinstance(method, LayerPruner | MergingPruner) or method.needs & FROM_PROMPT:
        return None
    rows = range(len(tokens))
    parts = [tokens.take(rows[start : start + batch_size]) for start in range(0, len(rows), batch_size)]
    kept = [row for part in parts for row in vlm.rule.select(part, vlm._counts(part, keep))]
    return pad_sequence(kept, batch_first=True, padding_value=-1)


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


@dataclass(frozen=True, slots=True)
class Answers:
    """One run's answers, scored: by task the score, its own unit and the values of the scored questions.

    `seconds` is the time the answers took, the encoding of the pictures aside.
    """

    run: Run
    said: list[str]
    score: dict[str, float]
    raw: dict[str, float]
    units: dict[str, list[float]]
    seconds: float = 0.0


def score_run(gallery: Gallery, run: Run, said: list[str], *, seconds: float = 0.0) -> Answers:
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
    return Answers(run=run, said=said, score=score, raw=raw, units=units, seconds=seconds)


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
    for run in all_runs:
        pruned = vlm.with_method(run.pruner, keep=run.keep)

        def told(stage: str, count: int, total: int) -> None:
            if progress:
                progress(stage, len(done) * total + count, len(all_runs) * total)

        start = time.perf_counter()
        said = answer(pruned, gallery, keep=run.keep, batch_size=batch_size, progress=told)
        done.append(score_run(gallery, run, said, seconds=time.perf_counter() - start))
    return done


def quality_rows(answers: Sequence[Answers], full: Answers) -> list[dict[str, Any]]:
    """A row per method, budget, seed and task, then a summary row per method and budget.

    A task on which the full model has nothing right cannot say what is left of it: it is not in the summary.
    """
    rows: list[dict[str, Any]] = [
        {
            "method": one.run.method,
            "keep": one.run.keep,
            "seed": one.run.seed,
            "task": task,
            "score": one.score[task],
            "score_raw": one.raw[task],
            "full_score": full.score[task],
        }
        for one in answers
        for task in one.score
    ]
    groups: dict[tuple[str, int | float], list[Answers]] = {}
    for one in answers:
        groups.setdefault((one.run.method, one.run.keep), []).append(one)
    measured = [task for task, score in full.score.items() if score > 0]
    if not measured:
        return rows
    reference = {task: full.score[task] for task in measured}
    for (method, keep), same in groups.items():
        retained = [retention({task: one.score[task] for task in measured}, reference) for one in same]
        units = {
            task: [statistics.fmean(values) for values in zip(*(one.units[task] for one in same), strict=True)]
            for task in measured
        }
        equal = [a == b for one in same for a, b in zip(one.said, full.said, strict=True)]
        rows.append(
            {
                "method": method,
                "keep": keep,
                "retention": statistics.fmean(retained),
                "retention_std": statistics.stdev(retained) if len(retained) > 1 else 0.0,
                "ci95": list(retention_ci95(units, {task: full.units[task] for task in measured})),
                "n_seeds": len(same),
                "unchanged": statistics.fmean(equal),
            }
        )
    return rows


def save_answers(path: Path, gallery: Gallery, answers: Sequence[Answers]) -> None:
    """Every answer beside its question, so that differences can be looked at and tested."""
    questions = [
        {"id": question.id, "task": task.name, "prompt": question.prompt, "answer": question.answer}
        for task in gallery.tasks
        for question in task.questions
    ]
    said = [
        {"method": one.run.method, "keep": one.run.keep, "seed": one.run.seed, "said": one.said, "units": one.units}
        for one in answers
    ]
    write_text(path, json.dumps({"questions": questions, "runs": said}))
