"""`diffprune eval` on a tiny model from a folder."""

import json
from pathlib import Path

import pytest
import torch

from diffprune.cli import main as cli
from diffprune.results import read_results
from tests import tiny_scenes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that always says yes, saved as the hub's files are."""
    path = tmp_path_factory.mktemp("model")
    model, processor = tiny_scenes.always_says("yes")
    model.save_pretrained(path)
    processor.save_pretrained(path)
    return path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], folder: Path):
    """Runs eval on that model; gives its exit code, stdout and stderr."""

    def run_arguments(*arguments: str) -> tuple[int, str, str]:
        chosen = () if "--pruner" in arguments else ("--model", str(folder))
        code = cli._run(["eval", *chosen, "--questions", "2", "--device", "cpu", *arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run_arguments


def test_methods_and_budgets_are_compared_and_written(run, tmp_path: Path) -> None:
    out = tmp_path / "new" / "x.json"
    code, printed, _ = run(
        "--methods", "full,random,oracle", "--keep", "8,0.1", "--tasks", "pope,gqa", "--seeds", "0,1", "--blind",
        "--out", str(out), "--commit", "abc",
    )  # fmt: skip
    assert code == 0 and "retention" in printed
    results = read_results(out)
    assert results.name == "x" and results.commit == "abc" and results.seeds == [0, 1]
    quality = {(row["method"], row["keep"], row["seed"]) for row in results.rows if "task" in row}
    random = {("random", keep, seed) for keep in (8, 0.1) for seed in (0, 1)}
    assert quality == random | {("full", 1.0, 0), ("oracle", 8, 0), ("oracle", 0.1, 0), ("blind", 1.0, 0)}
    assert all("chance" in row for row in results.rows if "task" in row)
    answers = json.loads(out.with_suffix(".answers.json").read_text())
    assert {said for one in answers["runs"] for said in one["said"]} == {"yes"}


def test_json_is_all_that_is_printed(run) -> None:
    code, out, err = run("--tasks", "pope", "--json")
    rows = json.loads(out)
    assert code == 0 and err == "" and rows[0]["method"] == "full" and rows[-1]["retention"] == 100.0


def test_tasks_with_nothing_right_are_named(run) -> None:
    code, out, _ = run("--tasks", "pope,textvqa")
    assert code == 0 and "nothing right on textvqa" in out


def test_a_saved_pruner_is_measured_under_its_method_s_name(run, tmp_path: Path, folder: Path) -> None:
    model, processor = tiny_scenes.always_says("yes")
    from diffprune.model import PrunedVLM

    torch.manual_seed(0)
    PrunedVLM(model, processor, method="diffprune", keep=4).save_pretrained(tmp_path / "p", base_id=str(folder))
    code, out, _ = run(
        "--pruner", str(tmp_path / "p"), "--methods", "diffprune", "--keep", "4", "--tasks", "pope", "--json"
    )
    assert code == 0 and {row["method"] for row in json.loads(out)} == {"full", "diffprune"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tasks", "popp"], "there is no task 'popp'"),
        (["--split", "tset"], "there is no split 'tset'"),
        (["--keep", "0"], "keep=0 keeps nothing"),
        (["--keep", "many"], "keep='many' is no budget"),
        (["--seeds", "one"], "seed 'one' is no whole number"),
        (["--methods", "randm"], "did you mean random?"),
        (["--methods", "diffprune"], "is learned and needs weights; give a saved one with --pruner"),
        (["--device", "warp"], "device 'warp' cannot be used here"),
        (["--questions", "0"], "--questions"),
    ],
)
def test_a_mistake_is_one_sentence(run, arguments: list[str], words: str) -> None:
    code, out, err = run(*arguments)
    assert code != 0 and out == "" and words in err and err.count("\n") == 1


def test_an_output_that_cannot_be_written_is_told_before_the_work(run, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("diffprune.loading.load_base", lambda name: pytest.fail("the work has started"))
    code, _, err = run("--out", str(tmp_path / "file" / "x.json"))
    assert code != 0 and "cannot write into" in err and err.count("\n") == 1
