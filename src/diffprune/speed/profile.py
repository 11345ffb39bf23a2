"""Where the time to the first token goes: every method, path, batch and text length in one run, as rows and a figure.

The stages of one request are timed alone and the whole from end to end; see `docs/profile.md` for what each counts.
"""

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from diffprune.backbones.prompts import Batch
from diffprune.evaluate.downscale import DOWNSCALE, require_forms
from diffprune.model import PrunedVLM
from diffprune.speed.measure import (
    DECODE_STEPS,
    DECODE_WARM_UP,
    Hardware,
    make_request,
    measure,
    read_bytes,
    slowest_kernels,
)
from diffprune.speed.output import in_words, row_key
from diffprune.speed.plan import TEXT_BUCKETS
from diffprune.speed.subject import deployed, load_subject, make_batch
from diffprune.speed.timing import RUNS, copy_bandwidth, matrix_rate

EAGER_SHARE = 0.55  # of the time of a run on both paths, before the first fast row
COLUMNS = (
    "method", "path", "batch", "num_text", "num_kept", "encode_ms", "pruner_ms", "prefill_ms", "ttft_ms",
    "decode_tok_s", "peak_gb", "splice_ms", "tflops", "kv_bytes", "ratio_to_floor",
)  # fmt: skip

Report = Callable[[list[dict[str, Any]]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileSettings:
    """What is measured.

    Args:
        backbone: A preset, a reference model, or a folder.
        random_weights: Build the preset's real size on the device instead of loading it.
        tiny: With random weights, the small model of the same kind.
        methods, keeps, texts, batches, paths: Every combination is one row; `full` is run once whatever the budget,
            and `downscale` is the full model on a picture made smaller, before the vision tower. Texts come in the
            order given, so that every method has the first before any has the second.
        image: (width, height) of the picture.
        runs: Timed calls of each stage.
        text_buckets: Of the fast path; its own where empty.
        seconds: Time for all of it; what does not fit is not run, and `not_run` names it.
        decode: Time decoding too; without, the fast path compiles no decoding step, which saves half of its warm-up.
        decode_methods: Those whose decoding is timed, where it is; all where empty.
        eager_methods: Those that run on the eager path too; all where empty.
        kernels: Slowest kernels of prefill, encoder and pruner to list in each row, at the end, as far as time allows.
        precision: Of the decoder's linear maps on the fast path, see `CompileOptions`.
    """

    backbone: str
    random_weights: bool = False
    tiny: bool = False
    methods: Sequence[str] = ("full", "diffprune")
    keeps: Sequence[int | float] = (64,)
    texts: Sequence[int] = (40,)
    batches: Sequence[int] = (1,)
    paths: Sequence[str] = ("eager", "fast")
    image: tuple[int, int] = (336, 336)
    device: str = "cuda"
    dtype: torch.dtype = torch.float16
    runs: int = RUNS
    text_buckets: Sequence[int] = ()
    seconds: float = float("inf")
    decode: bool = True
    decode_methods: Sequence[str] = ()
    eager_methods: Sequence[str] = ()
    kernels: int = 0
    precision: str = "model"

    def decodes(self, method: str) -> bool:
        """Whether that method's decoding is timed."""
        return self.decode and (not self.decode_methods or method in self.decode_methods)

    def load(self) -> PrunedVLM:
        """The model to be measured, without pruning; a `ValueError` where it cannot take a smaller picture and must."""
        subject = load_subject(
            self.backbone,
            random_weights=self.random_weights,
            tiny=self.tiny,
            device=self.device,
            dtype=self.dtype,
        )
        if DOWNSCALE in self.methods:
            require_forms(subject)
        return subject

    def runs_on(self, path: str, method: str) -> bool:
        """Whether that method is measured on that path."""
        return path != "eager" or not self.eager_methods or method in self.eager_methods


def profile(settings: ProfileSettings, report: Report = lambda rows: None) -> list[dict[str, Any]]:
    """All rows: the device, the model, then one per method, budget, path, batch and text length, as far as time allows.

    `report` is called with all rows so far after each one, so that a run cut short leaves what it has.
    """
    start = time.monotonic()
    hardware = Hardware(copy_bandwidth(settings.device), matrix_rate(settings.device, settings.dtype))
    release(settings.device)
    subject = settings.load()
    batches = {
        (batch, text): make_batch(subject, size=settings.image, num_text=text, batch=batch)
        for batch in settings.batches
        for text in settings.texts
    }
    rows: list[dict[str, Any]] = [model_row(settings, subject, hardware)]
    weights = FastWeights(settings)
    for head in planned(settings):
        if time.monotonic() > start + seconds_for(head["path"], settings):
            continue
        batch = batches[head["batch"], head["num_text"]]
        rows.append(head | measure_method(settings, subject, head, batch, hardware, weights))
        report(rows)
        release(settings.device)
    if settings.kernels:
        for row in rows:
            if "ttft_ms" in row and time.monotonic() < start + settings.seconds:
                row |= kernels_of(settings, subject, row, batches[row["batch"], row["num_text"]], weights)
                report(rows)
                release(settings.device)
    return rows


def planned(settings: ProfileSettings) -> list[dict[str, Any]]:
    """What each row is about: the first text length of every method before the second of any, for short runs.

    All of the eager path comes before the first compilation: behind one, its rows would have the fast path's weights in
    their memory and a slower Python.
    """
    return [
        {
            "method": method,
            "keep": keep,
            "backbone": settings.backbone,
            "path": path,
            "batch": batch,
            "num_text": num_text,
            **({"precision": settings.precision} if path == "fast" and settings.precision != "model" else {}),
        }
        for path in eager_first(settings.paths)
        for batch in settings.batches
        for num_text in settings.texts
        for method, keep in cases(settings)
        if settings.runs_on(path, method)
    ]


def seconds_for(path: str, settings: ProfileSettings) -> float:
    """Seconds after which no row of that path is begun: beside the fast path, the eager one has only its share."""
    return settings.seconds * (EAGER_SHARE if path == "eager" and "fast" in settings.paths else 1.0)


def eager_first(paths: Sequence[str]) -> list[str]:
    """The paths in the order that leaves each undisturbed by the other."""
    return sorted(paths, key=("eager", "fast").index)


def not_run(settings: ProfileSettings, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the settings ask for and no row has, in words."""
    done = {row_key(row) for row in rows}
    return [in_words(head) for head in planned(settings) if row_key(head) not in done]


def cases(settings: ProfileSettings) -> Iterator[tuple[str, int | float]]:
    """Methods and budgets; the full model has one budget."""
    for method in settings.methods:
        for keep in (1.0,) if method == "full" else settings.keeps:
            yield method, keep


def model_row(settings: ProfileSettings, subject: PrunedVLM, hardware: Hardware) -> dict[str, Any]:
    """What the floors in all other rows come from."""
    weights = read_bytes(subject)
    return {
        "name": "device and weights",
        "backbone": settings.backbone,
        "dtype": str(settings.dtype).removeprefix("torch."),
        "parameters": sum(parameter.numel() for parameter in subject.base.parameters()),
        "copy_gb_s": hardware.bandwidth / 1e9,
        "matrix_tflop_s": hardware.rate / 1e12,
        "weights_read_gb": weights / 1e9,
        "weights_read_ms": weights / hardware.bandwidth * 1e3,
        "random_weights": settings.random_weights,
    }


def measure_method(
    settings: ProfileSettings,
    subject: PrunedVLM,
    head: Mapping[str, Any],
    batch: Batch,
    hardware: Hardware,
    weights: "FastWeights",
) -> dict[str, Any]:
    """What is measured of one row; where that fails, the reason."""
    try:
        vlm, batch, compiled = make_ready(settings, subject, head, batch, weights)
        decode = settings.decodes(head["method"])
        return (
            measure(vlm, batch, head["path"], hardware, device=settings.device, runs=settings.runs, decode=decode)
            | compiled
        )
    except Exception as error:
        return {"error": first_line(error)}


def make_ready(
    settings: ProfileSettings, subject: PrunedVLM, head: Mapping[str, Any], batch: Batch, weights: "FastWeights"
) -> tuple[PrunedVLM, Batch, dict[str, float]]:
    """The model with the row's method on its path, the batch that it is given, and how long that took to compile."""
    vlm, size = deployed(subject, head["method"], keep=head["keep"], dtype=settings.dtype, size=settings.image)
    if head["method"] == DOWNSCALE:
        batch = make_batch(vlm, size=size, num_text=head["num_text"], batch=head["batch"])
    if head["path"] == "eager":
        return vlm, batch, {}
    start = time.perf_counter()
    decode = settings.decodes(head["method"])
    weights.compile(vlm, batches=[head["batch"]], texts=[head["num_text"]], size=size, decode=decode)
    report, compiled = vlm.fast.report, {"compile_s": time.perf_counter() - start}
    if settings.precision == "model":
        return vlm, batch, compiled
    if report.precision != settings.precision:
        raise ValueError(
            f"precision {settings.precision!r} was left out, on this device or with these weights, and the log says "
            "why; leave --precision out"
        )
    return vlm, batch, compiled | {"logit_error": report.logit_error}


def kernels_of(
    settings: ProfileSettings, subject: PrunedVLM, head: Mapping[str, Any], batch: Batch, weights: "FastWeights"
) -> dict[str, list[str]]:
    """The slowest kernels of a row's stages; after all rows were timed, for the profiler slows what follows it."""
    try:
        vlm, batch, _ = make_ready(settings, subject, head, batch, weights)
        stages = make_request(vlm, batch, head["path"]).stages
        keys = {"kernels": "prefill", "encode_kernels": "encode", "pruner_kernels": "pruner"}
        return {
            key: slowest_kernels(stages[stage], settings.kernels, settings.device)
            for key, stage in keys.items()
            if stage in stages
        }
    except Exception as error:
        return {"kernels": [first_line(error)]}


class FastWeights:
    """Compiles one method after the other around one model: its weights are laid out and its layers compiled once."""

    def __init__(self, settings: ProfileSettings) -> None:
        self.settings = settings
        self.first: Any = None

    def compile(
        self, vlm: PrunedVLM, *, batches: Sequence[int], texts: Sequence[int], size: tuple[int, int], decode: bool
    ) -> None:
        """The fast path of this method for these shapes alone: each shape more is compiled on its own, for seconds."""
        settings = self.settings
        options: dict[str, Any] = {}
        if self.first is not None:
            forget_graphs(self.first)
            release(settings.device)
            options["share"] = self.first
        vlm.compile(
            keep=vlm.budget.keep,
            batch_sizes=tuple(batches),
            text_buckets=tuple({text_bucket(text, settings.text_buckets or TEXT_BUCKETS) for text in texts}),
            image_sizes=(size,),
            precision=settings.precision,
            # Through real depth random weights make much of any rounding; the time does not depend on that.
            **({"max_logit_error": float("inf")} if settings.random_weights else {}),
            max_new_tokens=DECODE_WARM_UP + DECODE_STEPS + 2 if decode else 1,
            **options,
        )
        if self.first is None:
            self.first = vlm.fast


def text_bucket(num_text: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds the text; the largest where none does, which then raises."""
    return min((size for size in buckets if size >= num_text), default=max(buckets))


def forget_graphs(fast: Any) -> None:
    """Free a fast path's buffers, graphs and scorer, so that the next method's memory is its own.

    What is left are the weights that the next one shares.
    """
    for held in (fast.buckets, fast.pictures, fast.choosers, fast.splicers, fast.store.flat):
        held.clear()
    fast.scorer = fast.growth = None


def first_line(error: Exception) -> str:
    """An error in one line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no message'}"


def release(device: str) -> None:
    """Give back what nobody holds any more, so that methods do not inherit each other's memory."""
    gc.collect()
    if device.startswith("cuda"):
        with contextlib.suppress(RuntimeError):  # after a failed launch nothing can be freed, and rows go on
            torch.cuda.empty_cache()
