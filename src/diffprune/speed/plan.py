"""What pruning will gain, before anything is trained or bought: operations, memory and times by a roofline.

The counts are exact (see `flops`); the times rest on a card's datasheet (`gpus`) and on the curves below (`roofline`),
which `calibrate.calibrate` fits to rows of `diffprune profile`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from diffprune.loading import brought_models, describe_base, describe_processor, source_of
from diffprune.nn import BlockSpec
from diffprune.registry import BACKBONES
from diffprune.shapes import SHAPES, build, is_preset
from diffprune.speed.flops import (
    block_weights,
    decoder_weights,
    encoder_flops,
    head_width,
    kv_bytes,
    layer_weights,
    prefill_flops,
    projector_flops,
    scorer_flops,
)
from diffprune.speed.gpus import Gpu
from diffprune.speed.roofline import CURVES, Calibration, Curve, Work, read_calibration
from diffprune.types import Budget

ASSUMED = "assumed, not fitted to any measurement; --calibrate RESULTS fits them"
# The fast path's are fitted by `python -m diffprune.speed.refit`; docs/profile.md says how far they are off. The eager
# rows that were measured contradict each other (launching from Python is not steady), so no curve was fitted to them.
CALIBRATIONS: dict[str, Calibration] = {
    "fast": read_calibration(CURVES),
    "eager": Calibration(
        prefill=Curve(most=0.75, half=40.0, bandwidth=0.90, launch_us=700.0),
        vision=Curve(most=0.60, half=200.0, bandwidth=0.90, launch_us=250.0),
        host_ms=1.0,
        source=ASSUMED,
    ),
}
TEXT_BUCKETS = (64, 128)  # to which the fast path pads the text of a prompt
USABLE = 0.92  # share of the card's memory that weights, caches and activations may fill
SCORER_DEPTH = 2
COLUMNS = (
    "card", "times", "batch", "kept", "ttft_ms", "speedup", "decode_tok_s", "largest_batch", "requests_s",
    "prefill_ms", "encode_ms", "pruner_ms", "tflops", "kv_mb",
)  # fmt: skip


# --- the model --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What a picture becomes.

    Args:
        visual: Tokens that a pruner chooses from.
        newlines: Placeholders behind the rows of a view (LLaVA-NeXT); one stays where its row keeps a token.
        encoded: Patches that the tower works on, in units of tokens; more than `visual` where padding is cut away.
    """

    visual: int
    newlines: int
    encoded: int

    def columns(self, num_kept: int) -> int:
        """Columns of the picture in a prompt, at the most."""
        return num_kept + min(self.newlines, num_kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What a plan needs of a model: its configuration, how it cuts pictures, and the size of its parts."""

    name: str
    config: Any
    processor: Any
    parameters: int
    vision_parameters: int

    @property
    def text(self) -> Any:
        return self.config.text_config

    @property
    def family(self) -> Any:
        return BACKBONES.get(self.config.model_type)

    @property
    def block(self) -> BlockSpec:
        """The blocks of the vision tower."""
        return self.family.tower_block(self.config)

    def count(self, size: tuple[int, int]) -> Counts:
        """What a picture of that (width, height) becomes, as its own processor counts placeholders."""
        token = getattr(self.processor, "image_token", None) or "<image>"
        prompt = self.processor(text=[str(token)], images=[Image.new("RGB", size)], return_tensors="pt")
        image_id = getattr(self.config, "image_token_id", None) or self.config.image_token_index
        placeholders = int((prompt["input_ids"] == image_id).sum())
        newlines = self.family.num_newlines(self.config, size)
        visual = placeholders - newlines
        encoded = self.family.num_encoded(self.config, size, visual)
        return Counts(visual=visual, newlines=newlines, encoded=encoded)


@cache
def describe(name: str) -> Model:
    """The model of a preset, a reference model or a folder, without its weights."""
    source = source_of(name)
    if name in SHAPES:
        config, processor = SHAPES[name](False)
    elif source is not None:
        config, processor = source.describe(name)
    elif Path(name).is_dir():
        config = describe_base(name, repr(name))
        processor = describe_processor(name, config.model_type)
    else:
        what = "is known, but there is no shape for a plan yet" if is_preset(name) else "is not known"
        raise ValueError(
            f"backbone {name!r} {what}; give one of {', '.join((*SHAPES, *brought_models()))}, or the folder of a model"
        )
    model = build(config, "meta", torch.float16)
    sizes = {key: value.numel() for key, value in model.named_parameters()}
    vision = sum(size for key, size in sizes.items() if "language_model" not in key and "lm_head" not in key)
    return Model(
        name=name, config=config, processor=processor, parameters=sum(sizes.values()), vision_parameters=vision
    )


# --- one prediction ---------------------------------------------------------------------------------------------------


def prefill_work(model: Model, num_columns: int, batch: int, itemsize: int = 2, *, fp8: bool = False) -> Work:
    """The language model over `batch` prompts of `num_columns` tokens each, padding included.

    Args:
        fp8: Its layers in 8 bits: half of the bytes, at twice the rate.
    """
    text, num_layers = model.text, model.text.num_hidden_layers
    flops, read = prefill_flops(text, num_columns), decoder_weights(text) * itemsize
    if fp8:
        flops = (flops + prefill_flops(text, 0)) / 2  # the head stays as it is
        read -= num_layers * layer_weights(text) * (itemsize - 1)
    return Work(
        flops=batch * flops,
        read=read,
        tokens=batch * num_columns,
        layers=num_layers,
    )


def dropping_work(model: Model, layers: Sequence[int], batch: int, itemsize: int = 2) -> list[Work]:
    """The language model where layers hold different numbers of tokens: one piece for each run of equal layers."""
    pieces: list[Work] = []
    weights = layer_weights(model.text)
    for num_columns, run in groupby(layers):
        count = len(list(run))
        share = prefill_flops(model.text, num_columns) - prefill_flops(model.text, 0)  # of all layers, without the head
        pieces.append(
            Work(
                flops=batch * share * count / model.text.num_hidden_layers,
                read=count * weights * itemsize,
                tokens=batch * num_columns,
                layers=count,
            )
        )
    return pieces


def vision_work(model: Model, num_encoded: int, batch: int, itemsize: int = 2) -> Work:
    """The vision tower over `batch` pictures."""
    vision = model.config.vision_config
    merge = getattr(vision, "spatial_merge_size", 1)
    return Work(
        flops=batch * encoder_flops(model.config, num_encoded),
        read=model.vision_parameters * itemsize,
        tokens=batch * num_encoded * merge * merge,
        layers=getattr(vision, "depth", None) or vision.num_hidden_layers,
    )


def scorer_work(model: Model, num_visual: int, batch: int, itemsize: int = 2) -> Work:
    """DiffPrune's scorer over `batch` pictures."""
    spec = model.block
    merge = getattr(model.config.vision_config, "spatial_merge_size", 1)
    patches = num_visual * merge * merge
    return Work(
        flops=batch * scorer_flops(spec, patches, SCORER_DEPTH),
        read=SCORER_DEPTH * block_weights(spec) * itemsize,
        tokens=batch * patches,
        layers=SCORER_DEPTH,
    )


def decode_work(model: Model, num_columns: int, batch: int, itemsize: int = 2) -> Work:
    """One more token of `batch` prompts: weights and caches are read once."""
    weights = decoder_weights(model.text)
    return Work(
        flops=2 * batch * weights,
        read=weights * itemsize + kv_bytes(model.text, num_columns, batch=batch, element_size=itemsize),
        tokens=batch,
        layers=model.text.num_hidden_layers,
    )


def padded_text(num_text: int, path: str, buckets: Sequence[int] = TEXT_BUCKETS) -> int:
    """Columns that the text of a prompt takes."""
    return num_text if path == "eager" else min((size for size in buckets if size >= num_text), default=num_text)


def predict(
    model: Model,
    gpu: Gpu,
    calibration: Calibration,
    *,
    counts: Counts,
    num_kept: int,
    num_text: int,
    batch: int,
    path: str = "fast",
    itemsize: int = 2,
    text_buckets: Sequence[int] = TEXT_BUCKETS,
) -> dict[str, float]:
    """Milliseconds of each stage and of the first token."""
    columns = counts.columns(num_kept) + padded_text(num_text, path, text_buckets)
    is_pruned = num_kept < counts.visual
    family, scorer = model.config.model_type, scorer_work(model, counts.visual, batch, itemsize)
    encode = calibration.tower_ms(family, vision_work(model, counts.encoded, batch, itemsize), gpu)
    pruner = calibration.scorer_ms(family, scorer, gpu) if is_pruned else 0.0
    project = Work(
        flops=batch * projector_flops(model.config, num_kept),
        read=projector_flops(model.config, 1) / 2 * itemsize,  # a weight does one multiply and one add for each token
        tokens=batch * num_kept,
        layers=1,
    )
    splice = calibration.vision.ms(project, gpu)
    prefill = calibration.prefill.ms(prefill_work(model, columns, batch, itemsize), gpu)
    return {
        "encode_ms": encode,
        "pruner_ms": pruner,
        "splice_ms": splice,
        "prefill_ms": prefill,
        "ttft_ms": encode + pruner + splice + prefill + calibration.host_ms,
    }


def request_bytes(model: Model, num_encoded: int, columns: int, new_tokens: int, itemsize: int) -> int:
    """Memory of one request: its cache, and the widest activations of the tower or the language model."""
    text, vision = model.text, model.block
    merge = getattr(model.config.vision_config, "spatial_merge_size", 1)
    language = columns * (6 * text.hidden_size + 3 * text.intermediate_size)
    tower = num_encoded * merge * merge * (6 * vision.width + 3 * vision.mlp_width)
    return kv_bytes(text, columns + new_tokens, element_size=itemsize) + max(language, tower) * itemsize


def fused_bytes(text_config: Any, itemsize: int) -> int:
    """Memory of the fast path's private copy of queries, keys, values, gate and up (all but out and down)."""
    queries = text_config.num_attention_heads * head_width(text_config)
    apart = text_config.hidden_size * (queries + text_config.intermediate_size)
    return text_config.num_hidden_layers * (layer_weights(text_config) - apart) * itemsize


def plan(
    name: str,
    gpu: Gpu,
    *,
    image: tuple[int, int],
    keep: int | float,
    num_text: int = 40,
    batch: int = 1,
    new_tokens: int = 32,
    path: str = "fast",
    itemsize: int = 2,
    calibration: Calibration | None = None,
    text_buckets: Sequence[int] = TEXT_BUCKETS,
) -> list[dict[str, Any]]:
    """Two rows, full and pruned, and a third with what is gained (full over pruned).

    A row whose batch does not fit the card's memory has counts and the largest batch, but no times.
    """
    if min(num_text, batch, new_tokens) < 1:
        raise ValueError(f"text={num_text}, batch={batch}, new tokens={new_tokens}: each must be 1 or more")
    model, calibration = describe(name), calibration or CALIBRATIONS[path]
    counts = model.count(image)
    free = gpu.memory * 1e9 * USABLE - model.parameters * itemsize
    if path == "fast" and free > 2 * fused_bytes(model.text, itemsize):  # else compile(fuse=False), which needs none
        free -= fused_bytes(model.text, itemsize)
    rows: list[dict[str, Any]] = []
    for method, num_kept in (("full", counts.visual), ("pruned", Budget(keep).count(counts.visual))):
        columns = counts.columns(num_kept) + padded_text(num_text, path, text_buckets)
        largest = max(0, int(free // request_bytes(model, counts.encoded, columns, new_tokens, itemsize)))

        def timed(size: int, kept: int = num_kept) -> dict[str, float]:
            return predict(
                model,
                gpu,
                calibration,
                counts=counts,
                num_kept=kept,
                num_text=num_text,
                batch=size,
                path=path,
                itemsize=itemsize,
                text_buckets=text_buckets,
            )

        def step(size: int, kept: int = columns) -> float:
            return calibration.prefill.ms(decode_work(model, kept + new_tokens, size, itemsize), gpu)

        def decoded(size: int) -> dict[str, float]:
            return {"decode_tok_s": size / step(size) * 1e3}

        row: dict[str, Any] = {
            "method": method,
            "num_visual": counts.visual,
            "num_kept": num_kept,
            "num_text": num_text,
            "batch": batch,
            "tflops": prefill_flops(model.text, counts.columns(num_kept) + num_text) / 1e12,
            "kv_mb": kv_bytes(model.text, columns + new_tokens, batch=batch, element_size=itemsize) / 1e6,
            **(timed(batch) | decoded(batch) if batch <= largest else {}),
            "largest_batch": largest,
            "requests_s": 0.0,
        }
        if largest:
            row["requests_s"] = largest / (timed(largest)["ttft_ms"] + (new_tokens - 1) * step(largest)) * 1e3
        rows.append(row)
    full, pruned = rows
    compared = ("tflops", "kv_mb", "encode_ms", "prefill_ms", "ttft_ms")
    gains: dict[str, Any] = {key: full[key] / pruned[key] for key in compared if key in full and key in pruned}
    for key in ("decode_tok_s", "largest_batch", "requests_s"):  # more is better here
        if full.get(key) and key in pruned:
            gains[key] = pruned[key] / full[key]
    return [*rows, {"method": "gain (times)", **gains}]


def plan_table(
    name: str,
    gpus: Sequence[Gpu],
    *,
    keeps: Sequence[int | float],
    batches: Sequence[int],
    calibration: Calibration,
    **options: Any,
) -> tuple[list[dict[str, Any]], list[str]]:
    """A row for the full model and one for each budget, for every card and batch, and what must not be missed.

    Args:
        options: The same for all, as `plan` takes them.
    """
    rows: list[dict[str, Any]] = []
    sentences: list[str] = []
    for gpu in gpus:
        where = {"card": gpu.name.removeprefix("NVIDIA ").removeprefix("GeForce "), "times": calibration.basis(gpu)}
        for batch in batches:
            for index, keep in enumerate(keeps):
                full, pruned, gain = plan(name, gpu, keep=keep, batch=batch, calibration=calibration, **options)
                if not index:
                    rows.append({**where, **full, "kept": full["num_kept"]})
                rows.append({**where, **pruned, "kept": pruned["num_kept"], "speedup": gain.get("ttft_ms")})
                said = remarks((full, pruned), keep, gpu)
                sentences += [f"{where['card']}: {one}" if len(gpus) > 1 else one for one in said]
    return rows, list(dict.fromkeys(sentences))


def remarks(rows: Sequence[dict[str, Any]], keep: int | float, gpu: Gpu) -> list[str]:
    """What a reader of a plan's first two rows must not miss, a sentence each."""
    full, pruned = rows[:2]
    sentences = []
    for row in (full, pruned):
        if not row["largest_batch"]:
            sentences.append(
                f"The {row['method']} model does not fit into {gpu.memory:g} GB with one request in 16 bits."
            )
        elif row["batch"] > row["largest_batch"]:
            sentences.append(
                f"A batch of {row['batch']:,} does not fit into {gpu.memory:g} GB with the {row['method']} model, "
                f"so it has no times; the largest that fits is {row['largest_batch']:,}."
            )
    if isinstance(keep, int) and keep > full["num_visual"]:
        sentences.append(f"keep={keep} is more than the picture has ({full['num_visual']}): nothing is pruned.")
    return sentences
