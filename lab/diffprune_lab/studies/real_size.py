"""Models of the real size with random weights, written as the hub's files are, loaded, pruned and checked.

`python -m diffprune_lab.studies.real_size --out results/backbones_7b.json` builds LLaVA-1.5-7B and Qwen2.5-VL-7B on a
GPU, saves them in the hub's own layout, loads them through `PrunedVLM.from_pretrained`, answers when pruned and
compares every surviving position with the untouched model under a mask: in bfloat16, beside what bfloat16's rounding
costs by itself, and in float32, where nothing but the cut could differ. There are no trained weights in this.
`--size tiny` runs the same on a CPU.
"""

import argparse
import json
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from diffprune.backbones.prompts import Batch
from diffprune.model import PrunedVLM
from diffprune.results import write_results
from diffprune.shapes import SHAPES, build

SHARD_BYTES = 4 * 2**30


MODELS = {"llava-1.5-7b": (SHAPES["llava-1.5-7b"], 64), "qwen2.5-vl-7b": (SHAPES["qwen2.5-vl-7b"], 0.1111)}


def hub_name(key: str, model_type: str) -> str:
    """A weight's name as the hub's files have it, from the name inside transformers 5."""
    if model_type == "llava":
        if key.startswith("lm_head."):
            return f"language_model.{key}"
        key = (
            key.removeprefix("model.").replace("language_model.", "language_model.model.", 1)
            if "language_model." in key
            else key.removeprefix("model.")
        )
        if key.startswith("vision_tower.") and not key.startswith("vision_tower.vision_model."):
            key = key.replace("vision_tower.", "vision_tower.vision_model.", 1)
        return key
    return key.replace("model.language_model.", "model.", 1).replace("model.visual.", "visual.", 1)


def save_like_the_hub(model: Any, processor: Any, folder: Path) -> int:
    """Configuration, processor and sharded weights under the hub's names; returns the bytes of the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    processor.save_pretrained(folder)
    shards: list[dict[str, Tensor]] = [{}]
    used = total = 0
    for key, value in model.state_dict().items():
        size = value.numel() * value.element_size()
        if shards[-1] and used + size > SHARD_BYTES:
            shards.append({})
            used = 0
        shards[-1][hub_name(key, model.config.model_type)] = value.detach().cpu().contiguous()
        used, total = used + size, total + size
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        index |= dict.fromkeys(shard, name)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    )
    return total


@torch.inference_mode()
def check(name: str, folder: Path, *, device: str, dtype: torch.dtype, tiny: bool) -> dict[str, Any]:
    """Load through `from_pretrained`, generate, and compare with the untouched model under a mask."""
    keep = MODELS[name][1]
    pruner = folder.parent / f"{folder.name}-pruner"
    start = time.perf_counter()
    vlm = PrunedVLM.from_pretrained(pruner, keep=keep, dtype=dtype, device_map=None if tiny else device)
    load_s = time.perf_counter() - start
    size = (336, 336) if "llava" in name else (112, 84) if tiny else (1008, 1008)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8))
    start = time.perf_counter()
    ids = vlm.generate(
        [image], "What is in the picture?", max_new_tokens=32, min_new_tokens=32, do_sample=False, return_ids=True
    )
    generate_s = time.perf_counter() - start

    batch = vlm.prepare([image], ["What is in the picture?"])
    lm = vlm.lm_inputs(batch, vlm.encode(batch))
    row: dict[str, Any] = {
        "backbone": name,
        "dtype": str(dtype).removeprefix("torch."),
        "keep": keep,
        "num_visual": int((batch.features["input_ids"] == vlm.backbone.image_token_id).sum()),
        "num_kept": int(lm.visual.sum()),
        "parameters": sum(parameter.numel() for parameter in vlm.base.parameters()),
        "new_tokens": ids.shape[1],
        "load_s": load_s,
        "generate_s": generate_s,
    }
    row |= differences(vlm, batch)
    vlm.base.float()
    batch = replace(
        batch,
        features={key: value.float() if value.is_floating_point() else value for key, value in batch.features.items()},
    )
    return row | {f"{key}_float32": value for key, value in differences(vlm, batch).items()}


@torch.inference_mode()
def differences(vlm: PrunedVLM, batch: Batch) -> dict[str, float]:
    """How far our logits are from the untouched model's under a mask, relative to their deviation.

    `rounding` is the untouched model against itself with another attention kernel: the same sums in another order.
    `packed` is the control: kept tokens numbered without gaps, which must be far off.
    """
    ours, lm = vlm.logits(batch)
    real = lm.attention_mask[0].bool()
    mask = torch.zeros_like(batch.features["attention_mask"]).scatter(1, lm.source, lm.attention_mask)
    inputs = {**batch.features, "attention_mask": mask, "position_ids": vlm.backbone.positions(batch)}

    def stock() -> Tensor:
        return vlm.base(**inputs).logits[mask.bool()].float()

    reference = stock()
    vlm.base.set_attn_implementation("eager")
    eager = stock()
    vlm.base.set_attn_implementation("sdpa")
    positions, vlm.positions = vlm.positions, "packed"
    packed = vlm.logits(batch)[0]
    vlm.positions = positions

    def rms(other: Tensor) -> float:
        return float((other.float() - reference).square().mean().sqrt() / reference.std())

    return {
        "masked_rms": rms(ours[0, real]),
        "rounding_rms": rms(eager),
        "packed_rms": rms(packed[0, real]),
        "same_next_token": float((ours[0, real].argmax(-1) == reference.argmax(-1)).float().mean()),
    }


def measure(name: str, *, device: str, dtype: torch.dtype, tiny: bool, folder: Path) -> dict[str, Any]:
    """Build, save, forget, load and check one model."""
    config, processor = MODELS[name][0](tiny)
    model = build(config, device, dtype)
    base = folder / name
    total = save_like_the_hub(model, processor, base)
    pruned = PrunedVLM(model, processor, method="diffprune", keep=MODELS[name][1])
    with torch.no_grad():  # a scorer fresh from its start gives every token the same logit
        for parameter in pruned.method.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=0.02)
    pruned.save_pretrained(folder / f"{name}-pruner", base_id=str(base))
    del pruned, model
    if device != "cpu":
        torch.cuda.empty_cache()
    row = check(name, base, device=device, dtype=dtype, tiny=tiny)
    shutil.rmtree(base)
    return {**row, "weights_gb": total / 1e9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--size", choices=("real", "tiny"), default="real")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            row = measure(
                name,
                device=arguments.device,
                dtype=getattr(torch, arguments.dtype),
                tiny=arguments.size == "tiny",
                folder=Path(folder),
            )
        print(json.dumps(row), flush=True)
        rows.append(row)
        if arguments.out:  # after each model, so that a run cut short keeps what it has
            device = "cpu" if arguments.device == "cpu" else torch.cuda.get_device_name()
            notes = (
                "random weights; differences relative to the deviation of the stock logits; "
                "rounding is stock SDPA against stock eager"
            )
            write_results(
                arguments.out,
                name=arguments.out.stem,
                rows=rows,
                device=device,
                commit=arguments.commit,
                seeds=[0],
                notes=notes,
            )


if __name__ == "__main__":
    main()
