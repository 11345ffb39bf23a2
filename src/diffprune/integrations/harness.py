"""Public benchmarks through lmms-eval, in this process: every method and budget, and its answers as our `Sheet`.

The harness loads the data, poses the questions and judges the answers; retention, intervals, leads and reports are then
those of any other questions. Under `torchrun` the questions are shared out, and the first process has all answers.
"""

import contextlib
import importlib
import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diffprune.evaluate.answers import Answers, Entry, Sheet
from diffprune.evaluate.task import Question
from diffprune.integrations.lmms import MODEL_ID, harness_version, require_harness
from diffprune.integrations.readings import Sample, counted, read, static_circular
from diffprune.integrations.resuming import Answered
from diffprune.integrations.suites import PAPER, Benchmark, chance
from diffprune.methods.base import Pruner
from diffprune.model import PrunedVLM
from diffprune.terminal import first_line

SAME = 1e-6  # of a score, by which the harness's number and the mean of our units may differ
JUDGED = "mmbench_cn_dev"  # asks a judge where it could read by rules


def rank() -> int:
    """Of this process among those that share the questions; the first has the answers."""
    return int(os.environ.get("RANK", 0))


def processes() -> int:
    """How many share the questions."""
    return int(os.environ.get("WORLD_SIZE", 1))


def local_device(device: str) -> str:
    """Where this process runs: the device given, or with several processes one each."""
    if processes() == 1:
        return device
    from accelerate import Accelerator

    return str(Accelerator().device)


# Tasks ---------------------------------------------------------------------------------------------------------------


def load_tasks(names: Sequence[str], include: Sequence[Path] = ()) -> list[tuple[Benchmark, Any]]:
    """The harness's tasks with their data, each with how it is read; one whose data cannot be had is named.

    Args:
        names: Of benchmarks of a suite, or of any other task of the harness whose score is a mean over questions.
        include: Folders with further tasks of the harness.
    """
    require_harness()
    from lmms_eval.tasks import TaskManager, get_task_dict  # pyright: ignore[reportMissingImports]
    from loguru import logger  # pyright: ignore[reportMissingImports]

    importlib.import_module("lmms_eval.evaluator")
    logger.remove()  # importing it has sent its log to stdout, which is for results
    logger.add(sys.stderr, level="WARNING")
    known = {one.task: one for one in PAPER}
    manager = TaskManager(include_path=[str(path) for path in include] or None, model_name=MODEL_ID)
    found = []
    for name in names:
        if name not in manager.task_index:
            raise ValueError(
                f"lmms-eval {harness_version()} has no task {name!r}; choose from {', '.join(known)}, or give the "
                "folder of its task with --include"
            )
        try:
            loaded = get_task_dict([name], manager, "chat")
        except Exception as error:  # the harness tries five times, and wraps whatever the last try raised
            raise not_there(name, known[name].hub if name in known else "", error) from error
        if isinstance(loaded.get(name), dict) or name not in loaded:
            raise ValueError(f"{name!r} is a group of tasks of lmms-eval; name its tasks one by one")
        task = loaded[name]
        if name == JUDGED:
            task._aggregation_list["gpt_eval_score"] = static_circular
        found.append((known.get(name) or own_benchmark(name, task), task))
    return found


def own_benchmark(name: str, task: Any) -> Benchmark:
    """A task that no suite has, read by its first score that is a mean over questions."""
    config = task.config
    means = [one["metric"] for one in config.metric_list or () if one.get("aggregation") == "mean"]
    if not means or config.output_type != "generate_until":
        raise ValueError(
            f"{name!r} of lmms-eval has no score that is a mean over generated answers, so its questions cannot be "
            f"compared; choose from {', '.join(one.task for one in PAPER)}, or run lmms-eval with --model {MODEL_ID}"
        )
    field = config.doc_to_target if isinstance(config.doc_to_target, str) else "answer"
    return Benchmark(
        task=name,
        column=name,
        hub=str(config.dataset_path),
        split=str(config.test_split or config.validation_split),
        keys=(means[0],),
        reading="value",
        metric="",
        question=lambda doc: {"answer": str(doc.get(field, ""))},
        note="scored by the harness",
    )


def not_there(name: str, hub_id: str, error: Exception) -> ValueError:
    """The sentence for a task whose data cannot be had: its hub id, where it was looked for, and why."""
    import datasets.config
    import huggingface_hub.constants as hub

    attempt = getattr(error, "last_attempt", None)  # of tenacity's wrapper
    cause = (attempt.exception() if attempt is not None else None) or error
    reason = first_line(cause).rstrip(".")
    folder = f"in the folder {Path.cwd() / hub_id}, " if hub_id else ""
    offline = " (HF_HUB_OFFLINE is set)" if hub.HF_HUB_OFFLINE else ""
    return ValueError(
        f"the data of {name}{f' ({hub_id})' if hub_id else ''} is not on disk: looked for {folder}in "
        f"{datasets.config.HF_DATASETS_CACHE} and on the hub{offline}: {reason}; fetch it where the hub can be "
        "reached, or put the files of its repository into that folder"
    )


# Answers -------------------------------------------------------------------------------------------------------------


def ask_all(
    vlm: PrunedVLM,
    measurements: Sequence[tuple[Entry, Pruner]],
    tasks: Sequence[tuple[Benchmark, Any]],
    *,
    limit: int | None = None,
    batch_size: int = 1,
    answered: Sequence[Answered] = (),
) -> Sheet | None:
    """Every measurement's answers to every benchmark; None in a process that is not the first.

    Args:
        measurements: How each is listed and what chooses; the full model is asked first and not among them.
        limit: Rows of each benchmark's data; default: all.
        answered: Of the full model and of each measurement what was answered before; default: nothing, and nothing is
            written down.
    """
    if processes() > 1:
        print(f"process {rank() + 1} of {processes()} answers on {vlm.base.device}", file=sys.stderr)
    everything = [(Entry("full", 1.0, 0), vlm.method), *measurements]
    benchmarks = [one for one, _ in tasks]
    sheet: Sheet | None = None
    for place, (entry, pruner) in enumerate(everything):
        pruned = vlm.with_method(pruner, keep=entry.keep)
        known = answered[place] if answered else None
        parts = [_ask(pruned, one, task, limit, batch_size, known) for one, task in tasks]
        if rank() != 0:
            continue
        if sheet is None:
            sheet = _empty_sheet(benchmarks, [samples for samples, _ in parts])
        sheet.answers.append(_scored(entry, benchmarks, parts))
    return sheet


def _ask(
    vlm: PrunedVLM, benchmark: Benchmark, task: Any, limit: int | None, batch_size: int, answered: Answered | None
) -> tuple[list[Sample], float]:
    """What the harness keeps of each question that counts, and its own score."""
    from lmms_eval.evaluator import simple_evaluate  # pyright: ignore[reportMissingImports]
    from lmms_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    from diffprune.integrations.lmms_model import Chat

    if limit is not None and benchmark.reading == "pairs":
        limit += limit % 2  # a pair is scored as one
    # The harness prints, and some tasks write files for a server to where it is told its output belongs.
    with contextlib.redirect_stdout(sys.stderr), tempfile.TemporaryDirectory() as folder:
        found = simple_evaluate(
            model=Chat(vlm=vlm, batch_size=batch_size, answered=answered),
            tasks=[task],
            task_manager=TaskManager(include_defaults=False),  # by default it would index all tasks once more
            batch_size=batch_size,
            limit=limit,
            bootstrap_iters=0,
            cli_args=Namespace(output_path=folder, process_with_media=False, reasoning_tags=None),
        )
    if rank() != 0:
        return [], 0.0
    if not found or not found.get("samples", {}).get(benchmark.task):
        raise ValueError(f"lmms-eval gave no answers for {benchmark.task}; run it with --limit 8 to see its log")
    samples = counted(benchmark, found["samples"][benchmark.task])
    if not samples:
        raise ValueError(
            f"none of the {len(found['samples'][benchmark.task])} rows of {benchmark.task} that were asked has a score "
            f"{' or '.join(benchmark.keys)}; ask more with --limit"
        )
    scores = {key.split(",")[0]: value for key, value in found["results"][benchmark.task].items()}
    own = sum(float(scores[key]) for key in benchmark.keys if key in scores)
    return samples, own


def _empty_sheet(benchmarks: Sequence[Benchmark], samples: Sequence[Sequence[Sample]]) -> Sheet:
    asked = {
        one.task: [_question(one, sample) for sample in some] for one, some in zip(benchmarks, samples, strict=True)
    }
    return Sheet(
        questions=[
            {"id": question.id, "task": task, "prompt": question.prompt, "answer": question.answer}
            for task, questions in asked.items()
            for question in questions
        ],
        chance={one.task: chance(one, asked[one.task]) for one in benchmarks if one.metric},
        notes={one.task: one.row_note for one in benchmarks},
    )


def _question(benchmark: Benchmark, sample: Sample) -> Question:
    prompt = next((part for part in sample["arguments"] if isinstance(part, str)), "")
    return benchmark.ask(sample["doc"], id=f"{benchmark.task}-{sample['doc_id']}", prompt=prompt)


def _scored(entry: Entry, benchmarks: Sequence[Benchmark], parts: Sequence[tuple[list[Sample], float]]) -> Answers:
    """One measurement's answers; the mean of the units must be the harness's own score."""
    answers = Answers(entry, [], {}, {}, {})
    lengths: list[float | None] = []
    for one, (samples, own) in zip(benchmarks, parts, strict=True):
        scored, maximum = read(one, samples)
        raw = scored.score / 100 * maximum
        harness = own if maximum > 100 or one.reading == "circular" else 100 * own  # the rest are shares of 1
        if abs(raw - harness) > SAME * maximum:
            raise ValueError(
                f"{one.task} of {entry.method} is {raw:.4f} by its questions and {harness:.4f} by lmms-eval, which has "
                "changed its scoring; install lmms-eval 0.7.3"
            )
        answers.score[one.task], answers.raw[one.task], answers.units[one.task] = scored.score, raw, scored.units
        answers.asked.extend([one.task] * len(samples))
        answers.said.extend(str(sample["filtered_resps"][0]) for sample in samples)
        lengths += [(sample["token_counts"][0] or {}).get("input_tokens") for sample in samples]
    answers.values["prompt_tokens"] = lengths
    return answers
