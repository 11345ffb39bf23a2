"""`diffprune eval --harness lmms`: methods and budgets side by side on public benchmarks."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from diffprune.evaluate.answers import Sheet, answers_file, write_sheet
from diffprune.evaluate.made_by import measured_by
from diffprune.evaluate.pruners import (
    ORACLE,
    load_pruners,
    measurements,
    needs_of,
    origins_of,
    parse_pruners,
    parse_seeds,
)
from diffprune.evaluate.rows import quality_rows
from diffprune.evaluate.runner import Measurement
from diffprune.evaluate.session import DOWNSCALE, OF_TASKS, Asked, Outcome, finished
from diffprune.integrations.harness import ask_all, load_tasks, local_device, processes, rank
from diffprune.integrations.lmms import harness_version
from diffprune.integrations.resuming import open_journal, process_file, questions_text
from diffprune.integrations.suites import Benchmark, suite_tasks
from diffprune.methods.options import split_methods
from diffprune.model import PrunedVLM
from diffprune.results import write_results
from diffprune.types import parse_budgets, require_distinct

HARNESSES = ("lmms",)
SCENES = "scenes"  # what `--tasks` says where nobody says it: then the suite is asked


@dataclass(frozen=True, kw_only=True)
class HarnessRun:
    """What `diffprune eval --harness` was asked.

    Attributes:
        asked: As it was typed; `tasks` are those of the harness, by default the suite's.
        harness: Its name, one of `HARNESSES`.
        include: Folders with further tasks of the harness.
        limit: Rows of each benchmark's data; default: all.
    """

    asked: Asked
    harness: str
    suite: str
    include: Sequence[Path] = ()
    limit: int | None = None

    def run(self) -> Outcome | None:
        """Ask, sum up and write; None in a process that is not the first of several.

        Answers are written down batch by batch, beside the results file: started again, it asks nothing twice.
        """
        asked = self.asked
        self._refuse()
        budgets, drawn, folders = (
            parse_budgets(asked.keep),
            parse_seeds(asked.seeds) or [0],
            parse_pruners(asked.pruner),
        )
        require_distinct([*budgets, *(one.keep for one in folders if one.keep is not None)])
        named = "" if asked.tasks == SCENES else asked.tasks
        names = list(dict.fromkeys(name for name in named.split(",") if name)) or suite_tasks(self.suite)
        tasks = load_tasks(names, self.include)
        vlm, saved = load_pruners(folders, asked.model, local_device(asked.device))
        wanted = list(dict.fromkeys([*split_methods(asked.methods), *(one.label for one in saved)]))
        needs_of(wanted, saved)  # refuses what is not known or has no weights
        if asked.versus and asked.versus not in wanted:
            raise ValueError(
                f"--versus {asked.versus!r} is not among the methods measured; choose from {', '.join(wanted)}"
            )
        planned = [one for name in wanted for one in measurements(name, budgets, drawn, vlm, saved)]
        sheet = self._answered(vlm, planned, tasks)
        if sheet is None or rank() != 0:
            return None
        rows = quality_rows(
            sheet.answers,
            sheet.answers[0],
            versus=asked.versus or None,
            chance=sheet.chance,
            notes=sheet.notes,
            origins=origins_of(planned, saved),
        )
        if asked.out is not None:
            part = "all rows" if self.limit is None else f"the first {self.limit} rows"
            write_results(
                asked.out,
                name=asked.out.stem,
                rows=rows,
                commit=asked.commit,
                seeds=list(dict.fromkeys([*drawn, *(one.seed for one in saved)])),
                notes=f"{part} of each benchmark, asked and judged by lmms-eval {harness_version()}",
            )
        return Outcome(rows, sheet.answers, [])

    def _refuse(self) -> None:
        """What only questions of our own runner know, and names that are none."""
        if self.harness not in HARNESSES:
            raise ValueError(f"there is no harness {self.harness!r}; choose {' or '.join(HARNESSES)}")
        suite_tasks(self.suite)
        names = ("data", *OF_TASKS, "hard", "blind", "throttled", "shard", "max_new_tokens")
        for name in names:
            if getattr(self.asked, name) != getattr(Asked(), name):
                way_out = "give --limit" if name == "questions" else "leave it out"
                raise ValueError(f"--{name.replace('_', '-')} cannot be asked through a harness; {way_out}")
        for method in (ORACLE, DOWNSCALE):
            if method in split_methods(self.asked.methods):
                raise ValueError(f"method {method} changes what is asked, which the harness does; leave it out")

    def _answered(
        self, vlm: PrunedVLM, planned: Sequence[Measurement], tasks: Sequence[tuple[Benchmark, Any]]
    ) -> Sheet | None:
        """The answers of a run that is over, or those that are missing asked; None in a process that has none."""
        out, found = self.asked.out, [task for _, task in tasks]
        follows = {
            "questions": questions_text(found, self.limit),
            **measured_by(vlm, planned),
            "harness": harness_version(),
        }
        path = None if out is None else process_file(out, rank())
        if out is not None and path is not None and self.asked.fresh:
            for file in (path, answers_file(out)):
                file.unlink(missing_ok=True)
        sheet = finished(out, follows)
        if sheet is not None:
            return sheet
        rows = {one.task: len(task.eval_docs) for one, task in tasks}
        sheet = ask_all(
            vlm,
            [(one, one.pruner) for one in planned],
            tasks,
            limit=self.limit,
            batch_size=self.asked.batch_size,
            answered=open_journal(path, follows | {"processes": str(processes())}, rows, runs=1 + len(planned)),
        )
        if sheet is None or out is None:
            return sheet
        sheet = replace(sheet, made_by=follows)
        write_sheet(answers_file(out), sheet)
        for each in range(processes()):  # the others are done: their answers are in the sheet
            process_file(out, each).unlink(missing_ok=True)
        return sheet
