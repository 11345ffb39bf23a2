"""Joining runs over the same questions: the table that one process would have made."""

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from diffprune.evaluate.answers import Answers, Entry, Sheet, answers_file, read_sheet, write_sheet
from diffprune.evaluate.join import choose_runs, join_files, join_sheets, main
from diffprune.evaluate.rows import quality_rows
from diffprune.results import read_results, write_results

QUESTIONS = [
    {"id": f"{task}-{place}", "task": task, "prompt": "what?", "answer": "yes"}
    for task in ("gqa", "pope")
    for place in range(4)
]


def answered(method: str, keep: int | float, seed: int, right: str) -> Answers:
    """Eight answers, four of each task; `right` has a 1 where one is right."""
    said = ["yes" if mark == "1" else "no" for mark in right]
    units = {task: [100.0 * int(mark) for mark in part] for task, part in (("gqa", right[:4]), ("pope", right[4:]))}
    score = {task: sum(values) / 4 for task, values in units.items()}
    return Answers(Entry(method, keep, seed), said, score, dict(score), units, seconds=1.0)


FULL = answered("full", 1.0, 0, "11111111")
OURS = [answered("diffprune", 64, 1, "11101111"), answered("diffprune", 64, 2, "11111011")]
RANDOM = answered("random", 64, 0, "10101111")


def sheet(*answers: Answers) -> Sheet:
    return Sheet(QUESTIONS, {"gqa": 25.0, "pope": 50.0}, [FULL, *answers], notes={"pope": "bare answers only"})


def saved(folder: Path, name: str, made: Sheet, **changes) -> Path:
    path = folder / f"{name}.json"
    rows = quality_rows(made.answers, made.answers[0])
    write_results(path, name=name, rows=rows, commit="abc", device="a card", notes="4 questions", **changes)
    write_sheet(answers_file(path), made)
    return path


def test_a_sheet_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_sheet(tmp_path / "x.answers.json", sheet(*OURS))
    assert read_sheet(tmp_path / "x.answers.json") == sheet(*OURS)


def test_two_processes_give_the_rows_of_one(tmp_path: Path) -> None:
    a, b = saved(tmp_path, "a", sheet(*OURS)), saved(tmp_path, "b", sheet(RANDOM))
    joined = join_files([a, b], tmp_path / "both.json", versus="diffprune")
    more = {"chance": sheet().chance, "notes": sheet().notes}
    plain = [{key: value for key, value in row.items() if key not in ("commit", "command")} for row in joined.rows]
    assert plain == quality_rows([FULL, *OURS, RANDOM], FULL, versus="diffprune", **more)
    assert joined.name == "both" and joined.commit == "abc" and joined.device == "a card" and joined.seeds == [0, 1, 2]
    assert joined.notes == "4 questions"
    assert read_sheet(tmp_path / "both.answers.json").answers == [FULL, *OURS, RANDOM]


def test_a_task_s_note_is_in_its_rows_and_in_no_other(tmp_path: Path) -> None:
    results = join_files([saved(tmp_path, "a", sheet(*OURS))], tmp_path / "joined.json")
    noted = {row.get("task"): row.get("notes") for row in results.rows}
    assert noted == {"gqa": None, "pope": "bare answers only", None: None}  # the last are summaries
    assert read_sheet(answers_file(tmp_path / "joined.json")).notes == {"pope": "bare answers only"}


def test_the_command_chooses_and_orders_methods_and_sums_up_over_some_tasks(tmp_path: Path, capsys) -> None:
    a, b = saved(tmp_path, "a", sheet(*OURS)), saved(tmp_path, "b", sheet(RANDOM, answered("norm", 8, 0, "00000000")))
    out = tmp_path / "c.json"
    main([str(a), str(b), "--out", str(out), "--methods", "random,*", "--without", "norm", "--also", "gqa"])
    assert "from 2 runs" in capsys.readouterr().out
    rows = [row for row in read_results(out).rows if "retention" in row]
    assert [(row["method"], row["tasks"]) for row in rows] == [
        (method, tasks) for tasks in ("all", "gqa") for method in ("full", "random", "diffprune")
    ]
    assert rows[-2]["retention"] == pytest.approx(50.0)  # random on gqa alone


def test_commas_inside_a_method_s_brackets_separate_no_methods(tmp_path: Path) -> None:
    cut = "pyramiddrop[layers=2,4]"
    path, out = saved(tmp_path, "a", sheet(RANDOM, answered(cut, 64, 0, "00000000"))), tmp_path / "b.json"
    for options, wanted in ((["--methods", f"{cut},random"], [cut, "random"]), (["--without", cut], ["random"])):
        main([str(path), "--out", str(out), *options])
        assert [row["method"] for row in read_results(out).rows if "retention" in row] == ["full", *wanted]


def test_budgets_are_chosen() -> None:
    answers = [FULL, RANDOM, answered("random", 32, 0, "00000000")]
    assert choose_runs(answers, budgets=[32]) == [FULL, answers[2]]
    with pytest.raises(ValueError, match="there are no answers of 'randm'; there are random"):
        choose_runs(answers, ["randm"])


def test_full_answers_that_differ_a_little_are_told(tmp_path: Path) -> None:
    other = replace(FULL, said=["Yes.", *FULL.said[1:]])  # as right
    a, b = saved(tmp_path, "a", sheet(*OURS)), saved(tmp_path, "b", Sheet(QUESTIONS, sheet().chance, [other, RANDOM]))
    notes = join_files([a, b], tmp_path / "c.json").notes
    assert "full model's answers differ between processes on 1 of 8 prompts" in notes


def test_another_model_is_refused() -> None:
    other = Sheet(QUESTIONS, {}, [answered("full", 1.0, 0, "01111111"), RANDOM])
    with pytest.raises(ValueError, match=r"the full model has 100.0 on gqa in a and 75.0 in b"):
        join_sheets([sheet(*OURS), other], ["a", "b"])


def test_other_questions_are_refused() -> None:
    other = Sheet(QUESTIONS[:-1], {}, [FULL])
    with pytest.raises(ValueError, match="a and b hold answers to other questions"):
        join_sheets([sheet(), other], ["a", "b"])


def test_the_same_run_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="random at keep=64 with seed 0 is in a and in b"):
        join_sheets([sheet(RANDOM), sheet(RANDOM)], ["a", "b"])


def test_runs_of_two_commits_are_refused(tmp_path: Path) -> None:
    a, b = saved(tmp_path, "a", sheet(*OURS)), saved(tmp_path, "b", sheet(RANDOM))
    b.write_text(b.read_text().replace('"abc"', '"def"'))
    with pytest.raises(ValueError, match=r"more than one commit \(abc, def\)"):
        join_files([a, b], tmp_path / "c.json")


def test_runs_of_two_commits_can_be_asked_for_and_are_told_apart(tmp_path: Path) -> None:
    a, b = saved(tmp_path, "a", sheet(*OURS)), saved(tmp_path, "b", sheet(RANDOM))
    b.write_text(b.read_text().replace('"abc"', '"def"').replace('"a card"', '"a CPU"'))
    joined = join_files([a, b], tmp_path / "c.json", mixed=True)
    assert joined.commit == "abc" and joined.device == "a card" and joined.notes.endswith("random: commit def on a CPU")
    assert {row["commit"] for row in joined.rows if row["method"] == "random"} == {"def"}
    assert {row["commit"] for row in joined.rows if row["method"] != "random"} == {"abc"}
    left_out = join_files([a, b], tmp_path / "d.json", mixed=True, without=["random"])
    assert "def" not in left_out.notes  # nothing of it is in the file


def made(sheet: Sheet, **more: str) -> Sheet:
    alike = {"questions": "8, aa", "model": "m 11", "positions": "original, newlines True, joint", "length": "8 tokens"}
    return replace(sheet, made_by={**alike, "precision": "float32 on cpu", **more})


def test_the_same_questions_about_other_pictures_are_refused(tmp_path: Path) -> None:
    """Sizes of pictures, for one, are in no question's words."""
    a, b = saved(tmp_path, "a", made(sheet(*OURS))), saved(tmp_path, "b", made(sheet(RANDOM), questions="8, bb"))
    with pytest.raises(ValueError, match=r"a.json and .*b.json asked about other pictures \(8, aa; 8, bb\); .*--mixed"):
        join_files([a, b], tmp_path / "c.json")
    notes = join_files([a, b], tmp_path / "c.json", mixed=True).notes
    assert notes == "4 questions; random: questions 8, bb (others 8, aa)"


@pytest.mark.parametrize(
    ("what", "other"),
    [
        ("positions", "packed, newlines True, joint"),
        ("precision", "float16 on cuda"),
        ("length", "2 tokens"),
        ("model", "m 22"),
    ],
)
def test_runs_that_were_asked_otherwise_stand_together_with_a_word(tmp_path: Path, what: str, other: str) -> None:
    first = made(sheet(*OURS))
    a, b = saved(tmp_path, "a", first), saved(tmp_path, "b", made(sheet(RANDOM), **{what: other}))
    notes = join_files([a, b], tmp_path / "c.json").notes
    assert notes == f"4 questions; random: {what} {other} (others {first.made_by[what]})"
    same = saved(tmp_path, "d", made(sheet(RANDOM), model="elsewhere 11"))
    assert join_files([a, same], tmp_path / "e.json").notes == "4 questions"
    unknown = saved(tmp_path, "f", sheet(RANDOM))  # of before it was written down, or joined
    assert join_files([a, unknown], tmp_path / "g.json").notes == "4 questions"


def test_shards_of_two_commits_say_so(tmp_path: Path) -> None:
    parts = []
    for place, commit in enumerate(("abc", "def")):
        one = Answers(Entry("full", 1.0, 0), ["yes"], {"gqa": 100.0}, {"gqa": 100.0}, {"gqa": [100.0]})
        question = {"id": f"{place}", "task": "gqa", "prompt": "what?", "answer": "yes"}
        more = {"metrics": {"gqa": "exact"}, "made_by": {"shard": f"{place}/2"}, "places": [place]}
        path = saved(tmp_path, f"{place}", Sheet([question], {"gqa": 100.0}, [one], **more))
        path.write_text(path.read_text().replace('"abc"', f'"{commit}"'))
        parts.append(path)
    joined = join_files(parts, tmp_path / "x.json", mixed=True)
    assert joined.commit == "abc, def" and {row["commit"] for row in joined.rows} == {"abc, def"}


def test_a_joined_file_tells_when_and_with_what_its_parts_ran(tmp_path: Path) -> None:
    a = saved(tmp_path, "a", sheet(*OURS), date="2026-01-01T00:00:00Z", versions={"torch": "1.0"})
    b = saved(tmp_path, "b", sheet(RANDOM), date="2026-01-02T00:00:00Z", versions={"torch": "1.0"})
    joined = join_files([b, a], tmp_path / "c.json")
    assert joined.versions == {"torch": "1.0"} and joined.date == "2026-01-02T00:00:00Z"


def test_a_lead_of_a_method_that_is_not_there_is_refused(tmp_path: Path) -> None:
    a = saved(tmp_path, "a", sheet(RANDOM))
    with pytest.raises(ValueError, match="--versus 'diffprune' is not among the methods joined"):
        join_files([a], tmp_path / "c.json", versus="diffprune")


@pytest.mark.parametrize(
    ("content", "words"), [(None, "cannot read the answers"), ("{}", "holds no answers"), ("[", "holds no answers")]
)
def test_answers_that_cannot_be_read_are_named(tmp_path: Path, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / "x.answers.json").write_text(content)
    with pytest.raises(ValueError, match=words):
        read_sheet(tmp_path / "x.answers.json")


def test_a_file_of_an_older_version_without_scores_is_refused(tmp_path: Path) -> None:
    write_sheet(tmp_path / "x.answers.json", sheet())
    old = json.loads((tmp_path / "x.answers.json").read_text())
    del old["runs"][0]["score"]
    (tmp_path / "x.answers.json").write_text(json.dumps(old))
    with pytest.raises(ValueError, match="write it again with `diffprune eval`"):
        read_sheet(tmp_path / "x.answers.json")


def test_every_row_carries_the_command_recipe_and_choice_of_its_own_run(tmp_path: Path) -> None:
    a = saved(tmp_path, "a", sheet(OURS[0]), command="eval a")
    b = saved(tmp_path, "b", sheet(OURS[1], RANDOM), command="eval b")
    for path, seed in ((a, 1), (b, 2)):
        found = read_results(path)
        rows = [
            row | {"recipe": "bridge", "choice": "top-k"} if row["method"] == "diffprune" else row for row in found.rows
        ]
        write_results(
            path, name=path.stem, rows=rows, command=found.command, commit="abc", device="a card", seeds=[seed]
        )
    joined = join_files([a, b], tmp_path / "c.json", tuned={"diffprune*": "chosen on validation", "*": "as published"})
    by_seed = {row["seed"]: row for row in joined.rows if row["method"] == "diffprune" and "task" in row}
    assert by_seed[1]["command"] == "eval a" and by_seed[2]["command"] == "eval b"
    assert by_seed[1]["recipe"] == "bridge" and by_seed[1]["choice"] == "top-k"
    summary = {row["method"]: row for row in joined.rows if "retention" in row}
    assert summary["diffprune"]["command"] == "eval a && eval b" and summary["diffprune"]["recipe"] == "bridge"
    assert summary["diffprune"]["tuned"] == "chosen on validation" and "tuned" not in summary["random"]  # not trained
    again = join_files([tmp_path / "c.json"], tmp_path / "d.json")  # a joined file may be a part
    assert {row["command"] for row in again.rows if row.get("seed") == 2} == {"eval b"}


def test_shards_put_together_carry_the_command_of_each(tmp_path: Path) -> None:
    both = [f"what is {place}" for place in range(2)]
    parts = []
    for place, day in enumerate(("2026-01-02", "2026-01-01")):
        made = Sheet(
            [{"id": f"{place}", "task": "gqa", "prompt": both[place], "answer": "yes"}],
            {"gqa": 100.0},
            [Answers(Entry("full", 1.0, 0), ["yes"], {"gqa": 100.0}, {"gqa": 100.0}, {"gqa": [100.0]})],
            metrics={"gqa": "exact"},
            made_by={"shard": f"{place}/2"},
            places=[place],
        )
        parts.append(saved(tmp_path, f"{place}", made, command=f"eval {place}", date=f"{day}T00:00:00Z"))
    joined = join_files(parts, tmp_path / "x.json")
    assert {row["command"] for row in joined.rows} == {"eval 0 && eval 1"} and joined.date == "2026-01-02T00:00:00Z"


def test_an_output_that_cannot_be_written_is_one_sentence(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    path = saved(tmp_path, "a", sheet(RANDOM))
    monkeypatch.setattr(sys, "argv", ["join", str(path), "--out", str(tmp_path / "link" / "x.json")])
    monkeypatch.delitem(sys.modules, "diffprune.evaluate.join")
    with pytest.raises(SystemExit, match=r"error: .*File exists"):
        runpy.run_module("diffprune.evaluate.join", run_name="__main__")


def test_repetitions_are_named_on_the_command_line(tmp_path: Path) -> None:
    again = [replace(one, entry=replace(one.entry, method="again[x=1]")) for one in OURS]
    path, out = saved(tmp_path, "a", sheet(*OURS, *again)), tmp_path / "b.json"
    main([str(path), "--out", str(out), "--repeats", "diffprune=again[x=1]"])
    summary = {row["method"]: row for row in read_results(out).rows if "retention" in row}
    assert summary["diffprune"]["repeat_std"] == 0.0 and "again[x=1]" not in summary
    with pytest.raises(ValueError, match="--tuned 'diffprune' is no NAME=WORDS"):
        main([str(path), "--out", str(out), "--tuned", "diffprune"])


def test_hard_questions_are_summed_up_once_more_over_joined_runs(tmp_path: Path) -> None:
    def many(method: str, keep: int | float, right: int) -> Answers:
        units = {"gqa": [100.0] * right + [0.0] * (80 - right)}
        said = ["yes" if unit else "no" for unit in units["gqa"]]
        return Answers(Entry(method, keep, 0), said, {"gqa": right / 0.8}, {"gqa": right / 0.8}, units, seconds=1.0)

    questions = [{"id": f"{place}", "task": "gqa", "prompt": "what?", "answer": "yes"} for place in range(80)]
    full = many("full", 1.0, 80)
    parts = [
        saved(tmp_path, one.entry.method, Sheet(questions, {"gqa": 25.0}, [full, one]))
        for one in (many("downscale", 8, 20), many("random", 8, 50))
    ]
    main([*map(str, parts), "--out", str(tmp_path / "both.json"), "--hard"])
    (row,) = [row for row in read_results(tmp_path / "both.json").rows if row.get("tasks") == "hard"]
    assert (row["method"], row["num_hard"], row["retention"]) == ("random", 60, 50.0)
    with pytest.raises(ValueError, match="downscale has wrong, and it is not among the methods; add it"):
        main([str(parts[1]), "--out", str(tmp_path / "one.json"), "--hard"])
    assert not (tmp_path / "one.json").exists()
