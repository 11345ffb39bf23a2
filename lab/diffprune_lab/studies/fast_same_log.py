"""Findings of the study of both paths, by part: one that fails or comes too late does not stop the others."""

import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from diffprune.results import write_results, write_text

SAME = ("agreement_", "exactness_", "qwen_agreement", "scenes_")  # parts that compare the two paths' answers
SKIPPED, FAILED = "left out, the time is over", "failed: "


class Log:
    """Findings by part, written after each."""

    def __init__(
        self, path: Path | None, limit: float, *, results: Path | None = None, commit: str | None = None
    ) -> None:
        self.path, self.limit, self.start = path, limit, time.perf_counter()
        self.results, self.commit = results, commit
        self.found: dict[str, Any] = {}

    def part(self, name: str, function: Callable[[], Any]) -> Any:
        """What the function gives, noted and printed; None where it fails or the time is over."""
        result, said = None, SKIPPED
        if time.perf_counter() - self.start > self.limit:
            self.found[name] = SKIPPED
        else:
            try:
                result = function()
                self.found[name] = result if isinstance(result, dict | list | float) else "done"
                said = short(self.found[name])
            except Exception as error:
                self.found[name], said = f"{FAILED}{type(error).__name__}: {error}", "FAILED"
                traceback.print_exc()
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
        print(f"[{time.perf_counter() - self.start:6.1f} s] {name}: {said}", flush=True)
        self.write()
        return result

    def lacking(self, what: str, *parts: str) -> None:
        """Note the parts that cannot be run without what failed or was left out before."""

        def refuse() -> None:
            raise RuntimeError(f"there is no {what}")

        for part in parts:
            self.part(part, refuse)

    def write(self) -> None:
        """All findings so far, and of those that compare answers a results file."""
        if self.path is not None:
            write_text(self.path, json.dumps(self.found, indent=1))
        if self.results is not None:
            rows = [row_of(part, value) for part, value in self.found.items() if part.startswith(SAME)]
            if rows:
                write_results(self.results, name="fast_same", rows=rows, commit=self.commit)


def row_of(part: str, value: Any) -> dict[str, Any]:
    """A finding as a row of results; one that failed or was left out has the reason in its place."""
    if isinstance(value, dict):
        return {"name": part, **value}
    if value == SKIPPED:
        return {"name": part, "skipped": value}
    return {"name": part, "error": str(value).removeprefix(FAILED).partition("\n")[0]}


def short(value: Any) -> str:
    """A value with its numbers rounded."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {short(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(short(item) for item in value) + "]"
    return str(value)
