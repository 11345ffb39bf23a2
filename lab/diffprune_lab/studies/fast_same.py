"""The fast path against the reference path on one device: whether answers agree, and how long each stage takes.

`python -m diffprune_lab.studies.fast_same --size 7b --device cuda --out fast.json` builds LLaVA-1.5-7B with random
weights, compiles it, compares logits and greedy tokens with the reference path and times every stage; `--size tiny
--device cpu` does so in seconds. Every part stands alone: one that fails prints why, and the rest goes on.
`--results FILE` writes what was found of both paths' answers as a results file.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from PIL import Image
from torch import Tensor

from diffprune.backbones.prompts import Batch
from diffprune.fast.path import FastPath
from diffprune.methods.base import Card, Counts, Pruner
from diffprune.model import PrunedVLM
from diffprune.speed.timing import median_ms, times_ms, wall_ms
from diffprune.types import VisualTokens
from diffprune_lab.studies.fast_same_log import Log, short
from diffprune_lab.studies.real_size import MODELS, build

QUESTION = "What is written on the sign beside the old red house by the sea, and who painted it so long ago? "


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
    assert int((batch.features["input_ids"][0] != vlm.backbone.image_token_id).sum()) == num_text
    return batch


def stages(fast: FastPath, batch: Batch, device: str, repeats: int = 30) -> dict[str, Any]:
    """Median ms of every stage, and of everything up to the first token."""
    request = fast.prepare(batch)
    found: dict[str, Any] = {}
    for name in ("encode", "prune", "splice", "prefill"):
        stage = getattr(fast, name)
        found[name] = median_ms(lambda stage=stage: stage(request), device, runs=repeats)

    def one_more() -> None:
        request.steps = 1  # as if it were the first
        fast.decode(request)

    found["decode"] = median_ms(one_more, device, runs=repeats)
    found["ttft"] = median_wall_ms(lambda: fast.ttft(batch), device)
    return found | {"captured": fast.captured(request), "bucket": [request.bucket.batch, request.bucket.length]}


@torch.inference_mode()
def agreement(vlm: PrunedVLM, fast: FastPath, batch: Batch, new_tokens: int) -> dict[str, Any]:
    """How far the fast path's first logits are from the reference path's, and how many greedy tokens agree.

    `rounding_rms` is the reference path against itself with another attention kernel: the same sums in another order.
    """
    reference, lm = vlm.logits(batch)
    request = fast.start(batch)
    wanted = reference[:, -1].float()

    def rms(other: torch.Tensor) -> float:
        return float((other.float() - wanted).square().mean().sqrt() / wanted.std())

    vlm.base.set_attn_implementation("eager")
    eager = vlm.backbone.logits(lm)[:, -1]
    vlm.base.set_attn_implementation("sdpa")
    found: dict[str, Any] = {"logits_rms": rms(request.logits), "rounding_rms": rms(eager)}
    kept = request.kept
    if kept is not None:
        tokens = vlm.encode(batch)
        assert tokens is not None
        chosen = vlm.rule.choose(tokens, vlm.budget.counts(tokens.mask)).keep
        same = [len(set(a.tolist()) & set(b.tolist())) / max(1, len(a)) for a, b in zip(kept, chosen, strict=True)]
        found["same_choice"] = min(same)
    stock = vlm.backbone.generate(lm, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False)
    ids = fast.generate(batch, max_new_tokens=new_tokens)
    equal = (stock == ids).long()
    found["same_tokens"] = float(equal.float().mean())
    found["same_prefix"] = int(equal.cumprod(-1).sum(-1).min())
    return found


class FixedChoice(Pruner):
    """Keeps the tokens it was made with, whatever their features are."""

    name = "fixed_choice"
    card = Card(idea="keeps fixed tokens")

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
    request = fast.start(batch)
    kept = request.kept
    chosen: str | Pruner = "full" if kept is None else FixedChoice(kept)
    exact = PrunedVLM(copy.deepcopy(vlm.base).float(), vlm.processor, method=chosen, keep=vlm.budget.keep)
    wanted = exact.logits(batch)[0][:, -1]
    return {
        name: float((logits.float() - wanted).square().mean().sqrt() / wanted.std())
        for name, logits in (("fast_rms", request.logits), ("reference_rms", reference[:, -1]))
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


def randomise(vlm: PrunedVLM) -> None:
    """Scorer weights away from their start, at which every token has the same logit."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in vlm.method.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.02)


def compile_and_report(log: Log, vlm: PrunedVLM, **options: Any) -> FastPath:
    """A fast path, with what it took printed and noted."""
    fast = FastPath(vlm, **options)
    extra = fast.report.extra_bytes
    gigabytes = {key: value / 1e9 for key, value in extra.items()}
    print(f"  seconds {short(fast.report.seconds)}, extra GB {short(gigabytes)}", flush=True)
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
    repeats = 3 if device == "cpu" else 30
    keep, texts = 64, (40, 100)
    full = PrunedVLM(model, processor, method="full")
    pruned = full.with_method("diffprune", keep=keep)
    randomise(pruned)
    short_prompt = prompts(full, texts[0], 1)
    log.part("eager_full", lambda: eager_times(full, short_prompt, device, min(repeats, 10)))
    log.part("eager_pruned", lambda: eager_times(pruned, short_prompt, device, min(repeats, 10)))

    def compiled(vlm: PrunedVLM, **options: Any) -> FastPath:
        return compile_and_report(log, vlm, **{"text_buckets": texts, "max_new_tokens": 32, **options})

    first = None
    for name, vlm, lengths in (("pruned", pruned, texts), ("full", full, texts[:1])):
        options = {"share": first, "text_buckets": lengths}
        fast = log.part(f"compile_{name}", lambda vlm=vlm, options=options: compiled(vlm, **options))
        if fast is None:
            log.lacking("fast path", f"agreement_{name}", f"exactness_{name}")
            continue
        for text in lengths:
            batch = prompts(full, text, 1)
            log.part(f"{name}_{text}", lambda fast=fast, batch=batch: stages(fast, batch, device, repeats))
        log.part(f"agreement_{name}", lambda vlm=vlm, fast=fast: agreement(vlm, fast, short_prompt, 16))
        log.part(f"exactness_{name}", lambda vlm=vlm, fast=fast: against_exact(vlm, fast, short_prompt))
        first = first or fast
    del fast
    rows = 2 if tiny else 32
    many = prompts(full, texts[0], rows)
    for name, vlm in (("pruned", pruned), ("full", full)):
        several = log.part(
            f"compile_{name}_{rows}",
            lambda vlm=vlm: compiled(vlm, share=first, batch_sizes=(rows,), text_buckets=texts[:1], max_new_tokens=8),
        )
        if several is not None:
            log.part(f"{name}_batch_{rows}", lambda several=several: stages(several, many, device, min(repeats, 10)))
        del several


def check_qwen(log: Log, *, tiny: bool, device: str) -> None:
    dtype = torch.float32 if device == "cpu" else torch.float16
    described = log.part("qwen_config", lambda: MODELS["qwen2.5-vl-7b"][0](tiny))
    model = described and log.part("qwen_build", lambda: build(described[0], device, dtype))
    if not model:
        log.lacking("model", "qwen_agreement")
        return
    model.generation_config.eos_token_id = None
    side = 112 if tiny else 1008
    pruned = PrunedVLM(model, described[1], method="diffprune", keep=0.1111)
    randomise(pruned)
    batch = prompts(pruned, 60, 1, side)
    repeats = 3 if device == "cpu" else 20
    log.part("qwen_eager", lambda: eager_times(pruned, batch, device, min(repeats, 5)))
    fast = log.part(
        "qwen_compile",
        lambda: compile_and_report(log, pruned, text_buckets=(60,), image_sizes=[(side, side)], max_new_tokens=32),
    )
    if fast is None:
        log.lacking("fast path", "qwen_agreement")
        return
    log.part("qwen_stages", lambda: stages(fast, batch, device, repeats))
    log.part("qwen_agreement", lambda: agreement(pruned, fast, batch, 16))


def check_scenes(log: Log, *, tiny: bool, device: str) -> None:
    """Real answers: the reference model on questions about scenes, both paths, for several methods."""
    from diffprune.loading import load_base

    name = "scenes-nano" if tiny else "scenes-llava"
    loaded = log.part(f"load_{name}", lambda: load_base(name, dtype=torch.float32))
    budgets = {"full": 1.0, "cls_attention": 64, "divprune": 64, "pyramiddrop": 64}
    if not tiny:
        budgets["diffprune"] = 64  # its scorer comes with the package
    if loaded is None:
        log.lacking("model", *(f"scenes_{method}" for method in budgets))
        return
    model, processor = loaded[0].to(device), loaded[1]

    def compare(method: str) -> dict[str, Any]:
        if method == "diffprune":
            vlm = PrunedVLM.from_pretrained("scenes-llava-diffprune", base=model, processor=processor, keep=64)
        else:
            vlm = PrunedVLM(model, processor, method=method, keep=budgets[method])
        return same_answers(vlm, 10 if tiny else 50)

    for method in budgets:
        log.part(f"scenes_{method}", lambda method=method: compare(method))


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
    greedy: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "return_ids": True}
    fast, equal, times = vlm.fast, 0, {"fast": [], "reference": []}
    for question, picture_of in zip(questions, pictures, strict=True):
        ids = {}
        for name, path in (("fast", fast), ("reference", None)):
            vlm.fast = path
            start = time.perf_counter()
            ids[name] = vlm.generate([picture_of], question.prompt, **greedy).tolist()
            times[name].append((time.perf_counter() - start) * 1e3)
        equal += ids["fast"] == ids["reference"]
    medians = {f"{name}_ms": statistics.median(values) for name, values in times.items()}
    return {"prompts": len(questions), "same": equal, **medians}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=("7b", "tiny"), default="7b")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--results", type=Path, help="Results file for the parts that compare answers.")
    parser.add_argument("--commit", help="Commit to note where there is no git checkout.")
    parser.add_argument("--models", default="llava,qwen,scenes")
    parser.add_argument("--limit", type=float, default=500.0, help="Seconds after which no further part is begun.")
    arguments = parser.parse_args()
    log = Log(arguments.out, arguments.limit, results=arguments.results, commit=arguments.commit)
    device = "cpu" if arguments.device == "cpu" else torch.cuda.get_device_name()
    print(f"torch {torch.__version__}, {device}", flush=True)
    checks = {"llava": check_llava, "qwen": check_qwen, "scenes": check_scenes}
    for name in arguments.models.split(","):
        checks[name](log, tiny=arguments.size == "tiny", device=arguments.device)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
