"""A plan beside what was measured: curves fitted to rows of `diffprune profile`, and predicted over measured times."""

import json
import statistics
from collections import Counter
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
from diffprune.speed.plan import decode_work, describe, dropping_work, prefill_work, scorer_work, vision_work
from diffprune.speed.roofline import Calibration, Curve, Work, fit_curve, mean_of
from diffprune.types import Budget

Point = tuple[Work, float]  # and the milliseconds it took
ROUNDS = 2
SHAPE = ("backbone", "precision", "batch", "num_columns")
SIZE = SHAPE[:-1]  # all that was measured of a model at one batch


def measured_rows(results: Results, path: str, *, fp8: bool = False) -> list[dict[str, Any]]:
    """Rows of a profile on that path, in the model's own precision; with `fp8` those in 8 bits too."""
    precisions = (None, "fp8") if fp8 else (None,)
    return [
        row
        for row in results.rows
        if row.get("path") == path
        and "prefill_ms" in row
        and row.get("backbone") in SHAPES
        and row.get("precision") in precisions
    ]


def is_even(row: dict[str, Any]) -> bool:
    """Whether the row's language model holds the same tokens in all layers: to such rows curves are fitted."""
    return row["method"] == DOWNSCALE or not parse_method(row["method"]).kind.is_inside


def even_rows(results: Results, path: str) -> list[dict[str, Any]]:
    """The measured rows to which curves are fitted (`is_even`)."""
    return [row for row in measured_rows(results, path, fp8=True) if is_even(row)]


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
    devices = ", ".join(dict.fromkeys(item.device for item in found))
    return fit(rows, card_of(found, gpu), f"fitted to {len(rows)} measured rows, {devices}")


def fit(rows: Sequence[dict[str, Any]], gpu: Gpu, source: str) -> Calibration:
    """Curves and factors of measured rows; of rows of one shape, which methods share, the median counts."""
    stages = ("encode_ms", "pruner_ms", "splice_ms", "prefill_ms")
    rests = [max(0.0, row["ttft_ms"] - sum(row.get(key, 0.0) for key in stages)) for row in rows if row["batch"] == 1]
    language = [point for row in rows for point in (measured_prefill(row), measured_decode(row)) if point is not None]
    towers = [(family_of(row), measured_tower(row)) for row in rows if row["method"] in ("full", "diffprune")]
    vision = fit_curve([point for _, point in towers], gpu)
    main = Counter(family for family, _ in towers).most_common(1)[0][0]
    for _ in range(ROUNDS):  # the curve follows the family with the most rows, the others keep a distance from it
        factors = by_family(towers, vision, gpu)
        factors = {family: factor / factors[main] for family, factor in factors.items()}
        vision = fit_curve([(work, ms / factors[family]) for family, (work, ms) in towers], gpu)
    scorers = [(family_of(row), measured_scorer(row)) for row in rows if has_scorer(row)]
    return Calibration(
        prefill=fit_curve(merged(language), gpu),
        vision=vision,
        towers=by_family(towers, vision, gpu),
        scorers=by_family(scorers, vision, gpu),
        host_ms=statistics.median(rests) if rests else 0.0,
        card=gpu,
        source=source,
    )


def merged(points: Sequence[Point]) -> list[Point]:
    """Each piece of work once, with the median of its times."""
    times: dict[Work, list[float]] = {}
    for work, ms in points:
        times.setdefault(work, []).append(ms)
    return [(work, statistics.median(some)) for work, some in times.items()]


def by_family(points: Sequence[tuple[str, Point]], curve: Curve, gpu: Gpu) -> dict[str, float]:
    """How many times as long as the curve says each family takes, mean over its shapes."""
    families: dict[str, list[Point]] = {}
    for family, point in points:
        families.setdefault(family, []).append(point)
    return {
        family: mean_of([ms / curve.ms(work, gpu) for work, ms in merged(some)]) for family, some in families.items()
    }


def family_of(row: dict[str, Any]) -> str:
    """The family of a measured row's model."""
    return describe(row["backbone"]).config.model_type


def measured_prefill(row: dict[str, Any]) -> Point:
    """What the language model did in a measured row, and its milliseconds."""
    model, is_fp8 = describe(row["backbone"]), row.get("precision") == "fp8"
    return prefill_work(model, row["num_columns"], row["batch"], fp8=is_fp8), row["prefill_ms"]


def measured_decode(row: dict[str, Any]) -> Point | None:
    """One more token of a measured row, and its milliseconds; None where that was not measured, or in 8 bits."""
    if not row.get("decode_tok_s") or "precision" in row:
        return None
    work = decode_work(describe(row["backbone"]), row["num_columns"], row["batch"])
    return work, 1e3 * row["batch"] / row["decode_tok_s"]


def measured_tower(row: dict[str, Any]) -> Point:
    """What the tower did in a measured row, and its milliseconds."""
    return vision_work(describe(row["backbone"]), row["num_visual"], row["batch"]), row["encode_ms"]


def has_scorer(row: dict[str, Any]) -> bool:
    """Whether the time of DiffPrune's own scorer was measured in a row."""
    return row["method"] == "diffprune" and bool(row.get("pruner_ms"))


def measured_scorer(row: dict[str, Any]) -> Point:
    """What DiffPrune's scorer did in a measured row, and its milliseconds."""
    return scorer_work(describe(row["backbone"]), row["num_visual"], row["batch"]), row["pruner_ms"]


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


def held_out(found: Sequence[Results], path: str, gpu: Gpu, alike: Sequence[str] = SHAPE) -> list[dict[str, float]]:
    """Predicted over measured of each even row's stages, fitted to the other rows; nothing where these are too few.

    Args:
        alike: Rows with the same of these are left out together. Methods share a shape, so that leaving out one row of
            it would leave out nothing.
    """
    rows = [row for results in found for row in even_rows(results, path)]
    groups = [tuple(row.get(key) for key in alike) for row in rows]
    fitted: dict[tuple[Any, ...], Calibration | None] = {}
    for group in dict.fromkeys(groups):
        others = [row for row, its in zip(rows, groups, strict=True) if its != group]
        try:
            fitted[group] = fit(others, gpu, "")
        except ValueError:
            fitted[group] = None
    calibrations = [fitted[group] for group in groups]
    return [
        {} if calibration is None else stage_ratios(row, calibration, gpu)
        for row, calibration in zip(rows, calibrations, strict=True)
    ]


def stage_ratios(row: dict[str, Any], calibration: Calibration, gpu: Gpu) -> dict[str, float]:
    """Predicted over measured of the stages that a row has, each by itself."""
    family, decode = family_of(row), measured_decode(row)
    found = {"prefill": (calibration.prefill.ms(measured_prefill(row)[0], gpu), row["prefill_ms"])}
    if decode is not None:
        found["decode"] = (decode[1], calibration.prefill.ms(decode[0], gpu))  # a rate
    if row["method"] in ("full", "diffprune"):
        found["encode"] = (calibration.tower_ms(family, measured_tower(row)[0], gpu), row["encode_ms"])
    if has_scorer(row):
        found["pruner"] = (calibration.scorer_ms(family, measured_scorer(row)[0], gpu), row["pruner_ms"])
    return {stage: predicted / measured for stage, (predicted, measured) in found.items()}


def compare(results: Results, calibration: Calibration, gpu: Gpu, path: str) -> list[dict[str, Any]]:
    """Predicted beside measured prefill, one row for each row measured."""
    compared = []
    for row in measured_rows(results, path, fp8=True):
        predicted = predicted_prefill(row, calibration, gpu)
        keys = ("backbone", "method", "path", "batch", "num_text", "num_kept", "prefill_ms")
        compared.append(
            {
                **{key: row[key] for key in (*keys, "precision") if key in row},
                "predicted_ms": predicted,
                "predicted_over_measured": predicted / row["prefill_ms"],
            }
        )
    return compared


def as_json(calibration: Calibration) -> str:
    """The calibration as `plan.read_calibration` reads it, its numbers rounded."""

    def rounded(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: rounded(one) for key, one in value.items()}
        return float(f"{value:.3g}") if isinstance(value, float) else value

    values = rounded({key: value for key, value in asdict(calibration).items() if key != "card"})
    return json.dumps(values | {"card": asdict(calibration)["card"]}, indent=2) + "\n"
