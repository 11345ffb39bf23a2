"""A plan beside what was measured: curves fitted to rows of `diffprune profile`, and predicted over measured times."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from diffprune.evaluate.downscale import DOWNSCALE
from diffprune.methods.base import LayerPruner
from diffprune.methods.options import parse_method
from diffprune.nn.language import LanguageSpec
from diffprune.results import Results
from diffprune.shapes import SHAPES
from diffprune.speed.flops import layer_tokens
from diffprune.speed.gpus import Gpu, find_gpu, gpu_of_device
from diffprune.speed.plan import describe, dropping_work, prefill_work, vision_work
from diffprune.speed.roofline import FEWEST_POINTS, Calibration, Work, fit_curve
from diffprune.types import Budget


def measured_rows(results: Results, path: str) -> list[dict[str, Any]]:
    """Rows of a profile on that path, in the model's own precision."""
    return [
        row
        for row in results.rows
        if row.get("path") == path and "prefill_ms" in row and row.get("backbone") in SHAPES and "precision" not in row
    ]


def is_even(row: dict[str, Any]) -> bool:
    """Whether the row's language model holds the same tokens in all layers: to such rows curves are fitted."""
    return row["method"] == DOWNSCALE or not parse_method(row["method"]).kind.is_inside


def even_rows(results: Results, path: str) -> list[dict[str, Any]]:
    """The measured rows to which curves are fitted (`is_even`)."""
    return [row for row in measured_rows(results, path) if is_even(row)]


def card_of(found: Sequence[Results], fallback: Gpu | None = None) -> Gpu:
    """The one card that results were measured on: what they name, or the fallback where that is no known card."""
    names = {gpu_of_device(results.device) for results in found}
    if len(names) == 1 and None not in names:
        return find_gpu(names.pop())
    if len(names) > 1 or fallback is None:
        raise ValueError(
            f"the results are of {', '.join(results.device for results in found)}, which is not one known card; "
            "name it with --gpu"
        )
    return fallback


def calibrate(found: Sequence[Results], path: str, gpu: Gpu | None = None) -> Calibration:
    """Curves fitted to what `diffprune profile` measured on one card; `gpu` is it where the results name none known."""
    rows = [row for results in found for row in even_rows(results, path)]
    gpu = card_of(found, gpu)
    vision = [
        (vision_work(describe(row["backbone"]), row["num_visual"], row["batch"]), row["encode_ms"])
        for row in rows
        if row["method"] in ("full", "diffprune")  # others ask the tower for more than features
    ]
    stages = ("encode_ms", "pruner_ms", "splice_ms", "prefill_ms")
    rests = [max(0.0, row["ttft_ms"] - sum(row.get(key, 0.0) for key in stages)) for row in rows if row["batch"] == 1]
    return Calibration(
        prefill=fit_curve([measured_prefill(row) for row in rows], gpu),
        vision=fit_curve(vision, gpu),
        host_ms=statistics.median(rests) if rests else 0.0,
        card=gpu,
        source=f"fitted to {len(rows)} measured rows, {', '.join(dict.fromkeys(item.device for item in found))}",
    )


def measured_prefill(row: dict[str, Any]) -> tuple[Work, float]:
    """What the language model did in a measured row, and its milliseconds."""
    return prefill_work(describe(row["backbone"]), row["num_columns"], row["batch"]), row["prefill_ms"]


def predicted_prefill(row: dict[str, Any], calibration: Calibration, gpu: Gpu) -> float:
    """Milliseconds that a measured row's prefill should have taken; the choices of a method inside it not counted."""
    model = describe(row["backbone"])
    if is_even(row):
        return calibration.prefill.ms(measured_prefill(row)[0], gpu)
    num_layers, num_visual = model.text.num_hidden_layers, row["num_visual"]
    specs = {
        "block": model.block,
        "language": LanguageSpec.from_config(model.config),
    }
    with torch.device("meta"):  # how many it keeps where does not depend on its weights
        pruner = parse_method(row["method"]).build(**specs)
    assert isinstance(pruner, LayerPruner)
    stages = pruner.stages(num_layers, num_visual, Budget(row["keep"]).count(num_visual))
    layers = layer_tokens(stages, num_layers, num_visual, row["num_columns"] - num_visual)
    return sum(calibration.prefill.ms(work, gpu) for work in dropping_work(model, layers, row["batch"]))


def held_out(found: Sequence[Results], path: str, gpu: Gpu) -> list[float]:
    """Predicted over measured prefill of each even row by a curve fitted to the others; nothing where these are few."""
    points = [measured_prefill(row) for results in found for row in even_rows(results, path)]
    if len(points) <= FEWEST_POINTS:
        return []
    return [
        fit_curve([*points[:index], *points[index + 1 :]], gpu).ms(work, gpu) / ms
        for index, (work, ms) in enumerate(points)
    ]


def compare(results: Results, calibration: Calibration, gpu: Gpu, path: str) -> list[dict[str, Any]]:
    """Predicted beside measured prefill, one row for each row measured."""
    compared = []
    for row in measured_rows(results, path):
        predicted = predicted_prefill(row, calibration, gpu)
        keys = ("backbone", "method", "path", "batch", "num_text", "num_kept", "prefill_ms")
        compared.append(
            {
                **{key: row[key] for key in keys},
                "predicted_ms": predicted,
                "predicted_over_measured": predicted / row["prefill_ms"],
            }
        )
    return compared


def as_source(calibration: Calibration) -> str:
    """The calibration as it stands in `plan.CALIBRATIONS`."""
    curves = asdict(calibration)
    lines = [
        f"    {part}=Curve(" + ", ".join(f"{key}={value:.3g}" for key, value in curves[part].items()) + "),"
        for part in ("prefill", "vision")
    ]
    return "\n".join(
        [
            "Calibration(",
            *lines,
            f"    host_ms={calibration.host_ms:.3g},",
            f"    source={calibration.source!r},",
            f"    card={calibration.card!r},",
            ")",
        ]
    )
