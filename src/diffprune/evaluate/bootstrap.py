"""How sure a retention or a lead is: a bootstrap over seeds and questions together, and Holm's correction.

A resample draws, of every benchmark, as many questions as it has, the same ones for every run and for the full model;
then of every method how far the mean of as many seeds as it has may lie off. Retention is linear in a run's answers
once the questions are drawn, so their draw is a small matrix product.
"""

import zlib
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

Units = Mapping[str, Sequence[float]]  # per-question values by benchmark; a benchmark's score is their mean
RESAMPLES = 10_000
LEVEL = 0.05  # a lead holds where Holm's p is below it and the 95 % interval leaves 0 out
TRANSLATED = "_cn"  # behind a benchmark's name: the same questions in the same order, in Chinese
_AT_ONCE = 500  # resamples; more would only take more memory


def resample_questions(
    runs: Sequence[Units], full: Units, *, resamples: int = RESAMPLES, seed: int = 0
) -> Float[np.ndarray, "resamples runs"]:
    """The retention of every run in every resample of the questions, in percent.

    All runs are asked the same resampled questions, so that columns can be subtracted: a question that is hard for
    both does not widen the interval of their difference. Benchmarks are taken by name: their order does not matter.
    A translation (`mmbench_cn` of `mmbench`) asks the same questions, so it is resampled as what it translates.
    """
    names = _paired_benchmarks(runs, full)
    generator = np.random.default_rng(seed)
    pruned = {name: np.asarray([units[name] for units in runs], float).T for name in names}
    whole = {name: np.asarray(full[name], float) for name in names}
    parts = []
    for first in range(0, resamples, _AT_ONCE):
        count = min(_AT_ONCE, resamples - first)
        total = np.zeros((count, len(runs)))
        drawn: dict[str, Float[np.ndarray, "resamples size"]] = {}
        for name in names:  # a translation behind its original
            first_of = _asks_as(name, whole)
            if first_of not in drawn:
                drawn[first_of] = _times_drawn(generator, count, len(whole[name]))
            times = drawn[first_of]
            reference = (times @ whole[name])[:, None]
            # A resample in which the full model has nothing right has no retention: it counts as 1.
            total += np.divide(times @ pruned[name], reference, out=np.ones_like(total), where=reference > 0)
        parts.append(100.0 * total / len(names))
    return np.concatenate(parts)


def _paired_benchmarks(runs: Sequence[Units], full: Units) -> list[str]:
    """The benchmarks that every run answered, by name; an error where one cannot be paired with the full model."""
    if not runs or not runs[0]:
        raise ValueError("No benchmark has answers, so nothing can be resampled: give at least one.")
    for units in runs:
        if odd := sorted(set(units) ^ set(runs[0])):
            raise ValueError(
                f"The runs cannot be compared: {odd[0]!r} was asked of one model alone; answer the same questions."
            )
        for name in units:
            if name not in full or len(units[name]) != len(full[name]) or not len(units[name]):
                raise ValueError(
                    f"The answers on {name!r} cannot be paired with the full model's: answer the same questions."
                )
    for name in runs[0]:
        if np.mean(full[name]) <= 0:
            raise ValueError(f"The full model has no score above 0 on {name!r}: measure it, or leave {name!r} out.")
    return sorted(runs[0])


def resample_seeds(
    retentions: Float[np.ndarray, "resamples runs"], *, of: str, seed: int = 0
) -> Float[np.ndarray, " resamples"]:
    """The mean over a method's runs in every resample, off by as much as other seeds might; one run has no seeds.

    Every method draws by itself: nothing says that one seed makes two trainings alike, and where it does the interval
    of a lead is too wide rather than too narrow. Drawn from Student's t by the deviation of the runs: a bootstrap of
    so few values as there are seeds has no tails. Of three it gives an interval that is called 95 % and covers in 76
    of 100 cases; widened until it covers, it ends where the interval does, so p has no room between the level and
    nothing, and Holm's rule corrects nothing.

    Args:
        retentions: Of `resample_questions`, one column for each run.
        of: Whose runs they are; another name draws others.
    """
    count = retentions.shape[1]
    if count < 2:
        return retentions[:, 0]
    generator = np.random.default_rng([seed, zlib.crc32(of.encode())])
    error = retentions.std(axis=1, ddof=1) / np.sqrt(count)
    return retentions.mean(axis=1) + error * generator.standard_t(count - 1, len(retentions))


def _asks_as(name: str, whole: Mapping[str, Float[np.ndarray, " units"]]) -> str:
    """The benchmark whose questions it asks: another where it is a translation of that, else itself."""
    original = name.removesuffix(TRANSLATED)
    return original if original in whole and len(whole[original]) == len(whole[name]) else name


def _times_drawn(generator: np.random.Generator, resamples: int, size: int) -> Float[np.ndarray, "resamples size"]:
    """How often each of `size` things is in each resample."""
    drawn = np.arange(resamples)[:, None] * size + generator.integers(0, size, (resamples, size))
    return np.bincount(drawn.ravel(), minlength=resamples * size).reshape(resamples, size).astype(float)


def interval(values: Float[np.ndarray, " resamples"]) -> list[float]:
    """The 95 % interval."""
    low, high = np.percentile(values, (2.5, 97.5))
    return [float(low), float(high)]


def two_sided_p(values: Float[np.ndarray, " resamples"]) -> float:
    """How often a difference resampled is not on its side of 0, twice; never 0, for resamples are finite."""
    least = min(int((values <= 0).sum()), int((values >= 0).sum()))
    return min(1.0, 2 * (least + 1) / (len(values) + 1))


def holm(values: Sequence[float]) -> list[float]:
    """p values corrected for their number by Holm's step-down rule, in the order given."""
    corrected = [0.0] * len(values)
    largest = 0.0
    for rank, place in enumerate(sorted(range(len(values)), key=lambda place: values[place])):
        largest = max(largest, min(1.0, (len(values) - rank) * values[place]))
        corrected[place] = largest
    return corrected
