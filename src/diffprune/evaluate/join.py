"""Join runs of `diffprune eval` over the same questions into one results file, summed up and compared anew.

    python -m diffprune.evaluate.join a.json b.json --out results/scenes_main.json --versus diffprune

So methods can be measured in several processes, or some of them later. The answers beside the files are what is joined.
"""

import argparse
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from diffprune.evaluate.answers import Answers, Sheet, answers_file, read_sheet, write_sheet
from diffprune.evaluate.hard import hard_rows
from diffprune.evaluate.rows import ORIGIN_KEYS, Origins, Place, place_of, quality_rows
from diffprune.evaluate.shards import SHARD, whole_sheets
from diffprune.methods.options import split_methods
from diffprune.results import Results, read_results, write_results
from diffprune.types import Budget

REST = "*"  # among the methods: all that are not named
SAME_MODEL = 1.0  # points of a task's score by which two runs of one full model may differ, from rounding
ASKED = "questions"  # of what answers follow from (`Sheet.made_by`): words and pictures
ALIKE = (ASKED, "model", "positions", "precision", "length", "harness")  # where it differs, a joined file says so


def join_sheets(sheets: Sequence[Sheet], names: Sequence[str]) -> tuple[Sheet, int]:
    """One sheet with the runs of all, the full model's of the first; and to how many questions those differ.

    Args:
        names: What the sheets are called in an error.
    """
    first = sheets[0]
    full = first.answers[0]
    answers = [full]
    seen = {full.entry: names[0]}
    differ: set[int] = set()
    for sheet, name in zip(sheets, names, strict=True):
        if sheet.questions != first.questions:
            raise ValueError(
                f"{names[0]} and {name} hold answers to other questions; measure them with the same --data, "
                "or --tasks, --split and --questions"
            )
        other = sheet.answers[0]
        for task, score in full.score.items():
            if abs(other.score[task] - score) > SAME_MODEL:
                raise ValueError(
                    f"the full model has {score:.1f} on {task} in {names[0]} and {other.score[task]:.1f} in {name}: "
                    "join runs of one model only"
                )
        differ |= {index for index, (a, b) in enumerate(zip(full.said, other.said, strict=True)) if a != b}
        for one in sheet.answers[1:]:
            if one.entry in seen:
                entry = one.entry
                raise ValueError(
                    f"{entry.method} at keep={entry.keep} with seed {entry.seed} is in {seen[entry]} and in {name}; "
                    "leave one of them out"
                )
            seen[one.entry] = name
            answers.append(one)
    made_by = first.made_by if len(sheets) == 1 else {}  # of several runs together nothing can be said
    return replace(first, answers=answers, made_by=made_by), len(differ)


def choose_runs(
    answers: Sequence[Answers],
    methods: Sequence[str] = (REST,),
    budgets: Sequence[int | float] = (),
    without: Sequence[str] = (),
) -> list[Answers]:
    """The full model's run and those of the methods and budgets named, in the order of the methods.

    Args:
        methods: Names; `*` stands for all that are not named.
        budgets: All where none is named.
        without: Methods to leave out.
    """
    found = [name for name in dict.fromkeys(one.entry.method for one in answers[1:]) if name not in without]
    for name in methods:
        if name != REST and name not in found:
            raise ValueError(f"there are no answers of {name!r}; there are {', '.join(found)}")
    rest = [name for name in found if name not in methods]
    order = [name for entry in methods for name in (rest if entry == REST else [entry])]
    chosen = [one for one in answers[1:] if one.entry.method in order and (not budgets or one.entry.keep in budgets)]
    return [answers[0], *sorted(chosen, key=lambda one: order.index(one.entry.method))]


def join_files(
    paths: Sequence[Path],
    out: Path,
    *,
    versus: str | None = None,
    methods: Sequence[str] = (REST,),
    budgets: Sequence[int | float] = (),
    without: Sequence[str] = (),
    also: Sequence[str] = (),
    command: str | None = None,
    notes: str = "",
    mixed: bool = False,
    hard: bool = False,
    repeats: Mapping[str, Sequence[str]] | None = None,
    tuned: Mapping[str, str] | None = None,
) -> Results:
    """Write the joined results file and its answers. Every row carries the commit and the command of its own run.

    Args:
        repeats: By method the labels of further runs with the same seeds; see `quality_rows`.
        tuned: By pattern of method names (`diffprune*`, the first that fits) how the settings of the trained ones were
            found.
        hard: Sum up once more over hard questions, as `diffprune eval --hard`.
        mixed: The parts may come from several commits and kinds of device, or be about other pictures; the notes then
            say which methods were not measured as the first part's. Without it they are refused.
    """
    parts = [read_results(path) for path in paths]
    given = [read_sheet(answers_file(path)) for path in paths]
    sheets, runs = whole_sheets(given, [str(path) for path in paths])
    for key in ("commit", "device"):
        values = dict.fromkeys(getattr(part, key) for part in parts)
        if len(values) > 1 and not mixed:
            raise ValueError(
                f"the runs come from more than one {key} ({', '.join(values)}); measure them anew together, "
                "or add --mixed"
            )
    parts = [whole_run([parts[place] for place in places], given[places[0]]) for places in runs]
    paths = [paths[places[0]] for places in runs]
    joined, differ = join_sheets(sheets, [str(path) for path in paths])
    for path, part in zip(paths, sheets, strict=True):
        if not mixed and (odd := _unlike(sheets[0], part).get(ASKED)):
            raise ValueError(
                f"{paths[0]} and {path} asked about other pictures ({odd[1]}; {odd[0]}); measure them with the same, "
                "or add --mixed"
            )
    sheet = replace(joined, answers=choose_runs(joined.answers, methods, budgets, without))
    if versus is not None and versus not in {one.entry.method for one in sheet.answers}:
        raise ValueError(f"--versus {versus!r} is not among the methods joined")
    own_notes = dict.fromkeys(part.notes for part in parts if part.notes)
    others = other_origins(parts, sheets, {one.entry.method for one in sheet.answers[1:]})
    unstable = f"the full model's answers differ between processes on {differ} of {len(sheet.questions)} prompts"
    origins = part_origins(parts, sheets, tuned or {})
    rows = quality_rows(
        sheet.answers,
        sheet.answers[0],
        versus=versus,
        also=also,
        chance=sheet.chance,
        notes=sheet.notes,
        origins=origins,
        repeats=repeats,
    )
    few: list[str] = []
    if hard:
        more, few = hard_rows(sheet.answers, versus=versus, origins=origins)
        rows += more
    write_sheet(answers_file(out), sheet)
    return write_results(
        out,
        name=out.stem,
        rows=rows,
        command=command,
        commit=parts[0].commit,
        device=parts[0].device,
        date=max(part.date for part in parts),
        versions=parts[0].versions,
        seeds=sorted({one.entry.seed for one in sheet.answers[1:]}),
        notes="; ".join([*([notes] if notes else []), *own_notes, *others, *few, *([unstable] if differ else [])]),
    )


def whole_run(parts: Sequence[Results], first: Sheet) -> Results:
    """What the files of one run's shards say together; a run without shards is its only part.

    Args:
        first: The answers of the first part.
    """
    if SHARD not in first.made_by:
        return parts[0]
    return replace(
        parts[0],
        command=" && ".join(dict.fromkeys(part.command for part in parts)),
        commit=", ".join(dict.fromkeys(part.commit for part in parts)),
        device=", ".join(dict.fromkeys(part.device for part in parts)),
        date=max(part.date for part in parts),
        notes=parts[0].notes.partition(f"; shard {first.made_by[SHARD]}")[0],
    )


def part_origins(parts: Sequence[Results], sheets: Sequence[Sheet], tuned: Mapping[str, str]) -> Origins:
    """Of every run its part's commit and command, and what the part's own rows say of it."""
    found: dict[Place, dict[str, str]] = {}
    for part, sheet in zip(parts, sheets, strict=True):
        for one in sheet.answers:
            found.setdefault(place_of(one.entry), {"commit": part.commit, "command": part.command})
        for row in part.rows:
            if "task" in row and (place := (row["method"], row["keep"], row["seed"])) in found:
                found[place] |= {key: row[key] for key in ORIGIN_KEYS if key in row}
    for (method, _, _), origin in found.items():
        words = next((words for pattern, words in tuned.items() if fnmatchcase(method, pattern)), None)
        if words is not None and "recipe" in origin:
            origin["tuned"] = words
    return found


def other_origins(parts: Sequence[Results], sheets: Sequence[Sheet], methods: Collection[str]) -> list[str]:
    """Which of the methods were measured at another commit, on another device or otherwise than the first part."""
    found: dict[str, list[str]] = {}
    for part, sheet in zip(parts, sheets, strict=True):
        names = [one.entry.method for one in sheet.answers[1:] if one.entry.method in methods]
        if (part.commit, part.device) != (parts[0].commit, parts[0].device):
            found.setdefault(f"commit {part.commit} on {part.device}", []).extend(names)
        for key, (own, first) in _unlike(sheets[0], sheet).items():
            found.setdefault(f"{key} {own} (others {first})", []).extend(names)
    return [f"{', '.join(dict.fromkeys(names))}: {words}" for words, names in found.items() if names]


def _unlike(first: Sheet, other: Sheet) -> dict[str, tuple[str, str]]:
    """What the other's answers follow from and the first's do not, each beside the first's; a sheet may not know."""
    both = {
        key: (other.made_by[key], first.made_by[key]) for key in ALIKE if key in first.made_by.keys() & other.made_by
    }
    return {key: pair for key, pair in both.items() if len({_essence(key, value) for value in pair}) > 1}


def _essence(key: str, value: str) -> str:
    """What counts of a text: of a model its weights, wherever they lie."""
    return value.rpartition(" ")[2] if key == "model" else value


def _pairs(option: str, texts: Sequence[str]) -> list[tuple[str, str]]:
    """`NAME=WORDS` each; a name may hold options in brackets."""
    found = []
    for text in texts:
        match = re.fullmatch(r"((?:[^=\[]|\[[^\]]*\])+)=(.+)", text)
        if match is None:
            raise ValueError(f"{option} {text!r} is no NAME=WORDS; put a name before the = and words behind it")
        found.append((match[1], match[2]))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line above."""
    parser = argparse.ArgumentParser(
        prog="python -m diffprune.evaluate.join", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("files", nargs="+", type=Path, help="results files whose answers lie beside them")
    parser.add_argument("--out", required=True, type=Path, help="results file to write")
    parser.add_argument("--versus", help="method whose lead over each other one is given")
    parser.add_argument("--methods", default=REST, help="comma-separated, in this order; * is all that are not named")
    parser.add_argument("--without", default="", help="comma-separated methods to leave out")
    parser.add_argument("--keep", default="", help="comma-separated: these budgets alone")
    parser.add_argument("--also", default="", help="comma-separated tasks to sum up over once more")
    parser.add_argument("--command", help="what to record as the command that makes the file again")
    parser.add_argument("--notes", default="", help="a sentence the reader of the table needs")
    parser.add_argument(
        "--repeats",
        action="append",
        default=[],
        metavar="METHOD=LABEL,...",
        help="labels of further runs of a method's trainings with the same seeds: rows say how far they lie apart",
    )
    parser.add_argument(
        "--tuned",
        action="append",
        default=[],
        metavar="PATTERN=WORDS",
        help="how the settings of trained methods were found, such as 'diffprune*=chosen on the validation split'",
    )
    parser.add_argument(
        "--hard", action="store_true", help="sum up over what the full model has right, downscale wrong"
    )
    parser.add_argument("--mixed", action="store_true", help="take parts of several commits or kinds of device")
    options = parser.parse_args(arguments)
    results = join_files(
        options.files,
        options.out,
        versus=options.versus,
        methods=split_methods(options.methods),
        budgets=[Budget.parse(word).keep for word in options.keep.split(",") if word],
        without=split_methods(options.without),
        also=[word for word in options.also.split(",") if word],
        command=options.command,
        notes=options.notes,
        mixed=options.mixed,
        hard=options.hard,
        repeats={name: split_methods(labels) for name, labels in _pairs("--repeats", options.repeats)},
        tuned=dict(_pairs("--tuned", options.tuned)),
    )
    print(f"{options.out}: {len(results.rows)} rows from {len(options.files)} runs")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
