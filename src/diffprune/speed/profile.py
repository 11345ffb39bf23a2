"""Where the time to the first token goes: every method, path, batch and text length in one run, as rows and a figure.

The stages of one request are timed alone and the whole from end to end; see `docs/profile.md` for what each counts.
"""

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diffprune.backbones.base import Batch
from diffprune.model import PrunedVLM
from diffprune.results import Results, command_line, device_name, read_results, source_commit, write_results
from diffprune.speed.flops import decoder_weights, encoder_flops, kv_bytes, prefill_flops
from diffprune.speed.plan import TEXT_BUCKETS
from diffprune.speed.probes import EagerProbe, FastProbe, Probe, load_subject, make_batch, with_method
from diffprune.speed.timing import (
    RUNS,
    WARM_UP,
    copy_bandwidth,
    matrix_rate,
    synchronize,
    time_ms,
    times_ms,
    wall_ms,
)

NOTES = (
    "Medians of `runs` calls after warm-up, CUDA events; ttft_ms by the clock, pixels on the device to token id on "
    "the host. The row full / eager is the stock model. tflops: language model, one request, causal attention counted "
    "half. floor_ms: what is longer, reading the language model's weights once at the measured copy bandwidth or the "
    "operations of the batch at the measured matrix rate; ratio_to_floor = prefill_ms / floor_ms. kv_bytes as "
    "allocated, kv_bytes_predicted in closed form. decode_tok_s: one step after the other, in an answer whose lengths "
    "were all seen before; decode_first_tok_s: in the first such answer. Methods inside the language model: on the "
    "eager path pruner_ms is the time of their choices, taken out of prefill_ms; on the fast path it is a part of "
    "prefill_ms."
)
DECODE_STEPS = 16
DECODE_WARM_UP = 3
EAGER_SHARE = 0.55  # of the time of a run on both paths, before the first fast row
STAGE_SECONDS = 2.5  # for the timed calls of one stage, where all of them would take longer (large batches)
STAGES = ("encode", "pruner", "splice", "prefill")
NOT_RUN = "Not run for want of time: "
COLUMNS = (
    "method", "path", "batch", "num_text", "num_kept", "tflops", "encode_ms", "pruner_ms", "splice_ms", "prefill_ms",
    "ttft_ms", "decode_tok_s", "peak_gb", "kv_bytes", "ratio_to_floor",
)  # fmt: skip

Report = Callable[[list[dict[str, Any]]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is measured.

    Args:
        backbone: A preset, a reference model, or a folder.
        random_weights: Build the preset's real size on the device instead of loading it.
        tiny: With random weights, the small model of the same kind.
        methods, keeps, texts, batches, paths: Every combination is one row; `full` is run once whatever the budget.
            Texts come in the order given, so that every method has the first before any has the second.
        image: (width, height) of the picture.
        runs: Timed calls of each stage.
        text_buckets: Of the fast path; its own where empty.
        seconds: Time for all of it; what does not fit is left out, and `not_run` names it.
        decode: Time decoding too; without, the fast path compiles no decoding step, which saves half of its warm-up.
        decode_methods: Those whose decoding is timed, where it is; all where empty.
        eager_methods: Those that run on the eager path too; all where empty.
        kernels: Slowest kernels of a prefill to list in each row, at the end and as far as time allows.
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

    def decodes(self, method: str) -> bool:
        """Whether that method's decoding is timed."""
        return self.decode and (not self.decode_methods or method in self.decode_methods)

    def runs_on(self, path: str, method: str) -> bool:
        """Whether that method is measured on that path."""
        return path != "eager" or not self.eager_methods or method in self.eager_methods


@dataclass(frozen=True, slots=True)
class Hardware:
    """What the device does at best, measured: bytes copied and operations of a large matrix product, per second."""

    bandwidth: float
    rate: float

    def floor_ms(self, read: int | float, flops: int | float) -> float:
        """The least time for that many bytes read and operations done."""
        return max(read / self.bandwidth, flops / self.rate) * 1e3


# --- the whole run ----------------------------------------------------------------------------------------------------


def profile(settings: Settings, report: Report = lambda rows: None) -> list[dict[str, Any]]:
    """All rows: the device, the model, then one per method, budget, path, batch and text length, as far as time allows.

    `report` is given all rows so far after each one, so that a run cut short leaves what it has.
    """
    start = time.monotonic()
    hardware = Hardware(copy_bandwidth(settings.device), matrix_rate(settings.device, settings.dtype))
    release(settings.device)
    subject = load_subject(
        settings.backbone,
        random_weights=settings.random_weights,
        tiny=settings.tiny,
        device=settings.device,
        dtype=settings.dtype,
    )
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
                row["kernels"] = kernels_of(settings, subject, row, batches[row["batch"], row["num_text"]], weights)
                report(rows)
                release(settings.device)
    return rows


def planned(settings: Settings) -> list[dict[str, Any]]:
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
        }
        for path in eager_first(settings.paths)
        for batch in settings.batches
        for num_text in settings.texts
        for method, keep in cases(settings)
        if settings.runs_on(path, method)
    ]


def seconds_for(path: str, settings: Settings) -> float:
    """Seconds after which no row of that path is begun: beside the fast path, the eager one has only its share."""
    return settings.seconds * (EAGER_SHARE if path == "eager" and "fast" in settings.paths else 1.0)


def eager_first(paths: Sequence[str]) -> list[str]:
    """The paths in the order that leaves each undisturbed by the other."""
    return sorted(paths, key=("eager", "fast").index)


def not_run(settings: Settings, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the settings ask for and no row has, in words."""
    done = {row_key(row) for row in rows}
    return [in_words(head) for head in planned(settings) if row_key(head) not in done]


def cases(settings: Settings) -> Iterator[tuple[str, int | float]]:
    """Methods and budgets; the full model has one budget."""
    for method in settings.methods:
        for keep in (1.0,) if method == "full" else settings.keeps:
            yield method, keep


def model_row(settings: Settings, subject: PrunedVLM, hardware: Hardware) -> dict[str, Any]:
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


def read_bytes(vlm: PrunedVLM) -> int:
    """Bytes of weights that a prefill has to read."""
    return decoder_weights(vlm.base.config.text_config) * vlm.base.dtype.itemsize


def measure_method(
    settings: Settings,
    subject: PrunedVLM,
    head: Mapping[str, Any],
    batch: Batch,
    hardware: Hardware,
    weights: "FastWeights",
) -> dict[str, Any]:
    """What is measured of one row; where that fails, the reason."""
    try:
        vlm, compiled = make_ready(settings, subject, head, weights)
        decode = settings.decodes(head["method"])
        return measure(settings, vlm, batch, head["path"], hardware, decode=decode) | compiled
    except Exception as error:
        return {"error": first_line(error)}


def make_ready(
    settings: Settings, subject: PrunedVLM, head: Mapping[str, Any], weights: "FastWeights"
) -> tuple[PrunedVLM, dict[str, float]]:
    """The model with the row's method on its path, and how long that took to compile."""
    vlm = with_method(subject, head["method"], keep=head["keep"], dtype=settings.dtype)
    if head["path"] == "eager":
        return vlm, {}
    start = time.perf_counter()
    decode = settings.decodes(head["method"])
    weights.compile(vlm, batches=[head["batch"]], texts=[head["num_text"]], decode=decode)
    return vlm, {"compile_s": time.perf_counter() - start}


def kernels_of(
    settings: Settings, subject: PrunedVLM, head: Mapping[str, Any], batch: Batch, weights: "FastWeights"
) -> list[str]:
    """The slowest kernels of a row's prefill; after all rows were timed, for the profiler slows what follows it."""
    try:
        vlm, _ = make_ready(settings, subject, head, weights)
        return slowest_kernels(
            make_probe(vlm, batch, head["path"]).stages["prefill"], settings.kernels, settings.device
        )
    except Exception as error:
        return [first_line(error)]


class FastWeights:
    """Compiles one method after the other around one model: its weights are laid out and its layers compiled once."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.first: Any = None

    def compile(self, vlm: PrunedVLM, *, batches: Sequence[int], texts: Sequence[int], decode: bool) -> None:
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
            image_sizes=(settings.image,),
            max_new_tokens=DECODE_WARM_UP + DECODE_STEPS + 2 if decode else 1,
            **options,
        )
        if self.first is None:
            self.first = vlm.fast


def text_bucket(num_text: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds the text; the largest where none does, which then says so itself."""
    return min((size for size in buckets if size >= num_text), default=max(buckets))


def forget_graphs(fast: Any) -> None:
    """Free a fast path's buffers, graphs and scorer, so that the next method's memory is its own.

    What is left are the weights that the next one shares.
    """
    for held in (fast.buckets, fast.pictures, fast.choosers, fast.splicers, fast.store.flat):
        held.clear()
    fast.scorer = None


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


# --- one row ----------------------------------------------------------------------------------------------------------


def measure(
    settings: Settings, vlm: PrunedVLM, batch: Batch, path: str, hardware: Hardware, *, decode: bool
) -> dict[str, Any]:
    """Times, counts and memory of one method on one path over one batch."""
    device, text = settings.device, vlm.base.config.text_config
    probe = make_probe(vlm, batch, path)
    options: dict[str, Any] = {"runs": settings.runs, "warm_up": WARM_UP, "seconds": STAGE_SECONDS}
    timed = {name: times_ms(stage, device, **options) for name, stage in probe.stages.items()}
    times = {name: statistics.median(found) for name, found in timed.items()}
    inner = inner_times(probe, device, settings.runs)
    if inner is not None:
        times |= {"pruner": inner, "prefill": times["prefill"] - inner}
    elif vlm.method.name == "full":
        times["pruner"] = 0.0
    reset_peak(device)
    timed["ttft"] = times_ms(probe.ttft, device, timer=wall_ms, **options)
    ttft = statistics.median(timed["ttft"])
    memory = peak_memory(device)
    num_prompts = len(batch.features["input_ids"])
    flops = prefill_flops(text, probe.layers)
    floor = hardware.floor_ms(read_bytes(vlm), num_prompts * flops)
    config = vlm.base.config
    num_encoded = vlm.backbone.num_encoded(config, batch.sizes[0], probe.num_visual)
    vision = num_prompts * encoder_flops(config, num_encoded)
    row: dict[str, Any] = {
        "num_visual": probe.num_visual,
        "num_kept": probe.num_kept,
        "num_columns": probe.num_columns,
        **{f"{name}_ms": times[name] for name in STAGES if name in times},
        "ttft_ms": ttft,
        "tflops": flops / 1e12,
        **memory,
        "kv_bytes": probe.kv_bytes(),
        "kv_bytes_predicted": kv_bytes(text, probe.kv_columns, batch=num_prompts, element_size=vlm.base.dtype.itemsize),
        "floor_ms": floor,
        "ratio_to_floor": times["prefill"] / floor,
        "ttft_ratio_to_floor": ttft / (floor + hardware.floor_ms(vision_bytes(vlm), vision)),
        "prompts_s": num_prompts / times["prefill"] * 1e3,
        "runs": min(map(len, timed.values())),
    }
    if decode:
        first_ms, step_ms = decode_ms(probe, device)
        row["decode_tok_s"] = num_prompts / step_ms * 1e3
        row["decode_first_tok_s"] = num_prompts / first_ms * 1e3
        row["decode_ratio_to_floor"] = step_ms / hardware.floor_ms(read_bytes(vlm), 0)
    if probe.graphs is not None:
        row["graphs"] = probe.graphs
    return row


def make_probe(vlm: PrunedVLM, batch: Batch, path: str) -> Probe:
    """The stages of that path over the batch."""
    return FastProbe(vlm, batch) if path == "fast" else EagerProbe(vlm, batch)


def inner_times(probe: Probe, device: str, runs: int) -> float | None:
    """Median time of the choices inside a prefill, where they are made there and can be told apart."""
    if probe.inner_pruner_ms() is None:  # also forgets the choices of the calls before
        return None
    times = []
    for _ in range(min(runs, 10)):
        probe.stages["prefill"]()
        synchronize(device)
        times.append(probe.inner_pruner_ms() or 0.0)
    return statistics.median(times)


def decode_ms(probe: Probe, device: str) -> tuple[float, float]:
    """Median times of one decoded token, the whole batch at once: in a first answer, and in the same one again.

    A growing cache has another length at every step, so steps do not warm each other up: what a kernel prepares for a
    shape is prepared anew at each. The same answer again finds all of it ready, as every other stage does.
    """

    def answer_ms() -> float:
        probe.start()
        for _ in range(DECODE_WARM_UP):
            probe.step()
        return statistics.median(time_ms(probe.step, device) for _ in range(DECODE_STEPS))

    return answer_ms(), answer_ms()


def vision_bytes(vlm: PrunedVLM) -> int:
    """Bytes of the vision tower's and the projector's weights."""
    return sum(value.nbytes for module in vlm.backbone.vision_modules().values() for value in module.parameters())


def reset_peak(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()


def peak_memory(device: str) -> dict[str, float]:
    """Most memory in use since the last reset and what the process has taken from the device; nothing on a CPU."""
    if not device.startswith("cuda"):
        return {}
    return {"peak_gb": torch.cuda.max_memory_allocated() / 1e9, "reserved_gb": torch.cuda.memory_reserved() / 1e9}


def slowest_kernels(call: Callable[[], object], count: int, device: str) -> list[str]:
    """The kernels that most of the time goes to, as "ms of one call, number of launches, name"."""
    from torch.profiler import ProfilerActivity

    repeats = 3
    on_gpu = device.startswith("cuda")
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
        for _ in range(repeats):
            call()
        synchronize(device)

    def spent(event: Any) -> float:
        return event.self_device_time_total if on_gpu else event.self_cpu_time_total

    events = sorted(seen.key_averages(), key=spent, reverse=True)[:count]
    return [f"{spent(e) / 1e3 / repeats:.3f} ms, {e.count // repeats} x {e.key[:80]}" for e in events]


# --- what comes out ---------------------------------------------------------------------------------------------------


def save(
    path: Path,
    rows: Sequence[dict[str, Any]],
    *,
    device: str,
    commit: str | None,
    notes: str = NOTES,
    missing: Sequence[str] = (),
    earlier: Results | None = None,
) -> None:
    """The results file, in one step; with an earlier one, its rows that were not measured again come first.

    `missing` is what was not run, in words; it goes into the notes, with what the earlier run left out and this one did
    not run either.
    """
    name = None if device.startswith("cuda") or not torch.cuda.is_available() else "CPU"
    command = None
    if earlier is not None:
        again = {row_key(row) for row in rows}
        # Floors rest on the device row above them, so that of each run stays.
        rows = [row for row in earlier.rows if "path" not in row or row_key(row) not in again] + list(rows)
        done = {in_words(row) for row in rows if "path" in row}
        left = earlier.notes.partition(NOT_RUN)[2].removesuffix(".")
        missing = list(dict.fromkeys([*filter(None, left.split("; ")), *missing]))
        missing = [item for item in missing if item not in done]
        command = " && ".join(dict.fromkeys([*earlier.command.split(" && "), command_line()]))
    if missing:
        notes = f"{notes} {NOT_RUN}{'; '.join(missing)}."
    write_results(path, name=path.stem, rows=rows, command=command, commit=commit, device=name, seeds=[0], notes=notes)


def row_key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a row is about."""
    return tuple(row.get(key) for key in ("name", "backbone", "method", "keep", "path", "batch", "num_text"))


def read_earlier(path: Path, *, device: str, commit: str | None) -> Results | None:
    """The results that new rows join: of the same code on the same device; None where there are none yet."""
    if not path.exists():
        return None
    earlier = read_results(path)
    here = device_name() if device.startswith("cuda") or not torch.cuda.is_available() else "CPU"
    code = commit if commit is not None else source_commit()
    for what, old, new in (("device", earlier.device, here), ("commit", earlier.commit, code)):
        if old != new:
            raise ValueError(f"{path} is of {what} {old}, not {new}: leave --append out, or give another --out")
    return earlier


def in_words(row: Mapping[str, Any]) -> str:
    """What a row is about, for a reader."""
    where = ", ".join(str(row[key]) for key in ("backbone", "method", "keep", "path") if key in row)
    return f"{where}, batch {row.get('batch')}, text {row.get('num_text')}"


def one_line(row: dict[str, Any]) -> str:
    """A row as it comes, short."""
    found = [f"{key} {row[key]:.2f}" for key in ("pruner_ms", "prefill_ms", "ttft_ms", "requests_s") if key in row]
    return f"{in_words(row)}: {row.get('error') or ', '.join(found)}"


BARS = (
    ("encode_ms", "vision", "#4c72b0"),
    ("pruner_ms", "pruner", "#dd8452"),
    ("splice_ms", "projector and splice", "#8c8c8c"),
    ("prefill_ms", "prefill", "#55a868"),
    ("rest_ms", "the rest, end to end", "#cccccc"),
)


def bar_parts(row: dict[str, Any]) -> dict[str, float]:
    """The stages of one row and what the end-to-end time has beyond them; they sum up to it unless stages overlap."""
    parts = {key: float(row.get(key) or 0.0) for key, _, _ in BARS[:-1]}
    return parts | {"rest_ms": max(0.0, row["ttft_ms"] - sum(parts.values()))}


def draw_bars(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Stacked bars of the time to the first token, one panel for each batch and text length."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    done = [row for row in rows if "ttft_ms" in row]
    panels = list(dict.fromkeys((row["batch"], row["num_text"]) for row in done))
    if not panels:
        return
    tallest = max(sum((row["batch"], row["num_text"]) == panel for row in done) for panel in panels)
    figure = Figure(figsize=(6.4 * len(panels), 1.5 + 0.3 * tallest), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (batch, num_text) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        shown = [row for row in done if (row["batch"], row["num_text"]) == (batch, num_text)][::-1]
        names = [f"{row['method']}, {row['path']}" for row in shown]
        left = [0.0] * len(shown)
        for key, label, color in BARS:
            widths = [bar_parts(row)[key] for row in shown]
            axes.barh(range(len(shown)), widths, left=left, color=color, label=label)
            left = [start + width for start, width in zip(left, widths, strict=True)]
        for place, row in enumerate(shown):
            axes.text(left[place], place, f" {row['ttft_ms']:.1f}", va="center", fontsize=8)
        axes.set_yticks(range(len(shown)), names, fontsize=8)
        axes.set_xlabel("ms to the first token")
        axes.set_title(f"batch {batch}, {num_text} text tokens", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.margins(x=0.12)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, ncols=len(BARS), loc="outside upper center", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
