"""Mutated files of every kind that is read: used, or refused in one sentence that names the file."""

import random
import shutil
from pathlib import Path

import pytest

from tests.fuzz.odd_files import KINDS, try_one

QUICK, ALL = 5, 400  # mutations of each kind, by default and with the slow tests


@pytest.mark.parametrize("times", [range(QUICK), pytest.param(range(QUICK, ALL), marks=pytest.mark.slow)], ids=len)
@pytest.mark.parametrize("name", KINDS)
def test_a_mutated_file_is_read_or_named(
    name: str, times: range, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for case in times:
        folder = tmp_path / str(case)
        try:
            try_one(name, random.Random(f"{name}:{case}"), folder)
        except Exception as error:
            raise AssertionError(f"{name}, case {case}: {type(error).__name__}: {str(error)[:500]}") from error
        shutil.rmtree(folder)


@pytest.mark.parametrize("name", KINDS)
def test_a_whole_file_is_read(name: str, tmp_path: Path) -> None:
    KINDS[name].make(tmp_path)
    KINDS[name].use(tmp_path)
