"""Everything summed up once more over hard questions: the full model has them right, a smaller picture wrong."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from diffprune.evaluate.answers import Answers
from diffprune.evaluate.downscale import DOWNSCALE

HARD = "hard"  # as `tasks` of a summary row
FEWEST = 50  # questions of which a percentage is told
RESAMPLES = 2000


def hard_rows(answers: Sequence[Answers], *, versus: str | None = None) -> tuple[list[dict[str, Any]], list[str]]:
    """A summary row per method and budget over its hard questions, and a sentence for each budget with too few.

    The full model has all of them right, so the retention is the share that a method has right. `downscale`, which has
    none by construction, is left out.

    Args:
        answers: The first are the full model's; `downscale` is among the others.
        versus: A method; rows of the others get its `lead` over them, with the interval.
    """
    full, budgets = answers[0], {one.entry.keep: one for one in answers if one.entry.method == DOWNSCALE}
    if not budgets:
        raise ValueError(
            f"hard questions are those that {DOWNSCALE} has wrong, and it is not among the methods; add it"
        )
    rows: list[dict[str, Any]] = []
    few: list[str] = []
    for keep, smaller in budgets.items():
        hard = {
            task: np.array(full.is_right(task)) & ~np.array(smaller.is_right(task), dtype=bool) for task in full.units
        }
        count = int(sum(mask.sum() for mask in hard.values()))
        if count < FEWEST:
            few.append(f"{count} questions are hard at keep={keep}, too few for a percentage (below {FEWEST})")
            continue
        draws = np.random.default_rng(0).integers(0, count, (RESAMPLES, count))
        groups: dict[str, list[Answers]] = {}
        for one in answers[1:]:
            if one.entry.keep == keep and one.entry.method != DOWNSCALE:
                groups.setdefault(one.entry.method, []).append(one)
        values = {method: _shares(same, hard) for method, same in groups.items()}
        for method, same in groups.items():
            row = {
                "method": method,
                "keep": keep,
                "retention": float(values[method].mean()),
                "ci95": _interval(values[method][draws].mean(1)),
                "n_seeds": len(same),
                "num_hard": count,
                "tasks": HARD,
            }
            if versus in values and method != versus:
                ahead = values[versus] - values[method]
                row |= {
                    "versus": versus,
                    "lead": float(ahead.mean()),
                    "lead_ci95": _interval(ahead[draws].mean(1)),
                }
            rows.append(row)
    return rows, few


def _shares(same: Sequence[Answers], hard: dict[str, Any]) -> Float[np.ndarray, " count"]:
    """Of each hard question the percentage of a method's runs that have it right."""
    runs = [np.concatenate([np.array(one.is_right(task))[mask] for task, mask in hard.items()]) for one in same]
    return 100.0 * np.mean(runs, axis=0)


def _interval(values: Float[np.ndarray, " resamples"]) -> list[float]:
    low, high = np.percentile(values, (2.5, 97.5))
    return [float(low), float(high)]
