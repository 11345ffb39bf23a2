"""Result files: every number the project states comes from one `results/<name>.json` written here.

A file holds what was run (command, commit, date, device, versions, seeds) and plain rows. The keys of a row have fixed
names, types and ranges, so that tables can be made from any file and files can be compared.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path, PurePath
from typing import Any, Literal, get_type_hints

from diffprune.atomic import write_text
from diffprune.json_files import read_json, require_kind, short

Row = Mapping[str, Any]
Kind = Literal["quality", "summary", "serving", "speed", "training", "benchmark", "selection", "other"]
PATHS = ("eager", "fast", "server", "loop", "engine")  # loop: the server's batches without HTTP; engine: vLLM


@dataclass(frozen=True, kw_only=True, slots=True)
class Results:
    """One results file: what was run, where, and the rows that came out."""

    name: str
    command: str
    commit: str
    date: str
    device: str
    versions: dict[str, str]
    seeds: list[int]
    rows: list[dict[str, Any]]
    notes: str


# --- what a row may hold ----------------------------------------------------------------------------------------------


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300  # no inf, no NaN


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value != ""


def _is_count(value: Any) -> bool:
    return _is_int(value) and value >= 0


def _is_size(value: Any) -> bool:
    return _is_number(value) and value >= 0


def _is_keep(value: Any) -> bool:
    return (_is_int(value) and value >= 1) or (isinstance(value, float) and 0 < value <= 1)


def _between(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: _is_number(value) and low <= value <= high


def _is_interval(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_number, value)) and value[0] <= value[1]


_TEXT = (_is_text, "a non-empty text")
_COUNT = (_is_count, "an integer of 0 or more")
_SIZE = (_is_size, "a finite number of 0 or more")
_NUMBER = (_is_number, "a finite number")
_PERCENT = (_between(0.0, 100.0), "a number from 0 to 100")
_SHARE = (_between(0.0, 1.0), "a number from 0 to 1")

CI_OVER = ("questions", "seeds and questions")  # a row without `ci_over` is of before there was the second

ROW_KEYS: dict[str, tuple[Callable[[Any], bool], str]] = {
    # quality
    "method": _TEXT,
    "keep": (_is_keep, "an integer number of tokens from 1 or a float share in (0, 1]"),
    "seed": (_is_int, "an integer"),
    "task": _TEXT,
    "score": _PERCENT,
    "score_raw": _NUMBER,
    "full_score": _PERCENT,
    # quality, summed up
    "retention": _SIZE,
    "retention_std": _SIZE,
    "ci95": (_is_interval, "a pair [low, high] of finite numbers"),
    "n_seeds": _COUNT,
    "unchanged": _SHARE,
    "rank": (lambda value: value in (1, 2), "1 or 2"),  # best or second of its budget, where its leads leave 0 out
    "versus": _TEXT,  # the method whose lead over this one is given
    "lead": _NUMBER,
    "lead_ci95": (_is_interval, "a pair [low, high] of finite numbers"),
    "lead_p": _SHARE,  # of the lead, corrected by Holm's rule for all leads of the table
    "lead_holds": (lambda value: isinstance(value, bool), "true or false"),  # it may be claimed
    "ci_over": (lambda value: value in CI_OVER, f"one of {', '.join(CI_OVER)}"),  # what was resampled
    "repeat_std": _SIZE,  # of retention, over runs of one training with one seed
    "repeat_of": _TEXT,  # which runs those are
    "notes": _TEXT,  # of the task's protocol, such as how answers are normalised
    "tasks": _TEXT,  # those summed up, where that is not all
    "average": _SIZE,  # visual tokens a decoder layer holds, mean over layers, of methods inside the language model
    "first_token_kl": _SIZE,  # from the full model's first-token distribution to this one's, mean over questions
    "first_token_same": _SHARE,
    "prompt_tokens": _SIZE,  # of the prompt after pruning, mean over questions
    # where a row comes from: of trained methods the recipe and how scores are used, of joined files every row's own run
    "recipe": _TEXT,
    "choice": _TEXT,
    "tuned": _TEXT,  # how its settings were found
    "commit": _TEXT,
    "command": _TEXT,
    # speed; every time in ms is a median
    "path": (lambda value: value in PATHS, f"one of {', '.join(PATHS)}"),
    "batch": (lambda value: _is_int(value) and value >= 1, "an integer of 1 or more"),
    "num_visual": _COUNT,
    "num_kept": _SIZE,  # a mean where pictures differ in their number of tokens
    "num_text": _COUNT,
    "encode_ms": _SIZE,
    "pruner_ms": _SIZE,
    "prefill_ms": _SIZE,
    "ttft_ms": _SIZE,
    "decode_tok_s": _SIZE,
    "tflops": _SIZE,
    "peak_gb": _SIZE,
    "kv_bytes": _COUNT,
    "clients": _COUNT,  # that ask as soon as they are answered
    "requests_s": _SIZE,
    # training
    "backbone": _TEXT,
    "samples_s": _SIZE,
    "mfu": _SHARE,
    # benchmarks
    "name": _TEXT,
    "ours_ms": _SIZE,
    "reference_ms": _SIZE,
    "ratio": _SIZE,
    # selection alone, medians of so many calls; 0 where none was made
    "calls": _COUNT,
}

# One key decides the kind of a row (first match); the others are then required.
_KINDS: tuple[tuple[Kind, str, tuple[str, ...]], ...] = (
    ("summary", "retention", ("method", "keep")),
    ("quality", "score", ("method", "keep", "seed", "task")),
    ("training", "samples_s", ("backbone", "batch")),
    ("benchmark", "ours_ms", ("name",)),
    ("selection", "calls", ("method", "batch", "num_visual", "num_kept")),
    ("serving", "clients", ("path", "requests_s")),
    ("speed", "path", ("batch",)),
)


def kind_of(row: Row) -> Kind:
    """Which of the fixed kinds a row is; "other" where none of their keys is there (probes)."""
    found: list[Kind] = [kind for kind, telling, _ in _KINDS if telling in row]
    return found[0] if found else "other"


def _check_plain(value: object, where: str) -> None:
    """Raise unless `value` survives JSON: text, finite numbers, booleans, None, lists and dicts of these."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{where} has the key {key!r}: keys must be texts")
            _check_plain(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_plain(item, f"{where}[{index}]")
    elif not (value is None or isinstance(value, str | bool) or _is_number(value)):
        raise ValueError(
            f"{where} is {short(value)}: must be a text, a finite number, a boolean, or a list or dict of these"
        )


def check_rows(rows: Iterable[Row]) -> None:
    """Raise a `ValueError` that names the row, the key and the value where a row breaks the schema."""
    for index, row in enumerate(rows):
        for key, value in row.items():
            if key in ROW_KEYS:
                is_valid, wanted = ROW_KEYS[key]
                if not is_valid(value):
                    raise ValueError(f"row {index}: {key} is {short(value)}: must be {wanted} (or leave the key out)")
            else:
                _check_plain(value, f"row {index}: {key}")
        kind, telling, required = next((one for one in _KINDS if one[1] in row), ("other", "", ()))
        for key in required:
            if key not in row:
                raise ValueError(f"row {index}: {telling!r} makes it a {kind} row, which also needs {key!r}")


# --- what was run -----------------------------------------------------------------------------------------------------


def library_versions() -> dict[str, str]:
    """Versions of Python and of the libraries that can change a number."""
    versions = {"python": platform.python_version()}
    for package in ("diffprune", "torch", "transformers", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # run from a source folder
            continue
    return versions


def device_name() -> str:
    """The accelerator torch would use, else the processor and how many cores this process may use."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    return f"CPU {_processor_model()}, {cores} cores"


def _processor_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def _without_machine_path(argument: str) -> str:
    """The argument with an absolute path made relative to the working folder, or cut to its last part."""
    option, equals, value = argument.rpartition("=")
    if not PurePath(value).is_absolute():
        return argument
    path = PurePath(value)
    short = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else PurePath(path.name)
    return f"{option}{equals}{short}"


def command_line() -> str:
    """This process's command as a user would type it, without the machine's own paths."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = spec.name if spec is not None else ""
    if module and not module.endswith("__main__"):  # a package's own __main__ is the command line
        program = ["python", "-m", module]
    elif PurePath(sys.argv[0]).suffix == ".py" and module == "":
        program = ["python", _without_machine_path(sys.argv[0])]
    else:
        program = ["diffprune"]
    return shlex.join(program + [_without_machine_path(argument) for argument in sys.argv[1:]])


def source_commit() -> str:
    """The commit of the checkout this package runs from, `-dirty` where its sources differ; else "unknown"."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return "unknown"
    git = ["git", "-C", str(root)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "src"], capture_output=True, check=False)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit if changed.returncode == 0 else f"{commit}-dirty"


# --- files ------------------------------------------------------------------------------------------------------------


def _to_json(results: Results) -> str:
    """JSON text with one row per line, so that a changed number is a changed line."""
    lines = []
    for key, value in asdict(results).items():
        if key == "rows" and value:
            rows = ",\n    ".join(json.dumps(row, ensure_ascii=False, allow_nan=False) for row in value)
            lines.append(f'  "rows": [\n    {rows}\n  ]')
        else:
            lines.append(f"  {json.dumps(key)}: {json.dumps(value, ensure_ascii=False, allow_nan=False)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def write_results(
    path: str | Path,
    *,
    name: str,
    rows: Sequence[Row],
    command: str | None = None,
    commit: str | None = None,
    device: str | None = None,
    seeds: Sequence[int] = (),
    notes: str = "",
    date: str | None = None,
    versions: Mapping[str, str] | None = None,
) -> Results:
    """Check the rows, add what was run and where, write the file in one step, and return what it holds.

    Args:
        path: The file, usually `results/<name>.json`.
        name: What `diffprune report` and other tools look for.
        rows: Plain dicts; see `ROW_KEYS` for the names that have a fixed type.
        command: How to get the numbers again; default: this process's own command line.
        commit: For machines without a git checkout; default: read from the checkout.
        device: Where it ran; default: asked of torch.
        seeds: Every seed that enters the rows.
        notes: One or two sentences a reader of the table needs.
        date: When it ran; default: now.
        versions: Of the libraries it ran with; default: this process's.
    """
    check_rows(rows)
    results = Results(
        name=name,
        command=command if command is not None else command_line(),
        commit=commit if commit is not None else source_commit(),
        date=date if date is not None else datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        device=device if device is not None else device_name(),
        versions=dict(versions) if versions is not None else library_versions(),
        seeds=list(seeds),
        rows=[dict(row) for row in rows],
        notes=notes,
    )
    write_text(path, _to_json(results))
    return results


def holds_results(path: Path) -> bool:
    """Whether a JSON file is a results file, whole or not; one that is no JSON may have been."""
    try:
        content = read_json(path)
    except (OSError, ValueError):
        return True  # whoever reads it says what is wrong
    return isinstance(content, dict) and {"rows", "command"} <= set(content)


def read_results(path: str | Path) -> Results:
    """The content of a results file, its keys and rows checked."""
    path = Path(path)
    try:
        content = read_json(path)
    except OSError as error:
        raise ValueError(f"cannot read results file {path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): write it again with the command that made it") from error
    expected = [field.name for field in fields(Results)]
    if not isinstance(content, dict) or sorted(content) != sorted(expected):
        found = ", ".join(sorted(content))[:200] if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"{path} is not a results file: expected the keys {', '.join(expected)}, found {found}")
    try:
        for key, kind in get_type_hints(Results).items():
            require_kind(content[key], kind, key)
        check_rows(content["rows"])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return Results(**content)


# --- tables -----------------------------------------------------------------------------------------------------------


def format_value(value: object) -> str:
    """A table cell: numbers with about four digits, an interval as `low to high`, nothing for None."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        size = abs(value)
        if size >= 1000:
            return f"{value:,.0f}"
        if size >= 100:
            return f"{value:.1f}"
        return f"{value:.2f}" if size >= 10 else f"{value:.4g}"
    if isinstance(value, list | tuple) and all(map(_is_number, value)):
        separator = " to " if len(value) == 2 else ", "
        return separator.join(format_value(item) for item in value)
    return str(value).replace("|", "\\|").replace("\n", " ")


def markdown_table(rows: Sequence[Row], columns: Sequence[str] | None = None) -> str:
    """A Markdown table; columns are by default all keys with a plain value: fixed names first, then others."""
    if columns is None:
        present = dict.fromkeys(key for row in rows for key, value in row.items() if not isinstance(value, Mapping))
        columns = [key for key in ROW_KEYS if key in present] + [key for key in present if key not in ROW_KEYS]
    numeric = [any(_is_number(row.get(key)) for row in rows) for key in columns]
    lines = [
        "| " + " | ".join(columns) + " |",
        "|" + "|".join("---:" if is_numeric else "---" for is_numeric in numeric) + "|",
    ]
    lines += ["| " + " | ".join(format_value(row.get(key)) for key in columns) + " |" for row in rows]
    return "\n".join(lines) + "\n"
