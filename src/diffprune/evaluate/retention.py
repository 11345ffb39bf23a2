"""How much of the full model's quality is left: the paper's Avg. column, and how sure one can be of it."""

from collections.abc import Mapping, Sequence

import numpy as np


def retention(scores: Mapping[str, float | None], full: Mapping[str, float | None]) -> float:
    """The plain mean over benchmarks of score / full score, in percent; a benchmark without a score is left out.

    Args:
        scores: Of the pruned model, by benchmark; None where there is none.
        full: Of the full model, in the same units.
    """
    measured = [name for name, score in scores.items() if score is not None]
    if not measured:
        raise ValueError("No benchmark has a score, so nothing can be averaged: give at least one score.")
    return sum(retention_of(name, scores, full) for name in measured) / len(measured)


def retention_of(name: str, scores: Mapping[str, float | None], full: Mapping[str, float | None]) -> float:
    """Score / full score of one benchmark, in percent."""
    score, reference = scores[name], full.get(name)
    if not reference:
        raise ValueError(f"The full model has no score above 0 on {name!r}: measure it, or leave {name!r} out.")
    assert score is not None
    return 100.0 * score / reference


def retention_ci95(
    units: Mapping[str, Sequence[float]], full: Mapping[str, Sequence[float]], *, resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """The 95 % interval of the retention under a paired bootstrap over questions.

    Every resample draws questions of each benchmark with replacement, and the same ones for both models, so that a
    question that is hard for both does not widen the interval.

    Args:
        units: Per-question values of the pruned model by benchmark; a benchmark's score is their mean.
        full: Those of the full model, for the same questions in the same order.
    """
    if not units:
        raise ValueError("No benchmark has answers, so nothing can be resampled: give at least one.")
    generator = np.random.default_rng(seed)
    total = np.zeros(resamples)
    for name in sorted(units):  # by name: the interval does not depend on the order of the tasks
        if name not in full or len(units[name]) != len(full[name]) or not len(units[name]):
            raise ValueError(
                f"The answers on {name!r} cannot be paired with the full model's: answer the same questions."
            )
        pruned_values, full_values = np.asarray(units[name], float), np.asarray(full[name], float)
        if full_values.mean() <= 0:
            raise ValueError(f"The full model has no score above 0 on {name!r}: measure it, or leave {name!r} out.")
        drawn = generator.integers(0, len(full_values), (resamples, len(full_values)))
        reference = full_values[drawn].mean(1)
        # A resample in which the full model has nothing right says nothing of what is left of it.
        ratio = np.divide(pruned_values[drawn].mean(1), reference, out=np.ones(resamples), where=reference > 0)
        total += 100.0 * ratio
    low, high = np.percentile(total / len(units), (2.5, 97.5))
    return float(low), float(high)
