"""What methods answered to the same questions, scored, and kept beside the results file.

Nothing here runs a model, so that answers of several runs can be joined and summed up again anywhere.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffprune.results import write_text

SUFFIX = ".answers.json"  # of the file beside the results file
Keep = int | float


@dataclass(frozen=True, slots=True)
class Entry:
    """One method at one budget with one seed, as it is listed."""

    method: str
    keep: Keep
    seed: int


@dataclass(frozen=True, slots=True)
class Answers:
    """One measurement's answers, scored: by task the score, its own unit and the values of the scored questions.

    `seconds` is the time the answers took, the encoding of the pictures aside; `average` the visual tokens a decoder
    layer held, mean over layers and prompts, where a method drops them inside the language model.
    """

    entry: Entry
    said: list[str]
    score: dict[str, float]
    raw: dict[str, float]
    units: dict[str, list[float]]
    seconds: float = 0.0
    average: float | None = None

    @property
    def average_key(self) -> dict[str, float]:
        """`average` as a row has it: not at all where K is what every layer holds."""
        return {} if self.average is None else {"average": self.average}


@dataclass(frozen=True, slots=True)
class Sheet:
    """Questions and every run's answers to them; the first run is the full model.

    Args:
        questions: One {"id", "task", "prompt", "answer"} for each prompt.
        chance: By task the score of guessing.
    """

    questions: list[dict[str, Any]]
    chance: dict[str, float]
    answers: list[Answers] = field(default_factory=list)


# Files ---------------------------------------------------------------------------------------------------------------


def answers_file(results: Path) -> Path:
    """Where the answers of a results file are kept."""
    return results.with_suffix(SUFFIX)


def write_sheet(path: Path, sheet: Sheet) -> None:
    """Every answer beside its question, so that differences can be looked at and tested."""
    runs = [
        {
            "method": one.entry.method,
            "keep": one.entry.keep,
            "seed": one.entry.seed,
            "said": one.said,
            "score": one.score,
            "raw": one.raw,
            "units": one.units,
            "seconds": one.seconds,
            **one.average_key,
        }
        for one in sheet.answers
    ]
    write_text(path, json.dumps({"questions": sheet.questions, "chance": sheet.chance, "runs": runs}))


def read_sheet(path: Path) -> Sheet:
    """The answers of a file that `write_sheet` wrote."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        answers = [
            Answers(
                entry=Entry(one["method"], one["keep"], one["seed"]),
                **{key: one[key] for key in ("said", "score", "raw", "units", "seconds")},
                average=one.get("average"),
            )
            for one in content["runs"]
        ]
        return Sheet(content["questions"], content["chance"], answers)
    except OSError as error:
        raise ValueError(
            f"cannot read the answers {path} ({error.strerror}); `diffprune eval --out` keeps them beside its results"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no answers of this version; write it again with `diffprune eval`") from error
