"""How much of the full model's quality is left: the paper's Avg. column, and how sure one can be of it."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from statistics import fmean

import numpy as np
from jaxtyping import Float


def retention(scores: Mapping[str, float | None], full: Mapping[str, float | None]) -> float:
    """The plain mean over benchmarks of score / full score, in percent; a benchmark without a score does not count.

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


Units = Mapping[str, Sequence[float]]  # per-question values by benchmark; a benchmark's score is their mean


def retention_ci95(units: Units, full: Units, *, resamples: int = 2000, seed: int = 0) -> tuple[float, float]:
    """The 95 % interval of the retention under a paired bootstrap over questions.

    Args:
        units: Per-question values of the pruned model by benchmark.
        full: Those of the full model, for the same questions in the same order.
    """
    return _interval(resampled_retention(units, full, resamples=resamples, seed=seed))


def lead(ours: Units, theirs: Units, full: Units) -> float:
    """Points of retention by which one pruned model is ahead of another."""
    means, others, reference = ({name: fmean(unit) for name, unit in units.items()} for units in (ours, theirs, full))
    return retention(means, reference) - retention(others, reference)


def lead_ci95(ours: Units, theirs: Units, full: Units, *, resamples: int = 2000, seed: int = 0) -> tuple[float, float]:
    """The 95 % interval of the lead: both models and the full one are asked the same resampled questions."""
    if set(ours) != set(theirs):
        odd = sorted(set(ours) ^ set(theirs))[0]
        raise ValueError(f"The lead cannot be taken: {odd!r} was asked of one model alone; answer the same questions.")
    a, b = (resampled_retention(units, full, resamples=resamples, seed=seed) for units in (ours, theirs))
    return _interval(a - b)


def resampled_retention(units: Units, full: Units, *, resamples: int, seed: int) -> Float[np.ndarray, " resamples"]:
    """The retention in every resample of a paired bootstrap.

    Every resample draws questions of each benchmark with replacement, and the same ones for both models, so that a
    question that is hard for both does not widen the interval. The draws follow from the seed and the numbers of
    questions: two calls with the same benchmarks resample alike, and their results can be subtracted.
    """
    if not units:
        raise ValueError("No benchmark has answers, so nothing can be resampled: give at least one.")
    names = sorted(units)  # by name: the interval does not depend on the order of the tasks
    for name in names:
        if name not in full or len(units[name]) != len(full[name]) or not len(units[name]):
            raise ValueError(
                f"The answers on {name!r} cannot be paired with the full model's: answer the same questions."
            )
    total = np.zeros(resamples)
    for name, times in zip(names, _times_drawn(tuple(len(full[name]) for name in names), resamples, seed), strict=True):
        pruned_values, full_values = np.asarray(units[name], float), np.asarray(full[name], float)
        if full_values.mean() <= 0:
            raise ValueError(f"The full model has no score above 0 on {name!r}: measure it, or leave {name!r} out.")
        reference = times @ full_values
        # A resample in which the full model has nothing right has no retention.
        ratio = np.divide(times @ pruned_values, reference, out=np.ones(resamples), where=reference > 0)
        total += 100.0 * ratio
    return total / len(names)


@lru_cache(maxsize=2)  # a table has many rows over the same questions
def _times_drawn(sizes: tuple[int, ...], resamples: int, seed: int) -> list[Float[np.ndarray, "resamples _"]]:
    """For every benchmark how often each of its questions is in each resample."""
    generator = np.random.default_rng(seed)
    rows = np.arange(resamples)[:, None]
    found = []
    for size in sizes:
        drawn = rows * size + generator.integers(0, size, (resamples, size))
        found.append(np.bincount(drawn.ravel(), minlength=resamples * size).reshape(resamples, size).astype(float))
    return found


def _interval(values: Float[np.ndarray, " resamples"]) -> tuple[float, float]:
    low, high = np.percentile(values, (2.5, 97.5))
    return float(low), float(high)
