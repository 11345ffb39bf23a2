"""`diffprune eval` on a tiny model from a folder."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch

from diffprune.cli import main as cli
from diffprune.results import read_results
from tests import tiny
from tests.evaluate.conftest import memory  # noqa: F401  # a fixture


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that always says A, saved as the hub's files are."""
    path = tmp_path_factory.mktemp("model")
    model, processor = tiny.always_says("A")
    model.save_pretrained(path)
    processor.save_pretrained(path)
    return path


@pytest.fixture
def run(memory, capsys: pytest.CaptureFixture[str], folder: Path):  # noqa: F811
    """Runs eval on that model; gives its exit code, stdout and stderr."""

    def run_arguments(*arguments: str) -> tuple[int, str, str]:
        chosen = () if "--pruner" in arguments else ("--model", str(folder))
        chosen += () if "--tasks" in arguments else ("--tasks", "memory")
        code = cli._run(["eval", *chosen, "--questions", "2", "--device", "cpu", *arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run_arguments


def test_methods_and_budgets_are_compared_and_written(run, tmp_path: Path) -> None:
    out = tmp_path / "new" / "x.json"
    code, printed, told = run(
        "--methods", "full,random", "--keep", "8,0.1", "--tasks", "memory", "--seeds", "0,1", "--blind",
        "--out", str(out), "--commit", "abc",
    )  # fmt: skip
    assert code == 0 and "retention" in printed
    assert " parameters, float32 on cpu, full,random, keep 8,0.1\n" in told
    results = read_results(out)
    assert results.name == "x" and results.commit == "abc" and results.seeds == [0, 1]
    quality = {(row["method"], row["keep"], row["seed"]) for row in results.rows if "task" in row}
    random = {("random", keep, seed) for keep in (8, 0.1) for seed in (0, 1)}
    assert quality == random | {("full", 1.0, 0), ("blind", 1.0, 0)}
    assert all("chance" in row for row in results.rows if "task" in row)
    answers = json.loads(out.with_suffix(".answers.json").read_text())
    assert {said for one in answers["runs"] for said in one["said"]} == {"A"}
    assert results.notes == "2 scored questions a task, test split"


def test_options_of_a_method_are_given_behind_its_name(run) -> None:
    methods = "random,random[seed=7],fastv[layer=3],fastv[layer=1],tome[metric=keys]"
    code, out, err = run("--methods", methods, "--tasks", "letters", "--keep", "8", "--seeds", "0,1", "--json")
    assert code != 0 and out == "" and "layer=3 is past the model's 3 layers" in err
    methods = methods.replace("fastv[layer=3],", "")
    code, out, _ = run("--methods", methods, "--tasks", "letters", "--keep", "8", "--seeds", "0,1", "--json")
    rows = json.loads(out)
    assert code == 0
    quality = [(row["method"], row["seed"]) for row in rows if "task" in row]
    assert quality == [
        ("full", 0), ("random", 0), ("random", 1), ("random[seed=7]", 7), ("fastv[layer=1]", 0),
        ("tome[metric=keys]", 0),
    ]  # fmt: skip
    average = {row["method"]: row.get("average") for row in rows if "retention" in row}
    assert average.pop("fastv[layer=1]") == (16 + 8 + 8) / 3, "all 16 tokens in layer 0, 8 from layer 1 on"
    assert set(average.values()) == {None}


def test_json_is_all_that_is_printed(run) -> None:
    code, out, err = run("--tasks", "letters", "--json")
    rows = json.loads(out)
    assert code == 0 and err == "" and rows[0]["method"] == "full" and rows[-1]["retention"] == 100.0


def test_tasks_with_nothing_right_are_named(run) -> None:
    code, out, _ = run("--tasks", "letters,words")
    assert code == 0 and "nothing right on words" in out


def test_where_the_full_model_has_nothing_right_every_run_is_shown_by_task(run) -> None:
    code, out, _ = run("--methods", "full,random", "--keep", "8", "--seeds", "0", "--tasks", "words")
    lines = [line.split()[:4] for line in out.splitlines()]
    assert code == 0 and "retention " not in out
    assert ["full", "1.0", "0", "words"] in lines and ["random", "8", "0", "words"] in lines


def test_the_lead_that_was_asked_for_stands_beside_the_retention(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run("--methods", "random,centre", "--keep", "8", "--tasks", "letters", "--versus", "centre")
    shown, hidden = out.split("not shown at this width")
    assert "0 to 0" in shown and "lead" in shown and "lead" not in hidden


def test_a_saved_pruner_is_measured_under_its_method_s_name(run, tmp_path: Path, folder: Path) -> None:
    model, processor = tiny.always_says("A")
    from diffprune.model import PrunedVLM

    torch.manual_seed(0)
    PrunedVLM(model, processor, method="diffprune", keep=4).save_pretrained(tmp_path / "p", base_id=str(folder))
    code, out, _ = run(
        "--pruner", str(tmp_path / "p"), "--methods", "diffprune", "--keep", "4", "--tasks", "letters", "--json"
    )
    rows = json.loads(out)
    assert code == 0 and {row["method"] for row in rows} == {"full", "diffprune"}
    # An artefact that names no recipe tells it by its options; without a choice it is the hard top-K.
    assert {(row["recipe"], row["choice"]) for row in rows if row["method"] == "diffprune"} == {("bridge", "top-k")}
    assert not any("recipe" in row for row in rows if row["method"] == "full")


@pytest.mark.parametrize(
    ("options", "recorded", "recipe"),
    [
        ({"kept_exact": False, "standardise": False, "final_norm": False}, {}, "paper"),
        ({"kept_exact": False, "standardise": False}, {}, "default"),
        ({"kept_exact": False}, {}, "default"),  # of no recipe: trained with overrides
        ({}, {"recipe": "paper", "choice": {"name": "diverse", "beta": 1.0}}, "paper"),
    ],
)
def test_what_an_artefact_says_of_its_recipe_and_choice(options: dict, recorded: dict, recipe: str) -> None:
    from diffprune.evaluate.pruners import origin_of
    from diffprune.model import PrunedVLM

    method = "diffprune-diverse" if "choice" in recorded else "diffprune"  # what a load deploys
    vlm = PrunedVLM(*tiny.build("llava"), method=method, keep=4, **options)
    vlm.artefact = {"method": {"name": "diffprune", "options": dataclasses.asdict(vlm.method.options)}, **recorded}
    assert origin_of(vlm, None) == {"recipe": recipe, "choice": "diverse" if recorded else "top-k"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tasks", "popp"], "there is no task 'popp'"),
        (["--split", "tset"], "memory has no split 'tset'"),
        (["--sizes", "large"], "no sizes 'large'"),
        (["--world-seed", "7"], "--world-seed 7: the questions of 'memory' are not drawn from a seed; leave it out"),
        (["--world-seed", "7", "--data", "q.jsonl"], "--world-seed 7 is for --tasks, not for --data; leave"),
        (["--questions", "9", "--data", "q.jsonl"], "--questions 9 is for --tasks, not for --data; leave it out"),
        (["--limit", "9"], "--limit is for --harness; leave it out"),
        (["--suite", "other"], "--suite is for --harness; leave it out"),
        (
            ["--data", "q.jsonl", "--questions", "500"],
            "--tasks memory and --data q.jsonl both say what is asked; leave",
        ),
        (["--methods", "oracle"], "there is no oracle"),
        (["--keep", "0"], "keep=0 keeps nothing"),
        (["--keep", "many"], "keep='many' is no budget"),
        (["--keep", "1,64,1.0"], "keep=1 is one token and keep=1.0 is all of them"),
        (["--keep", "1.0", "--pruner", "mine@1=runs/x"], "keep=1 is one token and keep=1.0 is all of them"),
        (["--seeds", "one"], "seed 'one' is no whole number"),
        (["--methods", "randm"], "did you mean random?"),
        (["--methods", "fastv[layr=1]"], "method 'fastv' has no option 'layr'; did you mean layer (of layer, budget)?"),
        (["--methods", "fastv[layer=one]"], "option 'layer' of method 'fastv' takes a whole number, not 'one'"),
        (["--methods", "fastv[layer=1"], "method 'fastv[layer=1' cannot be read; write NAME"),
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
    monkeypatch.setattr("diffprune.evaluate.pruners.load_base", lambda name: pytest.fail("the work has started"))
    code, _, err = run("--out", str(tmp_path / "file" / "x.json"))
    assert code != 0 and "cannot write to" in err and err.count("\n") == 1
    code, _, err = run("--out", str(tmp_path))
    assert code != 0 and f"{tmp_path} is a folder and is not replaced; name a file" in err and err.count("\n") == 1


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_damaged_file_of_the_model_is_named(run, folder: Path, tmp_path: Path, file: str) -> None:
    damaged = shutil.copytree(folder, tmp_path / "model") / file
    damaged.write_bytes(damaged.read_bytes()[:100])
    code, _, err = run("--model", str(damaged.parent))
    assert code != 0 and err.endswith(f"{damaged} is damaged: save or download the model again\n")


# Several saved pruners ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> list[Path]:
    """Three pruners for the same model, with other weights each."""
    from diffprune.model import PrunedVLM

    model, processor = tiny.always_says("A")
    paths = [tmp_path_factory.mktemp("pruners") / name for name in "abc"]
    for seed, path in enumerate(paths):
        torch.manual_seed(seed)
        PrunedVLM(model, processor, method="diffprune", keep=4).save_pretrained(path, base_id=str(folder))
    return paths


def test_several_pruners_are_seeds_of_a_label_or_bound_to_a_budget(run, saved: list[Path], tmp_path: Path) -> None:
    a, b, c = saved
    out = tmp_path / "x.json"
    code, _, err = run(
        "--pruner", f"{a},diffprune={b},own@8={c}", "--methods", "random", "--keep", "8,4", "--tasks", "letters",
        "--seeds", "0", "--versus", "diffprune", "--out", str(out),
    )  # fmt: skip
    assert code == 0, err
    rows = read_results(out).rows
    runs = {(row["method"], row["keep"], row["seed"]) for row in rows if "task" in row and row["method"] != "full"}
    ours = {("diffprune", keep, seed) for keep in (8, 4) for seed in (0, 1)}
    assert runs == ours | {("random", 8, 0), ("random", 4, 0), ("own", 8, 0)}
    summaries = {(row["method"], row["keep"]): row for row in rows if "retention" in row}
    assert summaries["diffprune", 8]["n_seeds"] == 2 and "lead" not in summaries["diffprune", 8]
    assert summaries["own", 8]["lead"] == 0.0 and summaries["own", 8]["lead_ci95"] == [0.0, 0.0]  # all say A
    assert "lead" not in summaries["full", 1.0]  # no budget in common


@pytest.mark.parametrize(
    ("pruners", "arguments", "words"),
    [
        ("={a}", [], "is no pruner; give FOLDER, LABEL=FOLDER or LABEL@KEEP=FOLDER"),
        ("own@none={a}", [], "keep='none' is no budget"),
        ("{a}", ["--versus", "randm"], "--versus 'randm' is not among the methods measured"),
        ("{a}", ["--throttled"], "holds no training checkpoint"),
    ],
)
def test_a_mistake_about_pruners_is_one_sentence(run, saved, pruners: str, arguments: list[str], words: str) -> None:
    code, out, err = run("--pruner", pruners.format(a=saved[0]), "--tasks", "letters", *arguments)
    assert code != 0 and out == "" and words in err and err.count("\n") == 1


def test_two_pruners_of_one_label_and_seed_are_refused(run, saved: list[Path], monkeypatch) -> None:
    from diffprune.config import make_config

    values = {"backbone": {"name": "llava", "weights": "some"}, "budget": {"keep": 4}, "data": {"name": "x"}}
    config = make_config({**values, "seed": 7})
    monkeypatch.setattr("diffprune.evaluate.pruners.run_config", lambda path: config)
    code, _, err = run("--pruner", f"{saved[0]},{saved[1]}", "--tasks", "letters")
    assert code != 0 and "two pruners are listed as 'diffprune' with seed 7" in err


def test_a_pruner_saved_with_other_rules_is_measured_apart(
    run, saved: list[Path], folder: Path, tmp_path: Path
) -> None:
    from diffprune.model import PrunedVLM

    model, processor = tiny.always_says("A")
    packed = PrunedVLM(model, processor, method="diffprune", keep=4, positions="packed")
    packed.save_pretrained(tmp_path / "p", base_id=str(folder))
    code, _, err = run("--pruner", f"{saved[0]},p={tmp_path / 'p'}", "--tasks", "letters")
    assert code != 0 and "other rules for positions" in err
