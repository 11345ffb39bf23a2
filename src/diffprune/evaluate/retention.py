"""How much of the full model's quality is left: the paper's Avg. column."""

from collections.abc import Mapping


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
