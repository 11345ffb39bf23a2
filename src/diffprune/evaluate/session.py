"""One evaluation from its settings to its files: what is asked, of what, how far it came before, what came out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diffprune.evaluate.answers import FIRST_TOKEN_KL, Answers, Sheet, answers_file, read_sheet, write_sheet
from diffprune.evaluate.downscale import DOWNSCALE, unreached
from diffprune.evaluate.encoded import Progress, all_asked
from diffprune.evaluate.files import read_questions
from diffprune.evaluate.hard import hard_rows
from diffprune.evaluate.journal import WAY_OUT, Journal, journal_file, start_anew
from diffprune.evaluate.made_by import made_by
from diffprune.evaluate.pictures import require_prompts
from diffprune.evaluate.pruners import (
    ORACLE,
    PrunerFolder,
    SavedPruner,
    load_pruners,
    measurements,
    needs_of,
    origins_of,
    parse_pruners,
    parse_seeds,
)
from diffprune.evaluate.rows import quality_rows
from diffprune.evaluate.runner import HELD, Measurement, evaluate_questions
from diffprune.evaluate.scoring import make_sheet
from diffprune.evaluate.shards import SHARD, parse_shard, part_of, shard_places
from diffprune.evaluate.sources import Questions, build_tasks
from diffprune.json_files import require_same
from diffprune.methods.naming import split_methods
from diffprune.model import PrunedVLM
from diffprune.results import write_results
from diffprune.types import parse_budgets, require_distinct

OF_TASKS = ("world_seed", "split", "questions", "sizes")  # settings that a file of questions has no use for
TOKENS, TOKENS_OF_FILES = 8, 32  # of the longest answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Settings of an evaluation, as the command line has them (`diffprune eval --help`).

    `positions` is for studies: another rule than the saved pruners', or than the original positions of a model alone.
    """

    pruner: str = "none"
    model: str = "scenes-llava"
    methods: str = "full"
    keep: str = "128,64,32"
    data: Path | None = None
    tasks: str = "scenes"
    split: str = "test"
    questions: int = 500
    sizes: str = ""
    world_seed: int = 0
    seeds: str = "0,1,2"
    hard: bool = False
    blind: bool = False
    throttled: bool = False
    positions: str = ""
    versus: str = ""
    batch_size: int = 64
    hold: int = HELD
    max_new_tokens: int | None = None
    shard: str = ""
    fresh: bool = False
    device: str = "cpu"
    out: Path | None = None
    commit: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Rows of a results file, the answers behind them, and sentences for whoever reads them."""

    rows: list[dict[str, Any]]
    answers: list[Answers]
    sentences: list[str]


class Session:
    """An evaluation that was checked as far as that goes without loading a model."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.budgets, self.drawn = parse_budgets(asked.keep), parse_seeds(asked.seeds) or [0]
        self.folders: list[PrunerFolder] = parse_pruners(asked.pruner)
        require_distinct([*self.budgets, *(one.keep for one in self.folders if one.keep is not None)])
        self.shard = parse_shard(asked.shard) if asked.shard else None
        if asked.hard and DOWNSCALE not in split_methods(asked.methods):
            raise ValueError(f"--hard compares with {DOWNSCALE}, which is not among the methods; add it to --methods")
        if asked.data is not None:
            for name in OF_TASKS:
                if (given := getattr(asked, name)) != getattr(Asked(), name):
                    option = name.replace("_", "-")
                    raise ValueError(f"--{option} {given} is for --tasks, not for --data; leave it out")
            if asked.tasks != Asked().tasks:
                raise ValueError(f"--tasks {asked.tasks} and --data {asked.data} both say what is asked; leave one out")
            self.questions: Questions = read_questions(asked.data)
        else:
            self.questions = build_tasks(
                asked.tasks, split=asked.split, count=asked.questions, sizes=asked.sizes, seed=asked.world_seed
            )
        default = TOKENS if asked.data is None else TOKENS_OF_FILES
        self.max_new_tokens = asked.max_new_tokens or default

    def run(self, progress: Progress | None = None, planned: Callable[[PrunedVLM], None] | None = None) -> Outcome:
        """Answer what is not answered yet, and write the results file with its answers.

        Args:
            planned: Given the base model once it is known that all of this can be measured.
        """
        asked = self.asked
        names = split_methods(asked.methods)
        vlm, saved = load_pruners(self.folders, asked.model, asked.device, throttled=asked.throttled, names=names)
        if asked.positions:
            rules: dict[str, Any] = {"newline": vlm.backbone.keeps_newlines, "budget": vlm.budget_rule}
            vlm = PrunedVLM(vlm.base, vlm.processor, method="full", positions=asked.positions, **rules)
        questions = self.questions.for_model(vlm)
        require_prompts(vlm, all_asked(questions), blind=asked.blind)
        runs, sentences = self.plan(vlm, saved, questions)
        follows = made_by(vlm, questions, runs, max_new_tokens=self.max_new_tokens)
        places: list[int] = []
        if self.shard is not None:
            places = shard_places(questions, *self.shard)
            self._require_metrics(questions)
            questions, follows = part_of(questions, places), follows | {SHARD: asked.shard}
        if asked.out is not None and asked.fresh:
            start_anew(asked.out)
        sheet = finished(asked.out, follows)
        if planned is not None:
            planned(vlm)
        if sheet is None:
            sheet = self._answer(vlm, saved, questions, runs, follows, places, progress)
        elif asked.out is not None:
            journal_file(asked.out).unlink(missing_ok=True)  # left where a run was killed after its sheet was whole
        return self._sum_up(vlm, saved, sheet, questions, sentences)

    def plan(
        self, vlm: PrunedVLM, saved: Sequence[SavedPruner], questions: Questions
    ) -> tuple[list[Measurement], list[str]]:
        """What is measured besides the full model, and a sentence for everything that cannot be."""
        asked = self.asked
        wanted = self.wanted(saved)
        if asked.versus and asked.versus not in wanted:
            raise ValueError(
                f"--versus {asked.versus!r} is not among the methods measured; choose from {', '.join(wanted)}"
            )
        if ORACLE in wanted:
            questions.oracle((), ())  # a source without one raises now, not after its pictures are encoded
        needs_of(wanted, saved)  # so does a learned method without weights
        planned = [one for name in wanted for one in measurements(name, self.budgets, self.drawn, vlm, saved)]
        too_small: dict[int | float, str] = {}
        if DOWNSCALE in wanted:
            too_small = unreached(vlm, questions, self.budgets)
            planned = [one for one in planned if not (one.shrunk and one.keep in too_small)]
        if asked.blind:
            planned.append(Measurement("blind", 1.0, 0, vlm.method, blind=True))
        return planned, list(too_small.values())

    def wanted(self, saved: Sequence[SavedPruner]) -> list[str]:
        """The methods that are measured, saved pruners among them."""
        return list(dict.fromkeys([*split_methods(self.asked.methods), *(one.label for one in saved)]))

    def _answer(
        self,
        vlm: PrunedVLM,
        saved: Sequence[SavedPruner],
        questions: Questions,
        planned: Sequence[Measurement],
        follows: dict[str, str],
        places: Sequence[int],
        progress: Progress | None,
    ) -> Sheet:
        asked = self.asked
        path = None if asked.out is None else journal_file(asked.out)
        journal = Journal(path, follows, runs=1 + len(planned), count=len(all_asked(questions)))
        answers = evaluate_questions(
            vlm,
            questions,
            planned,
            journal,
            needs=needs_of(self.wanted(saved), saved),
            held=asked.hold,
            batch_size=asked.batch_size,
            max_new_tokens=self.max_new_tokens,
            progress=progress,
        )
        sheet = make_sheet(questions, answers, made_by=follows, places=places)
        if asked.out is not None:
            write_sheet(answers_file(asked.out), sheet)
            journal.close()
        return sheet

    def _sum_up(
        self,
        vlm: PrunedVLM,
        saved: Sequence[SavedPruner],
        sheet: Sheet,
        questions: Questions,
        sentences: list[str],
    ) -> Outcome:
        asked, answers = self.asked, sheet.answers
        origins = origins_of([one.entry for one in answers[1:]], saved)
        rows = quality_rows(
            answers,
            answers[0],
            versus=asked.versus or None,
            chance=sheet.chance,
            notes=sheet.notes,
            origins=origins,
        )
        few: list[str] = []
        known = [sum(value is not None for value in one.values.get(FIRST_TOKEN_KL, ())) for one in answers]
        if odd := sum(len(one.said) - count for one, count in zip(answers, known, strict=True)):
            few.append(f"{odd} answers have no {FIRST_TOKEN_KL}: theirs or the full model's logits are not finite")
        if asked.hard:
            if any(one.entry.method == DOWNSCALE for one in answers):
                more, too_few = hard_rows(answers, versus=asked.versus or None, origins=origins)
                rows, few = rows + more, few + too_few
            else:
                few.append(f"no question can be called hard: {DOWNSCALE} has no row")
        if asked.out is not None:
            if asked.data is None:
                counted = f"{asked.questions} scored questions a task, {asked.split} split"
                counted += f", world seed {asked.world_seed}" if asked.world_seed else ""
            else:
                counted = f"{len(all_asked(self.questions))} prompts"
            part = f"shard {asked.shard}" if asked.shard else ""  # what stands behind it is of this part alone
            write_results(
                asked.out,
                name=asked.out.stem,
                rows=rows,
                commit=asked.commit,
                device="cpu" if vlm.base.device.type == "cpu" and torch.cuda.is_available() else None,
                seeds=list(dict.fromkeys([*self.drawn, *(one.seed for one in saved)])),
                notes="; ".join(filter(None, [counted, questions.note, *sentences, part, *few])),
            )
        return Outcome(rows, answers, sentences + few)

    def _require_metrics(self, questions: Questions) -> None:
        for task in questions.tasks:
            if not task.metric_name:
                raise ValueError(
                    f"--shard cannot part the task {task.name!r}: its metric is its source's own, and parts are scored "
                    "again together; leave --shard out"
                )


def finished(out: Path | None, follows: dict[str, str]) -> Sheet | None:
    """The answers of a run that is over, where it was the same; a `ValueError` where it was another."""
    if out is None or not answers_file(out).exists():
        return None
    sheet = read_sheet(answers_file(out))
    require_same(answers_file(out), sheet.made_by, follows, way_out=WAY_OUT)
    return sheet
