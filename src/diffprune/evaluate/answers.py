"""What methods answered to the same questions, scored, and kept beside the results file.

Nothing here runs a model, so that answers of several runs can be joined and summed up again anywhere.
"""

import json
import statistics
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from diffprune.atomic import write_text
from diffprune.json_files import read_json, require_kind

SUFFIX = ".answers.json"  # of the file beside the results file
QUESTION_KEYS = ("answers", "choices", "subset", "group")  # of a question in a sheet, where it has them
NUM_KEPT, FIRST_TOKEN_KL = "num_kept", "first_token_kl"
THROTTLED = "-throttled"  # behind the label of a pruner that is run as in training
OTHERWISE = " otherwise"  # behind the label of what is measured a second way
Keep = int | float
_OF_A_SHEET = ("metrics", "made_by", "places", "notes")  # in its file where there is something
_OF_A_RUN = ("said", "score", "raw", "units", "seconds")


@dataclass(frozen=True, slots=True)
class Entry:
    """One method at one budget with one seed, as it is listed."""

    method: str
    keep: Keep
    seed: int


@dataclass(frozen=True, slots=True)
class Answers:
    """One measurement's answers, scored: by task the score, its own unit and the values of the scored questions.

    Attributes:
        seconds: The time the answers took, the encoding of the pictures aside; 0 where it was not taken.
        average: The visual tokens a decoder layer held, mean over layers and prompts, where a method drops them inside
            the language model.
        values: What else was measured of each prompt, by name: `first_token_kl`, `first_token_same`, `num_kept` (of a
            picture, mean over those of the prompt), `prompt_tokens`; None where a prompt has none.
        right: By task whether each scored question counts as right; empty where its values say so (from 50 on).
        asked: The task of each prompt, as the questions beside the answers have it; empty where nobody needs it.
    """

    entry: Entry
    said: list[str]
    score: dict[str, float]
    raw: dict[str, float]
    units: dict[str, list[float]]
    seconds: float = 0.0
    average: float | None = None
    values: dict[str, list[float | None]] = field(default_factory=dict)
    right: dict[str, list[bool]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list, compare=False, repr=False)

    @property
    def more_keys(self) -> dict[str, int | float]:
        """`average` and the means of `values` as a summary row has them: only what there is."""
        return self.keys_of()

    def keys_of(self, task: str | None = None) -> dict[str, int | float]:
        """`more_keys` over the prompts of one task."""
        found: dict[str, int | float] = {} if self.average is None else {"average": self.average}
        asked = [place for place, of in enumerate(self.asked or [task] * len(self.said)) if task in (None, of)]
        known = {name: [values[place] for place in asked] for name, values in self.values.items()}
        some = {name: [value for value in values if value is not None] for name, values in known.items()}
        return found | {name: _mean(name, values) for name, values in some.items() if values}

    def is_right(self, task: str) -> list[bool]:
        """Whether each scored question of a task counts as right."""
        return self.right.get(task) or [unit >= 50.0 for unit in self.units[task]]


def mean_keys(same: Sequence[Answers]) -> dict[str, int | float]:
    """`more_keys` of one method at one budget, each averaged over the runs."""
    found = [one.more_keys for one in same]
    return {key: _mean(key, [keys[key] for keys in found]) for key in found[0] if all(key in keys for keys in found)}


def _mean(name: str, values: Sequence[int | float]) -> int | float:
    mean = statistics.fmean(values)
    return int(mean) if name == NUM_KEPT and mean.is_integer() else mean


@dataclass(frozen=True, slots=True)
class Sheet:
    """Questions and every run's answers to them; the first run is the full model.

    Args:
        questions: One {"id", "task", "prompt", "answer"} for each prompt, and whatever its metric needs besides
            (`QUESTION_KEYS`).
        chance: By task the score of guessing.
        metrics: By task the name of its metric, where it is one of the library's: answers can be scored again.
        made_by: What the answers follow from, each as a short text: questions, model, pruners, methods, budgets,
            positions, versions. Answers of another run are told apart by it.
        places: Where each question stands among all, where these are a part of them (`--shard`).
        notes: By task what the reader of its rows must know, such as the normalisation; not every task has one.
    """

    questions: list[dict[str, Any]]
    chance: dict[str, float]
    answers: list[Answers] = field(default_factory=list)
    metrics: dict[str, str] = field(default_factory=dict)
    made_by: dict[str, str] = field(default_factory=dict)
    places: list[int] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)


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
            **({} if one.average is None else {"average": one.average}),
            **{key: value for key in ("values", "right") if (value := getattr(one, key))},
        }
        for one in sheet.answers
    ]
    more = {key: value for key in _OF_A_SHEET if (value := getattr(sheet, key))}
    write_text(path, json.dumps({"questions": sheet.questions, "chance": sheet.chance, **more, "runs": runs}))


def read_sheet(path: Path) -> Sheet:
    """The answers of a file that `write_sheet` wrote, every value checked."""
    try:
        return _as_sheet(read_json(path))
    except OSError as error:
        raise ValueError(
            f"cannot read the answers {path} ({error.strerror}); `diffprune eval --out` keeps them beside its results"
        ) from error
    except ValueError as error:
        raise ValueError(
            f"{path} holds no answers of this version ({error}); write it again with `diffprune eval`"
        ) from error


def _as_sheet(content: Any) -> Sheet:
    require_kind(content, dict[str, Any], "it")
    parts = typing.get_type_hints(Sheet)
    for key in ("questions", "chance", *(key for key in _OF_A_SHEET if key in content)):
        require_kind(content.get(key), parts[key], key)
    for place, question in enumerate(content["questions"]):
        for key in ("id", "task", "prompt", "answer"):
            require_kind(question.get(key), str, f"questions[{place}].{key}")
    require_kind(content.get("runs"), list[dict[str, Any]], "runs")
    asked = [question["task"] for question in content["questions"]]
    answers = [replace(_as_answers(one, f"runs[{place}]"), asked=asked) for place, one in enumerate(content["runs"])]
    count = len(content["questions"])
    for place, one in enumerate(answers):
        if any(len(values) != count for values in (one.said, *one.values.values())):
            raise ValueError(f"runs[{place}] does not have one answer to each of {count} questions")
        if not one.score.keys() == one.raw.keys() == one.units.keys() == answers[0].units.keys():
            raise ValueError(f"runs[{place}] does not have a score for each task")
        if any(len(found) != len(answers[0].units[task]) for task, found in one.units.items()):
            raise ValueError(f"runs[{place}] has other questions scored than the first run")
        if any(len(found) != len(one.units.get(task, ())) for task, found in one.right.items()):
            raise ValueError(f"runs[{place}] does not say of each scored question whether it is right")
    more = {key: content[key] for key in _OF_A_SHEET if key in content}
    return Sheet(content["questions"], content["chance"], answers, **more)


def _as_answers(one: dict[str, Any], where: str) -> Answers:
    kinds = typing.get_type_hints(Answers)
    given = [*_OF_A_RUN, *(key for key in ("average", "values", "right") if key in one)]
    for key, kind in {"method": str, "keep": Keep, "seed": int, **{key: kinds[key] for key in given}}.items():
        require_kind(one.get(key), kind, f"{where}.{key}")
    return Answers(Entry(one["method"], one["keep"], one["seed"]), **{key: one[key] for key in given})
