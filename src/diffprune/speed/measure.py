"""One row of a profile: every stage of one request timed alone, the whole end to end, counts and memory."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from diffprune.backbones.prompts import Batch
from diffprune.model import PrunedVLM
from diffprune.speed.flops import decoder_weights, encoder_flops, kv_bytes, prefill_flops
from diffprune.speed.stages import EagerRequest, FastRequest, TimedRequest
from diffprune.speed.timing import WARM_UP, synchronize, time_ms, times_ms, wall_ms

DECODE_STEPS = 16
DECODE_WARM_UP = 3
STAGE_SECONDS = 2.5  # for the timed calls of one stage, where all of them would take longer (large batches)
STAGES = ("encode", "pruner", "splice", "prefill")


@dataclass(frozen=True, slots=True)
class Hardware:
    """What the device does at best, measured: bytes copied and operations of a large matrix product, per second."""

    bandwidth: float
    rate: float

    def floor_ms(self, read: int | float, flops: int | float) -> float:
        """The least time for that many bytes read and operations done."""
        return max(read / self.bandwidth, flops / self.rate) * 1e3


def measure(
    vlm: PrunedVLM, batch: Batch, path: str, hardware: Hardware, *, device: str, runs: int, decode: bool
) -> dict[str, Any]:
    """Times, counts and memory of one method on one path over one batch."""
    text = vlm.base.config.text_config
    request = make_request(vlm, batch, path)
    options: dict[str, Any] = {"runs": runs, "warm_up": WARM_UP, "seconds": STAGE_SECONDS}
    timed = {name: times_ms(stage, device, **options) for name, stage in request.stages.items()}
    times = {name: statistics.median(found) for name, found in timed.items()}
    inner = inner_times(request, device, runs)
    if inner is not None:
        times |= {"pruner": inner, "prefill": times["prefill"] - inner}
    elif vlm.method.name == "full":
        times["pruner"] = 0.0
    reset_peak(device)
    timed["ttft"] = times_ms(request.ttft, device, timer=wall_ms, **options)
    ttft = statistics.median(timed["ttft"])
    memory = peak_memory(device)
    num_prompts = len(batch.features["input_ids"])
    flops = prefill_flops(text, request.layers)
    floor = hardware.floor_ms(read_bytes(vlm), num_prompts * flops)
    config = vlm.base.config
    num_encoded = vlm.backbone.num_encoded(config, batch.sizes[0], request.num_visual)
    vision = num_prompts * encoder_flops(config, num_encoded)
    row: dict[str, Any] = {
        "num_visual": request.num_visual,
        "num_kept": request.num_kept,
        "num_columns": request.num_columns,
        **{f"{name}_ms": times[name] for name in STAGES if name in times},
        "ttft_ms": ttft,
        "ttft_quartiles": np.percentile(timed["ttft"], [25, 75]).tolist(),
        "tflops": flops / 1e12,
        **memory,
        "kv_bytes": request.kv_bytes(),
        "kv_bytes_predicted": kv_bytes(
            text, request.kv_columns, batch=num_prompts, element_size=vlm.base.dtype.itemsize
        ),
        "floor_ms": floor,
        "ratio_to_floor": times["prefill"] / floor,
        "ttft_ratio_to_floor": ttft / (floor + hardware.floor_ms(vision_bytes(vlm), vision)),
        "prompts_s": num_prompts / times["prefill"] * 1e3,
        "runs": min(map(len, timed.values())),
    }
    if decode:
        first_ms, step_ms = decode_ms(request, device)
        row["decode_tok_s"] = num_prompts / step_ms * 1e3
        row["decode_first_tok_s"] = num_prompts / first_ms * 1e3
        row["decode_ratio_to_floor"] = step_ms / hardware.floor_ms(read_bytes(vlm), 0)
    if request.graphs is not None:
        row["graphs"] = request.graphs
    return row


def make_request(vlm: PrunedVLM, batch: Batch, path: str) -> TimedRequest:
    """The stages of that path over the batch."""
    return FastRequest(vlm, batch) if path == "fast" else EagerRequest(vlm, batch)


def inner_times(request: TimedRequest, device: str, runs: int) -> float | None:
    """Median time of the choices inside a prefill, where they are made there and can be timed apart."""
    if request.inner_pruner_ms() is None:  # also forgets the choices of the calls before
        return None
    times = []
    for _ in range(min(runs, 10)):
        request.stages["prefill"]()
        synchronize(device)
        times.append(request.inner_pruner_ms() or 0.0)
    return statistics.median(times)


def decode_ms(request: TimedRequest, device: str) -> tuple[float, float]:
    """Median times of one decoded token, the whole batch at once: in a first answer, and in the same one again.

    A growing cache has another length at every step, so steps do not warm each other up: what a kernel prepares for a
    shape is prepared anew at each. The same answer again finds all of it ready, as every other stage does.
    """

    def answer_ms() -> float:
        request.start()
        for _ in range(DECODE_WARM_UP):
            request.step()
        return statistics.median(time_ms(request.step, device) for _ in range(DECODE_STEPS))

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


def read_bytes(vlm: PrunedVLM) -> int:
    """Bytes of weights that a prefill has to read; where layers are in 8 bits, the head is not."""
    text, itemsize = vlm.base.config.text_config, vlm.base.dtype.itemsize
    if vlm.fast is not None and vlm.fast.report.precision == "fp8":
        head = text.hidden_size * text.vocab_size
        return decoder_weights(text) - head + head * itemsize
    return decoder_weights(text) * itemsize
