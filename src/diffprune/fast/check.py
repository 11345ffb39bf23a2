"""The fast path against the reference path on one device: the same answers, and where the time goes.

`python -m diffprune.fast.check --size 7b --device cuda --out fast.json` builds LLaVA-1.5-7B with random weights,
compiles it, compares logits and greedy tokens with the reference path and times every stage; `--size tiny --device cpu`
does the same in seconds. Every part stands alone: one that fails prints why, and the rest goes on. `--results FILE`
writes what was found of both paths' answers as a results file.
"""

import argparse
import copy
import json
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Int
from PIL import Image
from torch import Tensor

from diffprune.backbones.base import Batch
from diffprune.fast.graphs import capturing
from diffprune.fast.path import FastPath
from diffprune.methods.base import Card, Counts, Pruner
from diffprune.model import PrunedVLM
from diffprune.results import write_results, write_text
from diffprune.timing import copy_bandwidth, median_ms, times_ms, wall_ms
from diffprune.types import VisualTokens
from diffprune_lab.studies.real_size import MODELS, build

SAME = ("agreement_", "exactness_", "qwen_agreement", "scenes_")  # parts that compare the two paths' answers
SKIPPED, FAILED = "left out, the time is over", "failed: "
QUESTION = "What is written on the sign beside the old red house by the sea, and who painted it so long ago? "


class Log:
    """Findings by part, written after each."""

    def __init__(
        self, path: Path | None, limit: float, *, results: Path | None = None, commit: str | None = None
    ) -> None:
        self.path, self.limit, self.start = path, limit, time.perf_counter()
        self.results, self.commit = results, commit
        self.found: dict[str, Any] = {}

    def part(self, name: str, function: Callable[[], Any]) -> Any:
        """What the function gives, noted and printed; None where it fails or the time is over."""
        elapsed = time.perf_counter() - self.start
        if elapsed > self.limit:
            self.found[name] = SKIPPED
            print(f"[{elapsed:6.1f} s] {name}: {SKIPPED}", flush=True)
            self.write()
            return None
        try:
            result = function()
            self.found[name] = result if isinstance(result, dict | list | float) else "done"
            print(f"[{time.perf_counter() - self.start:6.1f} s] {name}: {short(self.found[name])}", flush=True)
        except Exception as error:
            result = None
            self.found[name] = f"{FAILED}{type(error).__name__}: {error}"
            print(f"[{time.perf_counter() - self.start:6.1f} s] {name}: FAILED", flush=True)
            traceback.print_exc()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        self.write()
        return result

    def lacking(self, what: str, *parts: str) -> None:
        """Note the parts that cannot be run without what failed or was left out before."""

        def refuse() -> None:
            raise RuntimeError(f"there is no {what}")

        for part in parts:
            self.part(part, refuse)

    def write(self) -> None:
        """All findings so far, and of those that compare answers a results file."""
        if self.path is not None:
            write_text(self.path, json.dumps(self.found, indent=1))
        if self.results is not None:
            rows = [row_of(part, value) for part, value in self.found.items() if part.startswith(SAME)]
            if rows:
                write_results(self.results, name="fast_same", rows=rows, commit=self.commit)


def row_of(part: str, value: Any) -> dict[str, Any]:
    """A finding as a row of results; one that failed or was left out has the reason in its place."""
    if isinstance(value, dict):
        return {"name": part, **value}
    if value == SKIPPED:
        return {"name": part, "skipped": value}
    return {"name": part, "error": str(value).removeprefix(FAILED).partition("\n")[0]}


def short(value: Any) -> str:
    """A value with its numbers rounded."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {short(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(short(item) for item in value) + "]"
    return str(value)


def median_wall_ms(function: Callable[[], Any], device: str, runs: int = 20) -> float:
    """Median wall time of a call in ms, from an idle device to its result on the host."""
    return statistics.median(times_ms(function, device, runs=runs, timer=wall_ms))


def picture(seed: int, side: int = 336) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (side, side, 3), dtype=np.uint8))


def prompts(vlm: PrunedVLM, num_text: int, rows: int, side: int = 336) -> Batch:
    """A batch of prompts with exactly that many text tokens and one picture each."""
    filler = vlm.prepare([[picture(0, side)]], ["x"]).features["input_ids"]
    around = int((filler != vlm.backbone.image_token_id).sum()) - 1  # every letter of the question is a token
    text = (QUESTION * (1 + num_text // len(QUESTION)))[: num_text - around]
    batch = vlm.prepare([[picture(row, side)] for row in range(rows)], [text] * rows)
    ids = batch.features["input_ids"]
    assert int((ids[0] != vlm.backbone.image_token_id).sum()) == num_text
    return batch


def stages(fast: FastPath, batch: Batch, device: str, repeats: int = 30) -> dict[str, Any]:
    """Median ms of every stage, and of everything up to the first token."""
    run = fast.prepare(batch)
    found: dict[str, Any] = {}
    for name in ("encode", "prune", "splice", "prefill"):
        stage = getattr(fast, name)
        found[name] = median_ms(lambda stage=stage: stage(run), device, runs=repeats)

    def one_more() -> None:
        run.steps = 1  # as if it were the first
        fast.decode(run)

    found["decode"] = median_ms(one_more, device, runs=repeats)
    found["ttft"] = median_wall_ms(lambda: fast.ttft(batch), device)
    return found | {"captured": fast.captured(run), "bucket": [run.bucket.batch, run.bucket.length]}


@torch.inference_mode()
def agreement(vlm: PrunedVLM, fast: FastPath, batch: Batch, new_tokens: int) -> dict[str, Any]:
    """How far the fast path's first logits are from the reference path's, and how many greedy tokens agree.

    `rounding_rms` is the reference path against itself with another attention kernel: the same sums in another order.
    """
    reference, lm = vlm.logits(batch)
    run = fast.start(batch)
    wanted = reference[:, -1].float()

    def rms(other: torch.Tensor) -> float:
        return float((other.float() - wanted).square().mean().sqrt() / wanted.std())

    vlm.base.set_attn_implementation("eager")
    eager = vlm.backbone.logits(lm)[:, -1]
    vlm.base.set_attn_implementation("sdpa")
    found: dict[str, Any] = {"logits_rms": rms(run.logits), "rounding_rms": rms(eager)}
    kept = run.kept
    if kept is not None:
        tokens = vlm.encode(batch)
        assert tokens is not None
        chosen = vlm.rule.select(tokens, vlm.budget.counts(tokens.mask))
        same = [len(set(a.tolist()) & set(b.tolist())) / max(1, len(a)) for a, b in zip(kept, chosen, strict=True)]
        found["same_choice"] = min(same)
    stock = vlm.backbone.generate(lm, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False)
    ids = fast.generate(batch, max_new_tokens=new_tokens)
    equal = (stock == ids).long()
    found["same_tokens"] = float(equal.float().mean())
    found["same_prefix"] = int(equal.cumprod(-1).sum(-1).min())
    return found


class Given(Pruner):
    """Keeps the tokens it was made with, whatever their features are."""

    name = "given"
    card = Card(idea="keeps what it is told to keep")

    def __init__(self, kept: Int[Tensor, "B K"]) -> None:
        super().__init__()
        self.kept = kept

    def select(self, tokens: VisualTokens, k: Counts) -> Int[Tensor, "B K"]:
        del tokens, k
        return self.kept


@torch.inference_mode()
def against_exact(vlm: PrunedVLM, fast: FastPath, batch: Batch) -> dict[str, float]:
    """How far both paths' first logits are from those of the same weights in float32, on the same kept tokens.

    The whole model is in float32, tower included: both paths' towers round, each in its own way.
    """
    reference, _ = vlm.logits(batch)
    run = fast.start(batch)
    kept = run.kept
    chosen: str | Pruner = "full" if kept is None else Given(kept)
    exact = PrunedVLM(copy.deepcopy(vlm.base).float(), vlm.processor, method=chosen, keep=vlm.budget.keep)
    wanted = exact.logits(batch)[0][:, -1]
    return {
        name: float((logits.float() - wanted).square().mean().sqrt() / wanted.std())
        for name, logits in (("fast_rms", run.logits), ("reference_rms", reference[:, -1]))
    }


@torch.inference_mode()
def eager_times(vlm: PrunedVLM, batch: Batch, device: str, repeats: int = 10) -> dict[str, float]:
    """The reference path's stages."""
    from transformers import DynamicCache

    tokens = vlm.encode(batch)
    lm = vlm.lm_inputs(batch, tokens)

    def prefill() -> None:
        hidden = vlm.base.model(
            inputs_embeds=lm.inputs_embeds,
            attention_mask=lm.attention_mask,
            position_ids=lm.position_ids,
            past_key_values=DynamicCache(),
            use_cache=True,
            **lm.extra,
        ).last_hidden_state
        vlm.base.lm_head(hidden[:, -1]).argmax(-1)

    def ttft() -> None:
        inputs = vlm.lm_inputs(batch, vlm.encode(batch))
        vlm.backbone.generate(inputs, max_new_tokens=1, do_sample=False).cpu()

    return {
        "encode": median_ms(lambda: vlm.encode(batch), device, runs=repeats),
        "prune_and_splice": median_ms(lambda: vlm.lm_inputs(batch, tokens), device, runs=repeats),
        "prefill": median_ms(prefill, device, runs=repeats),
        "ttft": median_wall_ms(ttft, device, repeats),
    }


@torch.no_grad()
def gemms(fast: FastPath, device: str, rows: tuple[int, ...]) -> dict[str, Any]:
    """The matrix products of one layer, each over enough layers that the weights do not stay in the L2 cache."""
    layers = fast.decoder.weights.layers
    found: dict[str, Any] = {}
    for name, weights in {
        "qkv": [layer.qkv[0][0] for layer in layers],
        "out": [layer.out[0] for layer in layers],
        "gate_up": [layer.gate_up[0][0] for layer in layers],
        "down": [layer.down[0] for layer in layers],
    }.items():
        for count in rows:
            x = torch.randn(count, weights[0].shape[1], dtype=weights[0].dtype, device=device)
            results = [F.linear(x, weight) for weight in weights[:2]]
            del results

            def every(x: torch.Tensor = x, weights: list[torch.Tensor] = weights) -> None:
                for weight in weights:
                    F.linear(x, weight)

            if device == "cpu":
                each = median_ms(every, device, runs=3) / len(weights)
            else:
                with capturing() as graph:
                    every()
                each = median_ms(graph.replay, device, runs=10) / len(weights)
            gigabytes = weights[0].numel() * weights[0].element_size() / 1e9
            found[f"{name}_{count}"] = {
                "us": each * 1e3,
                "gb_s": gigabytes / each * 1e3,
                "tflops": 2 * count * weights[0].numel() / each / 1e9,
            }
    return found


@torch.no_grad()
def attentions(fast: FastPath, device: str) -> dict[str, Any]:
    """Attention kernels at the shapes of the stages, in microseconds, 32 calls in one graph."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    shape = fast.decoder.weights.shape

    def timed(function: Callable[[], Any]) -> float | str:
        try:
            function()
            with capturing() as graph:
                for _ in range(32):
                    function()
            return median_ms(graph.replay, device, runs=10) / 32 * 1e3
        except Exception as error:
            return type(error).__name__

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, dtype=fast.dtype, device=device)

    found: dict[str, Any] = {}
    backends = {
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
    }
    for name, (rows, heads, length, width, causal) in {
        "vision": (1, 16, 576, 64, False),
        "vision_32": (32, 16, 576, 64, False),
        "prefill_104": (1, shape.heads, 104, shape.head_width, True),
        "prefill_616": (1, shape.heads, 616, shape.head_width, True),
    }.items():
        query, key, value = (draw(rows, length, heads, width).transpose(1, 2) for _ in range(3))
        for label, backend in backends.items():
            with sdpa_kernel(backend):
                found[f"{name}_{label}"] = timed(
                    lambda q=query, k=key, v=value, c=causal: F.scaled_dot_product_attention(q, k, v, is_causal=c)
                )
    step = torch.compile(attend_one, dynamic=False, fullgraph=True)
    for rows, columns in ((1, 136), (1, 680), (32, 136), (32, 680)):
        query = draw(rows, shape.key_heads, shape.heads // shape.key_heads, shape.head_width)
        key, value = (draw(rows, shape.key_heads, columns, shape.head_width) for _ in range(2))
        seen = (torch.arange(columns, device=device) < columns - 8).expand(rows, 1, 1, columns).contiguous()
        for label, backend in backends.items():
            with sdpa_kernel(backend):
                found[f"decode_{rows}_{columns}_{label}"] = timed(
                    lambda q=query, k=key, v=value, m=seen: F.scaled_dot_product_attention(q, k, v, attn_mask=m)
                )
        found[f"decode_{rows}_{columns}_sums"] = timed(lambda q=query, k=key, v=value, m=seen: step(q, k, v, m))
    return found


def attend_one(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Attention of a few queries as plain sums, which a compiler can fuse; [B, J, G, E] over [B, J, C, E]."""
    logits = (query[:, :, :, None].float() * keys[:, :, None].float()).sum(-1) * query.shape[-1] ** -0.5
    weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
    return (weights[..., None] * values[:, :, None].float()).sum(-2).to(query.dtype)


def kernels(function: Callable[[], Any], rows: int = 22) -> list[list[Any]]:
    """The kernels of one call, by total time: name, calls, microseconds."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        function()
        torch.cuda.synchronize()
    events = [event for event in profiler.key_averages() if event.self_device_time_total > 0]
    events.sort(key=lambda event: -event.self_device_time_total)
    print(f"  total {sum(event.self_device_time_total for event in events):.0f} us, {len(events)} kinds of kernel")
    for event in events[:rows]:
        print(f"  {event.self_device_time_total:9.1f} us {event.count:5d} x {event.key[:110]}")
    return [[event.key[:80], event.count, event.self_device_time_total] for event in events[:rows]]


def randomise(vlm: PrunedVLM) -> None:
    """Scorer weights away from their start, at which every token has the same logit."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in vlm.method.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.02)


def compile_and_say(log: Log, vlm: PrunedVLM, **options: Any) -> FastPath:
    """A fast path, with what it took printed and noted."""
    fast = FastPath(vlm, **options)
    extra = fast.report.extra_bytes
    print(f"  seconds {short(fast.report.seconds)}")
    print(f"  extra GB {short({key: value / 1e9 for key, value in extra.items()})}", flush=True)
    named = {key: value for key, value in options.items() if key != "share"}
    log.found.setdefault("reports", []).append(
        {"method": vlm.method.name, "options": named, "seconds": fast.report.seconds, "extra_bytes": extra}
    )
    return fast


def check_llava(log: Log, *, tiny: bool, device: str) -> None:
    dtype = torch.float32 if device == "cpu" else torch.float16
    config, processor = MODELS["llava-1.5-7b"][0](tiny)
    model = log.part("build", lambda: build(config, device, dtype))
    if model is None:
        log.lacking("model", "agreement_pruned", "exactness_pruned", "agreement_full", "exactness_full")
        return
    model.generation_config.eos_token_id = None
    weights = sum(p.numel() * p.element_size() for p in model.model.language_model.layers.parameters())
    weights += model.lm_head.weight.numel() * model.lm_head.weight.element_size()
    copied = log.part("bandwidth", lambda: {"copy_gb_s": copy_bandwidth(device, size=2**20 if tiny else 2**30) / 1e9})
    if copied:
        floor = weights / copied["copy_gb_s"] / 1e6
        log.part("floor_ms", lambda: {"weights_gb": weights / 1e9, "floor_ms": floor})
    repeats = 3 if device == "cpu" else 30
    keep, texts = 64, (40, 100)
    full = PrunedVLM(model, processor, method="full")
    pruned = full.with_method("diffprune", keep=keep)
    randomise(pruned)
    short_prompt = prompts(full, texts[0], 1)
    log.part("eager_full", lambda: eager_times(full, short_prompt, device, min(repeats, 10)))
    log.part("eager_pruned", lambda: eager_times(pruned, short_prompt, device, min(repeats, 10)))

    def compiled(vlm: PrunedVLM, **options: Any) -> FastPath:
        return compile_and_say(log, vlm, **{"text_buckets": texts, "max_new_tokens": 32, **options})

    fast = log.part("compile_pruned", lambda: compiled(pruned))
    if fast is not None:
        for text in texts:
            batch = prompts(full, text, 1)
            log.part(f"pruned_{text}", lambda batch=batch: stages(fast, batch, device, repeats))
        log.part("agreement_pruned", lambda: agreement(pruned, fast, short_prompt, 16))
        log.part("exactness_pruned", lambda: against_exact(pruned, fast, short_prompt))
        if device != "cpu":
            run = fast.start(short_prompt)
            for name in ("encode", "prune", "prefill", "decode"):
                graph = {
                    "encode": run.picture.encode if run.picture else None,
                    "prune": run.chooser.prune if run.chooser else None,
                    "prefill": run.bucket.prefill,
                    "decode": run.bucket.decode,
                }[name]
                if graph is not None:
                    log.part(f"kernels_{name}", lambda graph=graph: kernels(graph))
    else:
        log.lacking("fast path", "agreement_pruned", "exactness_pruned")
    whole = log.part("compile_full", lambda: compiled(full, share=fast, text_buckets=texts[:1]))
    if whole is not None:
        log.part(f"full_{texts[0]}", lambda: stages(whole, short_prompt, device, repeats))
        log.part("agreement_full", lambda: agreement(full, whole, short_prompt, 16))
        log.part("exactness_full", lambda: against_exact(full, whole, short_prompt))
        if device != "cpu":
            log.part("kernels_prefill_full", lambda: kernels(whole.start(short_prompt).bucket.prefill))
    else:
        log.lacking("fast path", "agreement_full", "exactness_full")
    del whole
    rows = 2 if tiny else 32
    many = prompts(full, texts[0], rows)
    for name, vlm in (("pruned", pruned), ("full", full)):
        several = log.part(
            f"compile_{name}_{rows}",
            lambda vlm=vlm: compiled(vlm, share=fast, batch_sizes=(rows,), text_buckets=texts[:1], max_new_tokens=8),
        )
        if several is not None:
            log.part(f"{name}_batch_{rows}", lambda several=several: stages(several, many, device, min(repeats, 10)))
        del several


def check_variants(log: Log, *, tiny: bool, device: str) -> None:
    """What each choice of the fast path is worth: kernels by themselves, other methods, options one by one."""
    dtype = torch.float32 if device == "cpu" else torch.float16
    config, processor = MODELS["llava-1.5-7b"][0](tiny)
    model = log.part("build_again", lambda: build(config, device, dtype))
    if model is None:
        return
    model.generation_config.eos_token_id = None
    pruned = PrunedVLM(model, processor, method="diffprune", keep=64)
    randomise(pruned)
    batch, repeats = prompts(pruned, 40, 1), 3 if device == "cpu" else 30
    small: dict[str, Any] = {"text_buckets": (40,), "max_new_tokens": 32}
    fast = log.part("compile_base", lambda: compile_and_say(log, pruned, **small))
    if fast is None:
        return
    log.part("base", lambda: stages(fast, batch, device, repeats))
    log.part("gemms", lambda: gemms(fast, device, (104,) if tiny else (1, 104, 128, 616)))
    if device != "cpu":
        log.part("attentions", lambda: attentions(fast, device))
    for method in ("cls_attention", "divprune", "holov", "visionzip", "fastv", "pyramiddrop"):
        other = pruned.with_method(method)
        path = log.part(f"compile_{method}", lambda other=other: compile_and_say(log, other, share=fast, **small))
        if path is not None:
            log.part(f"method_{method}", lambda path=path: stages(path, batch, device, repeats))
        del path
    for name, options in {
        "autotune": {"autotune": True},
        "no_compile": {"compile_layers": False},
        "no_fuse": {"fuse": False},
    }.items():
        if tiny and name != "no_fuse":  # the others are about kernels
            continue
        path = log.part(f"compile_{name}", lambda options=options: compile_and_say(log, pruned, **small, **options))
        if path is not None:
            log.part(f"variant_{name}", lambda path=path: stages(path, batch, device, repeats))
        if path is not None and name == "autotune" and device != "cpu":
            run = path.start(batch)
            for part, stage in (("encode", run.picture and run.picture.encode), ("prune", run.chooser.prune)):
                log.part(f"kernels_{part}_autotune", lambda stage=stage: kernels(stage))
        del path


def check_qwen(log: Log, *, tiny: bool, device: str) -> None:
    dtype = torch.float32 if device == "cpu" else torch.float16
    described = log.part("qwen_config", lambda: MODELS["qwen2.5-vl-7b"][0](tiny))
    model = described and log.part("qwen_build", lambda: build(described[0], device, dtype))
    if not model:
        log.lacking("model", "qwen_agreement")
        return
    processor = described[1]
    model.generation_config.eos_token_id = None
    side = 112 if tiny else 1008
    pruned = PrunedVLM(model, processor, method="diffprune", keep=0.1111)
    randomise(pruned)
    batch = prompts(pruned, 60, 1, side)
    repeats = 3 if device == "cpu" else 20
    log.part("qwen_eager", lambda: eager_times(pruned, batch, device, min(repeats, 5)))
    fast = log.part(
        "qwen_compile",
        lambda: FastPath(pruned, text_buckets=(60,), image_sizes=[(side, side)], max_new_tokens=32),
    )
    if fast is None:
        log.lacking("fast path", "qwen_agreement")
        return
    log.part("qwen_seconds", lambda: fast.report.seconds)
    log.part("qwen_stages", lambda: stages(fast, batch, device, repeats))
    log.part("qwen_agreement", lambda: agreement(pruned, fast, batch, 16))
    if device != "cpu":
        run = fast.start(batch)
        for name, stage in (
            ("encode", run.picture.encode if run.picture else None),
            ("prefill", run.bucket.prefill),
        ):
            if stage is not None:
                log.part(f"qwen_kernels_{name}", lambda stage=stage: kernels(stage))


def check_scenes(log: Log, *, tiny: bool, device: str) -> None:
    """Real answers: the reference model on questions about scenes, both paths, for several methods."""
    from diffprune.loading import load_base

    name = "scenes-nano" if tiny else "scenes-llava"
    loaded = log.part(f"load_{name}", lambda: load_base(name, dtype=torch.float32))
    budgets = {"full": 1.0, "cls_attention": 64, "divprune": 64, "pyramiddrop": 64}
    if loaded is None:
        log.lacking("model", *(f"scenes_{method}" for method in (*budgets, *(() if tiny else ("diffprune",)))))
        return
    model, processor = loaded[0].to(device), loaded[1]
    num_prompts = 10 if tiny else 50
    for method, keep in budgets.items():
        log.part(
            f"scenes_{method}",
            lambda method=method, keep=keep: same_answers(
                PrunedVLM(model, processor, method=method, keep=keep), num_prompts
            ),
        )
    if not tiny:  # its scorer comes with the package
        log.part(
            "scenes_diffprune",
            lambda: same_answers(
                PrunedVLM.from_pretrained("scenes-llava-diffprune", base=model, processor=processor, keep=64),
                num_prompts,
            ),
        )


def same_answers(vlm: PrunedVLM, num_prompts: int) -> dict[str, Any]:
    """How many prompts of all tasks get the same greedy tokens from both paths, and the median wall time of each."""
    from diffprune_lab.scenes import pack, render
    from diffprune_lab.scenes.tasks import TASKS, build_task

    share = num_prompts // len(TASKS)
    questions = [question for task in TASKS for question in build_task(task, "test", share).questions[:share]]
    pixels = render(pack([question.scene for question in questions]))
    assert isinstance(pixels, torch.Tensor)
    pictures = [Image.fromarray(row.permute(1, 2, 0).numpy()) for row in pixels]
    vlm.compile(max_new_tokens=12, image_sizes=[pictures[0].size])
    fast, equal, times = vlm.fast, 0, {"fast": [], "reference": []}
    for question, picture_of in zip(questions, pictures, strict=True):
        ids = {}
        for name, path in (("fast", fast), ("reference", None)):
            vlm.fast = path
            start = time.perf_counter()
            ids[name] = vlm.generate(
                [picture_of], question.prompt, max_new_tokens=12, do_sample=False, return_ids=True
            ).tolist()
            times[name].append((time.perf_counter() - start) * 1e3)
        equal += ids["fast"] == ids["reference"]
    return {"prompts": len(questions), "same": equal} | {
        f"{name}_ms": statistics.median(values) for name, values in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("7b", "tiny"), default="7b")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--results", type=Path, help="Results file for the parts that compare answers.")
    parser.add_argument("--commit", help="Commit to note where there is no git checkout.")
    parser.add_argument("--models", default="llava,qwen,scenes,variants")
    parser.add_argument("--limit", type=float, default=500.0, help="Seconds after which no further part is begun.")
    arguments = parser.parse_args()
    log = Log(arguments.out, arguments.limit, results=arguments.results, commit=arguments.commit)
    print(
        f"torch {torch.__version__}, {torch.cuda.get_device_name() if arguments.device != 'cpu' else 'cpu'}", flush=True
    )
    checks = {"llava": check_llava, "qwen": check_qwen, "scenes": check_scenes, "variants": check_variants}
    for name in arguments.models.split(","):
        checks[name](log, tiny=arguments.size == "tiny", device=arguments.device)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
