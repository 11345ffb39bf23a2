"""The public benchmarks behind the paper's ten columns, as lmms-eval has them, and what their protocols are.

One table for the code that runs them, the rows that come out and docs/harness.md: task, split, score key and a note on
where the harness, LLaVA's own scripts and the paper differ. Nothing here needs the harness.
"""

import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from diffprune.evaluate.task import METRICS, Question

Doc = Mapping[str, Any]  # a row of a benchmark, pictures aside, as the harness gives it
Reading = Literal["value", "f1", "pairs", "circular", "letter"]
LETTERS = "ABCD"
ROTATION = 1_000_000  # MMBench numbers the rotations of question i as i + 1,000,000 and so on


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A benchmark by its task in the harness.

    Attributes:
        column: What the paper's tables call it.
        hub: The dataset's id on the hub.
        keys: The harness's score keys; more than one are added up.
        reading: How a question's verdict is read from what the harness keeps of it (`readings.py`).
        metric: The metric of ours that scores the same, by its name in `METRICS`; empty where there is none.
        question: What that metric reads, from the benchmark's row.
        note: What the reader of a row must know.
    """

    task: str
    column: str
    hub: str
    split: str
    keys: tuple[str, ...]
    reading: Reading
    metric: str
    question: Callable[[Doc], dict[str, Any]]
    note: str

    @property
    def row_note(self) -> str:
        """The note as a row carries it, with the split and the key."""
        return f"lmms-eval {self.task}: {self.split} split, {' + '.join(self.keys)}; {self.note}"

    def ask(self, doc: Doc, *, id: str, prompt: str = "") -> Question:
        """The row as a question of ours."""
        return Question(id=id, prompt=prompt, **self.question(doc))


def _first(answers: Sequence[str]) -> dict[str, Any]:
    return {"answer": max(answers, key=list(answers).count), "answers": tuple(answers)}


def _options(doc: Doc) -> tuple[str, ...]:
    return tuple(str(doc[letter]) for letter in LETTERS if doc.get(letter) not in (None, "nan"))


def _mmbench(doc: Doc) -> dict[str, Any]:
    return {"answer": doc["answer"], "choices": _options(doc), "group": int(doc["index"]) % ROTATION}


def _seed(doc: Doc) -> dict[str, Any]:
    return {"answer": doc["answer"], "choices": tuple(str(doc[f"choice_{letter}"]) for letter in "abcd")}


def _mme(doc: Doc) -> dict[str, Any]:
    return {"answer": doc["answer"].lower(), "subset": doc["category"], "group": doc["question_id"]}


PAPER = (
    Benchmark(
        "gqa", "GQA", "lmms-lab-encoder/GQA", "testdev", ("exact_match",), "value", "exact",
        lambda doc: {"answer": doc["answer"]},
        "exact match without letter case and punctuation; LLaVA's script leaves punctuation but for a final period",
    ),
    Benchmark(
        "mmbench_en_dev_static", "MMB", "lmms-lab-encoder/MMBench", "dev", ("gpt_eval_score",), "circular", "circular",
        _mmbench,
        "circular; letters and option texts read by rules, no judge is asked although the key is named after one; "
        "LLaVA sends its answers to the benchmark's server",
    ),
    Benchmark(
        "mmbench_cn_dev", "MMB-CN", "lmms-lab-encoder/MMBench", "dev", ("gpt_eval_score",), "circular", "circular",
        _mmbench,
        "circular; the harness has no static variant and asks a judge, so answers are read here by the rules of the "
        "English one; LLaVA sends its answers to the benchmark's server",
    ),
    Benchmark(
        "mme", "MME", "lmms-lab-encoder/MME", "test", ("mme_perception_score", "mme_cognition_score"), "pairs", "mme",
        _mme,
        "the sum of perception and cognition, 2,800 points at most, as the paper's; LLaVA reports perception",
    ),
    Benchmark(
        "pope", "POPE", "lmms-lab-encoder/POPE", "test", ("pope_f1_score",), "f1", "pope",
        lambda doc: {"answer": doc["answer"].lower()},
        "a bare yes or no counts and nothing else, one F1 over all rows; LLaVA's script takes any answer without a no "
        "for a yes and averages F1 over the three kinds of negatives",
    ),
    Benchmark(
        "scienceqa_img", "SQA", "lmms-lab-encoder/ScienceQA", "test", ("exact_match",), "value", "choice",
        lambda doc: {"answer": string.ascii_uppercase[doc["answer"]], "choices": tuple(doc["choices"])},
        "questions with a picture; a letter alone or with a period behind it counts; LLaVA's script also finds the "
        "letter in `The answer is B.`",
    ),
    Benchmark(
        "vqav2_val", "VQAv2", "lmms-lab-encoder/VQAv2", "validation", ("exact_match",), "value", "vqa",
        lambda doc: _first([one["answer"] for one in doc["answers"]]),
        "answers normalised as the VQA script does; LLaVA sends its answers to the server, for the test-dev split",
    ),
    Benchmark(
        "textvqa_val", "TextVQA", "lmms-lab-encoder/textvqa", "validation", ("exact_match",), "value", "vqa_evalai",
        lambda doc: _first(doc["answers"]),
        "answers normalised as EvalAI does; no OCR tokens in the prompt: LLaVA's script puts them in, and its 58.2 has "
        "them",
    ),
    Benchmark(
        "seedbench", "SEED", "lmms-lab-encoder/SEED-Bench", "test", ("seed_image",), "letter", "choice", _seed,
        "questions about pictures; those about videos are asked and do not count; the first character of an answer is "
        "its letter",
    ),
    Benchmark(
        "vizwiz_vqa_val", "VizWiz", "lmms-lab-encoder/VizWiz-VQA", "val", ("exact_match",), "value", "vqa_evalai",
        lambda doc: _first(doc["answers"]),
        "answers normalised as EvalAI does; LLaVA sends its answers to the server, for the test split",
    ),
)  # fmt: skip
SUITES: dict[str, tuple[Benchmark, ...]] = {"paper": PAPER}


def suite_tasks(suite: str) -> tuple[str, ...]:
    """The tasks of a suite."""
    if suite not in SUITES:
        raise ValueError(f"there is no suite {suite!r}; choose {' or '.join(SUITES)}")
    return tuple(one.task for one in SUITES[suite])


def chance(benchmark: Benchmark, questions: Sequence[Question]) -> float:
    """The score (0 to 100) of guessing without the picture."""
    return METRICS[benchmark.metric].chance(questions)


def protocol_table() -> str:
    """The suite as docs/harness.md shows it."""
    lines = ["| paper | task | dataset | split | score key | note |", "|---|---|---|---|---|---|"]
    for one in PAPER:
        keys = " + ".join(f"`{key}`" for key in one.keys)
        lines.append(f"| {one.column} | `{one.task}` | {one.hub} | {one.split} | {keys} | {one.note} |")
    return "\n".join(lines) + "\n"
