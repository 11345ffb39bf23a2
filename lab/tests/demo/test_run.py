"""The demo's work and what it leaves behind."""

import json
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from diffprune.cli import main as cli
from diffprune.evaluate.answers import Answers
from diffprune.evaluate.encoded import EncodedQuestions
from diffprune.evaluate.task import Question
from diffprune.model import PrunedVLM
from diffprune.registry import METHODS as REGISTERED
from diffprune.results import check_rows
from diffprune_lab.demo import run
from diffprune_lab.demo.examples import SHOWN_TASKS, differing_questions
from diffprune_lab.demo.story import BUDGETS, QUICK
from lab.tests import tiny_scenes

METHODS = {"full", *run.LEARNED, *run.OTHERS, "oracle", *({run.DIVERSE} & REGISTERED.declared)}


def test_every_method_answers_every_task_at_every_budget(demo) -> None:
    rows = [row for row in demo.story.rows if "task" in row]
    assert {row["method"] for row in rows} == METHODS
    assert len(rows) == 10 * (1 + (len(METHODS) - 1) * len(BUDGETS))
    summaries = {(row["method"], row["keep"]) for row in demo.story.rows if "retention" in row}
    assert summaries == {("full", 1.0)} | {(method, keep) for method in METHODS - {"full"} for keep in BUDGETS}


def test_the_summary_has_the_contract_s_keys(demo) -> None:
    summary = json.loads((demo.folder / "summary.json").read_text())
    check_rows(summary["rows"])
    assert summary["rows"] == demo.story.rows
    assert summary["seconds"]["total"] == pytest.approx(sum(demo.story.seconds.values()))
    assert {"python", "torch", "transformers"} <= set(summary["versions"])
    assert set(summary["steps"]) == {"diffprune", "gumbel_ste"}


def test_both_scorers_train_on_the_same_steps_from_the_same_start(demo) -> None:
    ours, other = demo.story.losses["diffprune"], demo.story.losses["gumbel_ste"]
    assert len(ours) == len(other) == QUICK.steps


def test_progress_is_told_to_the_end_of_every_stage(demo) -> None:
    last = {stage: (done, total) for stage, done, total in demo.progress}
    assert set(last) == {"train diffprune", "train gumbel_ste", "encode pictures", "answer", "write the page"}
    assert all(done == total for done, total in last.values())


def test_the_trained_pruner_is_saved_and_loads(demo) -> None:
    base, processor = tiny_scenes.always_says("yes")
    vlm = PrunedVLM.from_pretrained(demo.folder / "pruner", base=base, processor=processor)
    assert vlm.method.name == "diffprune" and vlm.budget.keep == BUDGETS[1]
    assert vlm.generate([str(demo.folder / "picture.png")], "What is this?", max_new_tokens=2) == "yes"


def test_examples_show_what_was_chosen_and_said(demo) -> None:
    assert [example.task for example in demo.story.examples] == list(SHOWN_TASKS)
    for example in demo.story.examples:
        assert set(example.kept) == set(example.said) == METHODS - {"full"}
        for by_budget in example.kept.values():
            assert {keep: len(kept) for keep, kept in by_budget.items()} == {keep: keep for keep in BUDGETS}


def test_questions_on_which_methods_split_are_shown_whoever_is_right() -> None:
    asked = [Mock(spec=Question, answer="a", choices=None) for _ in range(6)]
    tasks = [SimpleNamespace(name="one", questions=asked[:4]), SimpleNamespace(name="two", questions=asked[4:])]
    said = {"full": "aaaaba", "x": "abbaab", "y": "aababb", "z": "abaabb", "oracle": "bbbbbb"}
    answers = [
        Mock(spec=Answers, entry=SimpleNamespace(method=name, keep=8), said=list(text)) for name, text in said.items()
    ]
    encoded = Mock(spec=EncodedQuestions, tasks=tasks)
    found = [(task, number) for task, number, _ in differing_questions(encoded, answers, [1])]
    # All agree on 0, 1 is taken, 3 comes later, the full model is wrong on 4, and all pruned ones are on 5.
    assert found == [("one", 2)]


def test_fewer_tokens_cost_fewer_operations(demo) -> None:
    counted = list(demo.story.flops.values())
    assert list(demo.story.flops) == [tiny_scenes.NUM_VISUAL, *BUDGETS]
    assert counted == sorted(counted, reverse=True)


def test_a_failed_run_leaves_what_was_there(tmp_path: Path, demo, monkeypatch) -> None:
    out = tmp_path / "demo"
    out.mkdir()
    (out / "index.html").write_text("the old page")

    def fail(*_: object) -> str:
        raise OSError("no space left")

    monkeypatch.setattr(run, "render_page", fail)
    with pytest.raises(OSError, match="no space"):
        run._write(out, demo.story, tiny_scenes.pruned("diffprune"))
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]
    assert [path.name for path in out.iterdir()] == ["index.html"]
    assert (out / "index.html").read_text() == "the old page"


def test_a_second_run_takes_the_place_of_the_first(tmp_path: Path, demo) -> None:
    for _ in range(2):
        run._write(tmp_path / "demo", demo.story, tiny_scenes.pruned("diffprune"))
    names = {path.name for path in (tmp_path / "demo").iterdir()}
    assert names == {"index.html", "summary.json", "pruner", "picture.png"}


def test_a_folder_that_cannot_be_written_is_told_before_the_work(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(run, "load_base", lambda name: pytest.fail("the work has started"))
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "demo"):
        code = cli._run(["demo", "--out", str(out)])
        err = capsys.readouterr().err
        assert code == 2 and "cannot write into" in err and "--out" in err and err.count("\n") == 1


def test_the_larger_model_is_asked_the_same_where_its_pruner_is_installed(tmp_path: Path, demo, monkeypatch) -> None:
    base, processor = tiny_scenes.build()
    assert run._larger_examples(demo.story.examples[:2]) == [] or (run.ASSETS / "scenes-llava-diffprune").is_dir()
    PrunedVLM(base, processor, method="diffprune", keep=4).save_pretrained(tmp_path / "scenes-llava-diffprune")
    monkeypatch.setattr(run, "ASSETS", tmp_path)
    monkeypatch.setattr(run, "load_base", lambda name: (base, processor))
    larger = run._larger_examples(demo.story.examples[:2])
    assert [example.question for example in larger] == [example.question for example in demo.story.examples[:2]]
    assert [len(kept) for kept in larger[0].kept["diffprune"].values()] == list(BUDGETS)  # the same share of 36
