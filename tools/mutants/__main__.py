"""Does the suite see a fault? Each of `faults.txt` is put into a copy of the sources, and its tests must fail.

    python -m tools.mutants                      # all that have not been tried yet, two at a time
    python -m tools.mutants --only ops/gates     # those of some files, tried again
    python -m tools.mutants --only undoes:       # those that undo a fix, each named by a line "# undoes: ..." above it
    python -m tools.mutants --list               # what there is, and whether each text still occurs

What was found is kept in `out/mutants.jsonl`, one line for each fault; a run that was ended goes on from there. A fault
is tried again when its text, its file or its tests have changed.
"""

import argparse
import hashlib
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).parent / "faults.txt"
COPIED = ("src", "tests", "conftest.py", "pyproject.toml", "configs")
LINKED = ("lab", "shared", "docs", "results", "tools", "README.md", "examples", "Makefile", "CHANGELOG.md", "LICENSE")
SECONDS = 1800  # after which the tests of a fault count as hanging, and so as having seen it,
CPU_SECONDS = 400  # as after so many of the processor, which a busy machine does not lengthen
AT_LEAST = 97  # of a hundred
MOST_TESTS = 10  # files that a fault names


UNDOES = "undoes: "  # begins a comment of the table that names the fix which the faults below it take out
HANGING = (-1, -signal.SIGXCPU)  # exit codes of tests that were ended


class Fault(NamedTuple):
    """A text of one file, what it becomes, and the tests that must see it."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]  # files, or single tests of them: file::name
    undoes: str = ""  # the fix that is gone with it

    @property
    def name(self) -> str:
        undone = f" (undoes: {self.undoes})" if self.undoes else ""
        return f"{self.file}: {self.old} -> {self.new or 'nothing'}{undone}"

    @property
    def test_files(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(test.partition("::")[0] for test in self.tests))

    @property
    def source(self) -> Path:
        return Path("src/diffprune") / self.file

    def digest(self) -> str:
        """What the outcome depends on: the fault, its file and its tests."""
        parts = [repr(self).encode(), *((ROOT / path).read_bytes() for path in (self.source, *self.test_files))]
        return hashlib.blake2b(b"\0".join(parts), digest_size=12).hexdigest()

    def number_of_places(self) -> int:
        return (ROOT / self.source).read_text(encoding="utf-8").count(self.old)


def read_table(text: str) -> list[Fault]:
    """The faults in the order they are written; a `ValueError` names a line that is none."""
    faults: list[Fault] = []
    file, tests, old, undoes = "", (), None, ""
    for number, line in enumerate(text.splitlines(), start=1):
        mark, content = line[:1], line[2:]
        if mark in ("", "#"):
            undoes = content.removeprefix(UNDOES) if content.startswith(UNDOES) else undoes
            continue
        if mark == "@" and old is None:
            file, _, named = content.partition(" | ")
            tests, undoes = tuple(named.split()), ""
        elif mark == "-" and old is None and file:
            old = content
        elif mark == "+" and old is not None:
            faults.append(Fault(file, old, content, tests, undoes))
            old = None
        else:
            raise ValueError(f"line {number} of the table, {line!r}, is out of place; write @, then pairs of - and +")
    return faults


def stale(faults: Sequence[Fault]) -> list[str]:
    """A sentence for every fault that can no longer be made."""
    found = [
        f"{fault.name!r} occurs {places} times; it must occur once"
        for fault in faults
        if (places := fault.number_of_places()) != 1
    ]
    missing = {path for fault in faults for path in fault.test_files if not (ROOT / path).is_file()}
    return found + [f"{path} is named as a test and is not there" for path in sorted(missing)]


def make_copy(folder: Path) -> None:
    """The sources and tests to put faults into; what only lies beside them is linked."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.is_file():
            shutil.copy(source, folder / name)
    for name in LINKED:
        if (ROOT / name).exists():
            (folder / name).symlink_to(ROOT / name)


def import_heavy_parts() -> None:
    """What every test needs and no fault touches, once for all children."""
    import pytest  # noqa: F401
    import torch
    import transformers
    from transformers import AutoModelForImageTextToText, AutoProcessor  # noqa: F401

    torch.set_num_threads(1)
    for name in ("LlavaForConditionalGeneration", "LlavaNextForConditionalGeneration", "CLIPImageProcessorPil"):
        getattr(transformers, name)


def run_in_child(copy: Path, tests: Sequence[str]) -> int:
    """Run the tests in a copy, in this process, which nothing of it may outlive."""
    os.setsid()
    if len(tests) <= MOST_TESTS:  # more are those of all faults together
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 5))
    log = os.open(copy / "last.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(copy)
    os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", MPLBACKEND="Agg")
    os.environ["PYTHONPATH"] = os.pathsep.join((str(copy / "src"), str(copy / "lab")))
    sys.path[:] = [str(copy), str(copy / "src"), str(copy / "lab"), *(p for p in sys.path if str(ROOT) != p and p)]
    import pytest

    quiet = "ignore::pytest.PytestAssertRewriteWarning"  # of what was imported before the fork
    return int(pytest.main(["-x", "-q", "-W", quiet, "-p", "no:cacheprovider", *tests]))


def run_tests(copy: Path, tests: Sequence[str]) -> int:
    """The exit code of a child that runs the tests in a copy; -1 where it had to be ended."""
    child = os.fork()
    if child == 0:
        code = 70
        try:
            code = run_in_child(copy, tests)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)  # never back into the parent's own frames, which would clear the copy away
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.1)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -1


def tried(faults: Sequence[Fault], record: Path) -> Iterator[dict[str, object]]:
    """One entry for each fault as it is tried, in a copy of its own; the entries are added to the record."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = Path(folder).resolve()
        make_copy(copy)
        for fault in faults:
            path = copy / fault.source
            whole = path.read_text(encoding="utf-8")
            path.write_text(whole.replace(fault.old, fault.new) if fault.old else whole, encoding="utf-8")
            start = time.monotonic()
            code = run_tests(copy, fault.tests)
            path.write_text(whole, encoding="utf-8")
            tail = (copy / "last.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
            entry = {
                "fault": fault.name,
                "caught": code in (1, 2, *HANGING),  # a failed test, an import that fails, a test that hangs
                "code": code,
                "seconds": round(time.monotonic() - start, 1),
                "digest": fault.digest(),
                "said": tail,
                "by": seen_by(tail),
            }
            with record.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
            yield entry


def seen_by(tail: Sequence[str]) -> str:
    """The test that failed, from the last lines of its run; empty where none did."""
    failed = (line.split(" ", 2)[1] for line in tail if line.startswith(("FAILED ", "ERROR ")))
    return next(failed, "")


def untouched(faults: Sequence[Fault]) -> Fault:
    """A fault that changes nothing, with the tests of all: seen by none, else the others prove nothing."""
    return Fault("__init__.py", "", "", tuple(sorted({path for fault in faults for path in fault.test_files})))


def known(record: Path) -> dict[str, dict[str, object]]:
    """The newest entry of each fault, by its digest."""
    lines = record.read_text(encoding="utf-8").splitlines() if record.is_file() else []
    return {entry["digest"]: entry for entry in map(json.loads, lines)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="faults whose name contains this, tried again")
    parser.add_argument("--workers", type=int, default=2, help="at a time")
    parser.add_argument("--list", action="store_true", help="check the table, try nothing")
    parser.add_argument("--record", type=Path, default=ROOT / "out" / "mutants.jsonl")
    options = parser.parse_args()
    faults = read_table(TABLE.read_text(encoding="utf-8"))
    if old := stale(faults):
        print("\n".join(old))
        return 2
    if options.list:
        print(f"{len(faults)} faults in {len({fault.file for fault in faults})} files")
        return 0
    options.record.parent.mkdir(parents=True, exist_ok=True)
    before = known(options.record)
    nothing = untouched(faults)
    todo = [f for f in faults if (options.only in f.name if options.only else f.digest() not in before)]
    if not options.only and before.get(nothing.digest(), {}).get("code") != 0:
        todo.append(nothing)
    os.nice(10)
    import_heavy_parts()
    children = []
    for worker in range(options.workers):
        child = os.fork()
        if child == 0:
            for entry in tried(todo[worker :: options.workers], options.record):
                word = "caught" if entry["caught"] else f"MISSED (exit code {entry['code']})"
                if entry["fault"] == nothing.name:  # the control
                    word = "no fault" if entry["code"] == 0 else f"FAILS WITHOUT A FAULT (exit code {entry['code']})"
                by = f", by {entry['by']}" if entry["by"] else ""
                print(f"{word:8} {entry['seconds']:6} s  {entry['fault']}{by}", flush=True)
            os._exit(0)
        children.append(child)
    failed = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    after = known(options.record)
    outcomes = [after.get(fault.digest()) for fault in faults]
    caught = sum(bool(entry and entry["caught"]) for entry in outcomes)
    untried = sum(entry is None for entry in outcomes)
    for fault, entry in zip(faults, outcomes, strict=True):
        if entry is not None and not entry["caught"]:
            print(f"missed: {fault.name}")
    print(f"{caught} of {len(faults)} faults were caught, {untried} not tried")
    if (entry := after.get(nothing.digest())) is not None and entry["code"] != 0:
        print("the same tests fail without a fault:", *entry["said"], sep="\n")  # type: ignore[misc]
        return 1
    return 0 if not any(failed) and caught * 100 >= AT_LEAST * len(faults) else 1


if __name__ == "__main__":
    sys.exit(main())
