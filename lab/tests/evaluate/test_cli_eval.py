"""`diffprune eval` on the scenes tasks: the oracle, splits and sizes of this world."""

from pathlib import Path

import pytest

from diffprune.cli import main as cli
from diffprune.evaluate.answers import answers_file, read_sheet
from diffprune.results import read_results
from diffprune_lab.scenes.source import SCENES_TASKS
from lab.tests import tiny_scenes
from tests.train.runs import save_model


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


def test_the_oracle_of_these_pictures_is_measured_too(run, tmp_path: Path) -> None:
    out = tmp_path / "x.json"
    code, _, err = run("--methods", "oracle", "--keep", "8,0.1", "--tasks", "scenes/pope,scenes/gqa", "--out", str(out))
    assert code == 0, err
    results = read_results(out)
    quality = {(row["method"], row["keep"], row["task"]) for row in results.rows if "task" in row}
    assert quality >= {("oracle", keep, task) for keep in (8, 0.1) for task in ("scenes/pope", "scenes/gqa")}
    assert results.notes == "2 scored questions a task, test split; the scenes tasks are stand-ins"


def test_another_seed_asks_about_other_scenes_and_is_told_apart(run, tmp_path: Path) -> None:
    sheets = {}
    for seed in ("0", "7"):
        out = tmp_path / f"{seed}.json"
        code, _, err = run("--methods", "full", "--tasks", "scenes/gqa", "--world-seed", seed, "--out", str(out))
        assert code == 0, err
        sheets[seed] = read_sheet(answers_file(out))
    first, other = ([one["id"] for one in sheets[seed].questions] for seed in ("0", "7"))
    assert not set(first) & set(other)
    assert other == [one.id for one in SCENES_TASKS.build(["gqa"], count=2, seed=7).tasks[0].questions]
    notes = read_results(tmp_path / "7.json").notes
    assert notes.startswith("2 scored questions a task, test split, world seed 7;")
    code, _, err = run("--methods", "full", "--tasks", "scenes/gqa", "--out", str(tmp_path / "7.json"))
    assert code != 0 and "holds answers with other questions" in err


@pytest.mark.parametrize(("arguments", "sizes"), [([], "384"), (["--sizes", "varying"], "varying")])
def test_pictures_have_the_size_the_folder_says_or_the_one_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], sizes: str
) -> None:
    folder = save_model(tmp_path / "model", "llava_next")
    (folder / "scenes.json").write_text('{"sizes": "384"}')
    out = tmp_path / "x.json"
    code = cli._run([
        "eval", "--model", str(folder), "--methods", "random", "--keep", "0.2", "--tasks", "scenes/pope",
        "--questions", "2", "--seeds", "0", "--device", "cpu", "--out", str(out), *arguments,
    ])  # fmt: skip
    assert code == 0, capsys.readouterr().err
    results = read_results(out)
    assert f"pictures of sizes {sizes}" in results.notes
    assert {row["method"] for row in results.rows} == {"full", "random"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tasks", "popp"], "there is no task 'popp'"),
        (["--split", "tset"], "there is no split 'tset'"),
        (["--sizes", "large"], "sizes='large' is no way to size pictures"),
    ],
)
def test_a_mistake_is_one_sentence(run, arguments: list[str], words: str) -> None:
    code, out, err = run(*arguments)
    assert code != 0 and out == "" and words in err and err.count("\n") == 1
