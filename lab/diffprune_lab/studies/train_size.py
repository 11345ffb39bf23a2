"""Training at the real size: memory, samples per second and share of the card's peak, on models with random weights.

    python -m diffprune_lab.studies.train_size --device cuda --out results/train_7b.json

Each model is built on the device with random weights and trained by the code of `diffprune train`: pictures read from
files, synthetic captions as answers, bfloat16, gradients through the frozen language model to scorer and throttler.
LLaVA-1.5-7B and Qwen2.5-VL-7B at batch 4, Qwen2.5-VL-32B at batch 1, each in every variant: `plain`; `compiled`
(`optim.compile`); `cached` (compiled, with the tower's features from `data.cache`); `checkpointing` (of gradients).
Every row is written as soon as it is there; `--seconds` bounds the whole; `--size tiny` runs the same on a CPU.

`step_ms` is the mean over all measured steps, so that `samples_s` is batch / `step_ms`; of it `wait_ms` were spent
waiting for the thread that reads and prepares the next samples. `median_ms` is the median step, which a few slow ones
do not move. As in a run, a GPU is one step behind the host: a step's time is that between two of the host's, and the
whole ends when the device is through. `prepare_s` is what compiling or filling the cache took. With `--kernels N` a
row also has the N `kernels` that a step spends most of its time in, and the places where it `waits` for the device.

`mfu` is the share of the card's bfloat16 peak (the datasheet's where `measure/gpus.py` has it, else that of one large
matrix product measured beside it) that the operations which the step cannot do without would take: the tower forward;
scorer and throttler forward and twice that backward (weights and activations); projector, language model and head (on
answer positions alone) forward and once that backward, as frozen weights have no gradient; attention products twice
that backward. Causal attention counts half. What gradient checkpointing computes again is not counted.
"""

import argparse
import gc
import json
import random
import statistics
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from PIL import Image

from diffprune.config import RunConfig, make_config
from diffprune.model import PrunedVLM
from diffprune.results import device_name, write_results
from diffprune.shapes import SHAPES, build, require_gpu
from diffprune.speed import flops
from diffprune.speed.gpus import GPUS, gpu_of_device
from diffprune.speed.measure import slowest_kernels
from diffprune.speed.timing import matrix_rate, synchronize
from diffprune.train.compiling import computing
from diffprune.train.step import Part, Taken
from diffprune.train.trainer import Trainer
from diffprune.train.watch import peak_memory_gb

WARM_UP = 3
LEAST = 10  # steps of a row, however late it is
VARIANTS = ("plain", "compiled", "cached", "checkpointing")
WORDS = (
    "a",
    "the",
    "red",
    "green",
    "small",
    "round",
    "two",
    "dog",
    "house",
    "street",
    "water",
    "under",
    "beside",
    "and",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One model to train.

    Args:
        keep: The budget.
        batch: Samples of a step.
        picture: Width and height of the pictures; both families see 576 tokens of theirs.
        steps: Timed ones.
    """

    keep: int | float
    batch: int
    picture: tuple[int, int]
    steps: int


TASKS = {
    "llava-1.5-7b": Task(keep=64, batch=4, picture=(500, 375), steps=30),
    "qwen2.5-vl-7b": Task(keep=0.1111, batch=4, picture=(672, 672), steps=30),
    "qwen2.5-vl-32b": Task(keep=0.1111, batch=1, picture=(672, 672), steps=10),
}


# --- what is trained on -----------------------------------------------------------------------------------------------


def write_captions(folder: Path, picture: tuple[int, int], count: int = 64, seed: int = 0) -> Path:
    """A folder of smooth random pictures with captions of 60 to 100 characters, each of which is one token here."""
    draw, numbers = random.Random(seed), np.random.default_rng(seed)
    folder.mkdir(parents=True)
    lines = []
    for index in range(count):
        pixels = Image.fromarray(numbers.integers(0, 255, (12, 16, 3), dtype=np.uint8))
        pixels.resize(picture, Image.Resampling.BICUBIC).save(folder / f"{index}.jpg", quality=90)
        caption = " ".join(draw.choices(WORDS, k=40))[: draw.randint(60, 100)].strip()
        lines.append(json.dumps({"image": f"{index}.jpg", "caption": caption}))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def precision_of(device: str) -> str:
    """bfloat16, but for a CPU, where it is slow and nothing is measured."""
    return "float32" if device == "cpu" else "bfloat16"


def run_config(
    name: str, task: Task, data: Path, *, steps: int, variant: str, precision: str = "bfloat16"
) -> RunConfig:
    """The run that is measured: the paper's recipe, one forward pass a step."""
    return make_config(
        {
            "backbone": {"name": name, "random_weights": True},
            "budget": {"keep": task.keep},
            "recipe": "paper",
            "optim": {
                "batch_size": task.batch,
                "accumulate": 1,
                "steps": steps,
                "gradient_checkpointing": variant == "checkpointing",
                "compile": variant in ("compiled", "cached"),
                "precision": precision,
            },
            "data": {
                "name": str(data),
                "validation": 0,
                "cache": str(data.parent / "cache") if variant == "cached" else None,
            },
            "saving": {"tensorboard": False},
        }
    )


# --- what it costs ----------------------------------------------------------------------------------------------------


def step_flops(vlm: PrunedVLM, parts: Sequence[Part]) -> float:
    """Operations that a step over these samples cannot do without, as the module's text says."""
    config, spec = vlm.base.config, vlm.backbone.block
    text, group = config.text_config, getattr(config.vision_config, "spatial_merge_size", 1) ** 2
    linear = text.num_hidden_layers * 2 * flops.layer_weights(text)
    head = 2 * text.hidden_size * text.vocab_size
    queries = text.num_attention_heads * flops.head_width(text)
    options = vlm.method.options
    diagonal = 2 * (flops.block_weights(spec) - 2 * spec.width**2)  # the throttler's block, less query and key
    total = 0.0
    for part in parts:
        assert part.batch is not None
        features = part.batch.features
        visual = (features["input_ids"] == vlm.backbone.image_token_id).sum(-1).tolist()
        for length, num_visual in zip(features["attention_mask"].sum(-1).tolist(), visual, strict=True):
            patches = num_visual * group
            total += flops.encoder_flops(config, num_visual)
            total += 3 * (flops.scorer_flops(spec, patches, options.scorer_depth) + patches * diagonal)
            total += 2 * (flops.projector_flops(config, num_visual) + linear * length)
            total += 3 * text.num_hidden_layers * 2 * length**2 * queries
        total += 2 * head * part.num_targets
    return total


def card_peak(device: str) -> tuple[float, str]:
    """Operations per second of the card in bfloat16, and where the number is from."""
    if device.startswith("cuda"):
        card = gpu_of_device(torch.cuda.get_device_name())
        if card is not None:
            return 1e12 * GPUS[card].tflops, "datasheet"
    return matrix_rate(device, getattr(torch, precision_of(device))), "measured"


# --- one row ----------------------------------------------------------------------------------------------------------


def measure(
    name: str,
    task: Task,
    frozen: tuple[Any, Any, str],
    data: Path,
    *,
    device: str,
    variant: str,
    deadline: float,
    kernels: int = 0,
) -> dict[str, Any]:
    """Train for a few steps; fewer than asked for once `time.monotonic()` is past the deadline, but ten at least."""
    steps, precision = WARM_UP + task.steps, precision_of(device)
    config = run_config(name, task, data, steps=steps, variant=variant, precision=precision)
    accelerator = Accelerator(cpu=device == "cpu", mixed_precision="bf16" if precision == "bfloat16" else "no")
    run = Trainer(config, data.parent / f"run-{variant}", accelerator, frozen)
    run.begin()
    start = time.monotonic()
    if run.cache is not None:
        deque(run.encode_first(run.feed.per_epoch or 0), maxlen=0)
        run.cache.flush()
    waits, done, losses = [], [], []
    taken: deque[Taken] = deque()
    weights_gb = reset_peak(device)
    with computing(run.vlm, config, accelerator.autocast) as missing, ThreadPoolExecutor(max_workers=1) as reader:
        prepared = {"prepare_s": time.monotonic() - start} | ({"missing": missing} if missing else {})
        following = reader.submit(run.read, 0)
        marks: list[float] = []  # of the clock, when the host was through with a step
        for step in range(steps):
            if len(done) >= LEAST and time.monotonic() > deadline:
                break
            if step == WARM_UP:
                synchronize(device)
                marks.append(time.perf_counter())
            start = time.perf_counter()
            parts = following.result()
            waited = time.perf_counter() - start
            if step + 1 < steps:
                following = reader.submit(run.read, step + 1)
            taken.append(run.take_step(parts, stop=False))
            while len(taken) > run.ahead:
                losses.append(run.record(taken.popleft())["loss"])
            if step >= WARM_UP:
                marks.append(time.perf_counter())
                waits.append(waited)
                done.append(parts)
        losses += [run.record(one)["loss"] for one in taken]
        synchronize(device)
        seconds = time.perf_counter() - marks[0]
        peak_gb = peak_memory_gb()
        looked = look_inside(run, parts, kernels, device) if kernels else {}
    work = [step_flops(run.vlm, parts) for parts in done]
    peak, source = card_peak(device)
    visual = run.vlm.backbone.image_token_id
    ids = parts[0].batch.features["input_ids"]  # type: ignore[union-attr]
    return {
        "backbone": name,
        "variant": variant,
        "batch": task.batch,
        "samples_s": task.batch * len(done) / seconds,
        "peak_gb": peak_gb,
        "mfu": sum(work) / seconds / peak,
        "step_ms": 1e3 * seconds / len(done),
        "median_ms": 1e3 * statistics.median(after - before for before, after in pairwise(marks)),
        "wait_ms": 1e3 * sum(waits) / len(done),
        "checkpointing": variant == "checkpointing",
        "steps": len(done),
        **prepared,
        **looked,
        "num_visual": int((ids[0] == visual).sum()),
        "num_text": int((ids != visual).sum(-1).max()),
        "keep": task.keep,
        "parameters": sum(parameter.numel() for parameter in run.vlm.base.parameters()),
        "trainable": sum(parameter.numel() for parameter in run.trained),
        "weights_gb": weights_gb,
        "step_tflop": sum(work) / len(work) / 1e12,
        "peak_tflops": peak / 1e12,
        "peak_source": source,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def look_inside(run: Trainer, parts: list[Part], count: int, device: str) -> dict[str, Any]:
    """Where a step waits for the device, and the kernels it spends most of its time in."""

    def step() -> None:
        run.take_step(parts, stop=False)

    places: set[str] = set()
    if device.startswith("cuda"):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        places = {f"{one.filename}:{one.lineno}" for one in seen if "called a synchronizing" in str(one.message)}
    return {"waits": sorted(places), "kernels": slowest_kernels(step, count, device)}


def reset_peak(device: str) -> float:
    """Forget the peak so far; memory held now, in units of 10^9 bytes (0 on a CPU)."""
    if not device.startswith("cuda"):
        return 0.0
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated() / 1e9


def measure_model(
    name: str, *, device: str, tiny: bool, deadline: float, variants: Sequence[str] = VARIANTS, kernels: int = 0
) -> Iterator[dict[str, Any]]:
    """A row of each variant, as soon as it is there; a row with the error where one cannot be had."""
    task = TASKS[name]
    if tiny:
        small = (56, 84) if name.startswith("qwen") else task.picture
        task = Task(keep=task.keep, batch=task.batch, picture=small, steps=2)
    reset_peak(device)  # and let go of the model before
    with tempfile.TemporaryDirectory() as folder:
        try:
            start = time.monotonic()
            config, processor = SHAPES[name](tiny)
            frozen = (build(config, device, getattr(torch, precision_of(device))), processor, "")
            synchronize(device)
            built = {"build_s": time.monotonic() - start}
            data = write_captions(Path(folder) / "data", task.picture, count=8 if tiny else 64)
        except Exception as error:  # one model must not cost the others their rows
            yield _failed(name, error)
            return
        for place, variant in enumerate(variants):
            end = time.monotonic() + (deadline - time.monotonic()) / (len(variants) - place)
            limits = {"device": device, "deadline": end, "kernels": kernels}
            try:
                yield measure(name, task, frozen, data, variant=variant, **limits) | built
            except Exception as error:
                yield _failed(name, error) | {"variant": variant}
            reset_peak(device)


def _failed(name: str, error: Exception) -> dict[str, Any]:
    return {"backbone": name, "error": f"{type(error).__name__}: {error}"[:500]}


def refuse_cpu(names: Sequence[str], device: str) -> None:
    """A `ValueError` where a model of the real size would have to be trained on a CPU."""
    for name in names:
        dtype = getattr(torch, precision_of(device))
        require_gpu(name, SHAPES[name](False)[0], dtype, device, what="training", way_out="; or give --size tiny")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(TASKS))
    parser.add_argument("--size", choices=("real", "tiny"), default="real")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=150.0, help="for everything")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--kernels", type=int, default=0, help="slowest kernels of a step to list in each row")
    arguments = parser.parse_args()
    names, variants = arguments.models.split(","), arguments.variants.split(",")
    for option, given, known in (("models", names, TASKS), ("variants", variants, VARIANTS)):
        unknown = [name for name in given if name not in known]
        if unknown:
            parser.error(f"--{option} {unknown[0]!r} is not measured here; choose from {', '.join(known)}")
    if arguments.size == "real":
        try:
            refuse_cpu(names, arguments.device)
        except ValueError as error:
            parser.error(str(error))
    end = time.monotonic() + arguments.seconds
    rows: list[dict[str, Any]] = []

    def measured() -> Iterator[dict[str, Any]]:
        for place, name in enumerate(names):
            if time.monotonic() > end:
                yield {"backbone": name, "error": f"not begun: {arguments.seconds:g} seconds were over"}
                continue
            deadline = time.monotonic() + (end - time.monotonic()) / (len(names) - place)
            how = {"device": arguments.device, "tiny": arguments.size == "tiny", "kernels": arguments.kernels}
            yield from measure_model(name, deadline=deadline, variants=variants, **how)

    for row in measured():
        rows.append(row)
        print(json.dumps(row), flush=True)
        if arguments.out:  # after each row, so that a run cut short keeps what it has
            write_results(
                arguments.out,
                name=arguments.out.stem,
                rows=rows,
                device="CPU" if arguments.device == "cpu" else device_name(),
                commit=arguments.commit,
                seeds=[42],
                notes="random weights, synthetic captions, one forward pass a step; compiled: optim.compile; cached: "
                "that and the tower's features from data.cache; peak_gb in units of 10^9 bytes; step_ms is the mean "
                "step, of which wait_ms for data, median_ms the median step; mfu without what checkpointing computes "
                "again, and for cached rows with the tower that they leave out",
            )


if __name__ == "__main__":
    main()
