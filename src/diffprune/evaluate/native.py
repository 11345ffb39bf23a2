"""Score pruning methods on the ten scenes tasks, all through the deployed path: encode, choose, drop, generate.

Pictures are encoded once and asked many questions; every method and budget answers the same ones. The tasks are
stand-ins for the ten benchmarks, each with its benchmark's own metric.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from jaxtyping import Float, Int, UInt8
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from diffprune.backbones import decoder
from diffprune.backbones.base import Batch, with_needs
from diffprune.backbones.images import pixel_seed
from diffprune.evaluate.answers import Answers, Entry, Sheet
from diffprune.methods.base import LayerPruner, MergingPruner, Pruner
from diffprune.model import PrunedVLM
from diffprune.scenes import Scene, pack, render
from diffprune.scenes.oracle import Oracle
from diffprune.scenes.tasks import TASKS, Task, build_task
from diffprune.types import LMInputs, VisualTokens

Progress = Callable[[str, int, int], None]  # stage, how much of it is done, of how much
PromptBatches = list[tuple[list[int], Batch]]  # places of the prompts among all, and these prompts

FROM_PROMPT = frozenset({"text", "projected"})  # what is made for each prompt, not once for each picture


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


def encode_scenes(
    vlm: PrunedVLM, scenes: Sequence[Scene], needs: frozenset[str] = frozenset(), *, seeds: bool = True
) -> VisualTokens:
    """Visual tokens of scenes, drawn where the model runs; pixels are those the processor would give.

    Args:
        seeds: Also the number made from each picture's pixels, for which these are brought to the CPU.
    """
    device = vlm.base.get_input_embeddings().weight.device
    pixels = render(pack(scenes), device)
    assert isinstance(pixels, Tensor)
    batch = Batch(
        features={"pixel_values": normalise(vlm.processor, pixels).to(vlm.base.dtype)},
        row_of_image=tuple(range(len(scenes))),
        sizes=((pixels.shape[-1], pixels.shape[-2]),) * len(scenes),
        seeds=tuple(pixel_seed(image) for image in to_images(pixels)) if seeds else (),
    )
    tokens = vlm.backbone.encode(batch, needs)
    return tokens if seeds else replace(tokens, seeds=None)


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
    changes: dict[str, Any] = {
        item.name: torch.cat([getattr(chunk, item.name) for chunk in chunks])
        for item in fields(VisualTokens)
        if isinstance(getattr(first, item.name), Tensor)
    }
    if all(chunk.is_full for chunk in chunks):
        changes["made_mask"] = changes["mask"]
    return replace(
        first,
        grid=tuple(pair for chunk in chunks for pair in chunk.grid),
        seeds=tuple(seed for chunk in chunks for seed in chunk.seeds or ()),
        **changes,
    )


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
    `prompt_batches` gives them, for who asks them many times.
    """
    backbone = vlm.backbone
    if blind:
        ids = prompt_ids(vlm, gallery.prompts, num_visual=0)
        batches = prompt_batches(ids, batch_size, pad_id=backbone.pad_id, device=gallery.tokens.x.device, images=False)
    elif batches is None:
        batches = prompt_batches(gallery.ids, batch_size, pad_id=backbone.pad_id, device=gallery.tokens.x.device)
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
                tokens = with_needs(backbone, batch, tokens, vlm.method.needs & FROM_PROMPT)
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


def prompt_batches(
    ids: Sequence[Sequence[int]], batch_size: int, *, pad_id: int, device: torch.device, images: bool = True
) -> PromptBatches:
    """Prompts in batches of like length, left-padded, each with the places of its prompts among all."""
    order = sorted(range(len(ids)), key=lambda index: len(ids[index]))
    batches = []
    for start in range(0, len(order), batch_size):
        asked = order[start : start + batch_size]
        padded = pad_sequence(
            [torch.tensor(ids[i]) for i in asked], batch_first=True, padding_value=-1, padding_side="left"
        )
        features = {"input_ids": padded.masked_fill(padded < 0, pad_id), "attention_mask": (padded >= 0).long()}
        moved = {key: value.to(device) for key, value in features.items()}
        batches.append((asked, Batch(features=moved, row_of_image=tuple(range(len(asked))) if images else ())))
    return batches


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
    kept = [vlm.rule.select(part, vlm._counts(part, keep)) for part in parts]
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
    batches = prompt_batches(gallery.ids, batch_size, pad_id=vlm.backbone.pad_id, device=gallery.tokens.x.device)
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
        done.append(score_run(gallery, run, said, seconds=time.perf_counter() - start))
    return done


def make_sheet(gallery: Gallery, answers: Sequence[Answers]) -> Sheet:
    """The gallery's questions with what every run said to them."""
    questions = [
        {"id": question.id, "task": task.name, "prompt": question.prompt, "answer": question.answer}
        for task in gallery.tasks
        for question in task.questions
    ]
    return Sheet(questions, {task.name: task.chance for task in gallery.tasks}, list(answers))
