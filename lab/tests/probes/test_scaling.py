"""Three sizes at five rates: what is asked, trained, kept and written."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from diffprune.cli import main as cli
from diffprune.config import differences, load_config
from diffprune.results import read_results
from diffprune_lab.probes import evidence, scaling
from diffprune_lab.scenes import qwen
from diffprune_lab.scenes.qwen import save_model
from lab.tests.tiny_scenes import say_always_

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def probe(capsys):
    """Runs `diffprune probe scaling --size tiny`; gives its exit code, stdout and stderr."""

    def run_arguments(*arguments: object) -> tuple[int, str, str]:
        code = cli._run(["probe", "scaling", *map(str, arguments), "--device", "cpu", "--size", "tiny"])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run_arguments


@pytest.fixture(scope="module")
def yes_folder(tmp_path_factory) -> Path:
    """A model that looks at nothing and says yes, so that every method keeps all of what it has."""
    folder = tmp_path_factory.mktemp("weights") / "scenes-qwen-s"
    tokenizer = qwen.build_tokenizer()
    model = qwen.build_model(scaling.TINY_SPEC, tokenizer)
    say_always_(model, tokenizer, "yes")
    save_model("scenes-qwen-s", model, folder, card="Says yes.\n")
    return folder.parent


@pytest.mark.slow
def test_a_trial_without_named_methods_takes_one_of_each_kind(probe, tmp_path) -> None:
    code, out, err = probe("--out", tmp_path, "--json")
    assert code == 0, err
    measured = {row["method"] for row in json.loads(out)}
    assert measured == {*scaling.METHODS["tiny"], "full"} and measured - {"full"} < set(scaling.METHODS["full"])


def test_a_trial_trains_a_scorer_answers_and_goes_on_where_it_stopped(probe, tmp_path, yes_folder, monkeypatch) -> None:
    monkeypatch.setitem(scaling.SIZES, "tiny", replace(scaling.SIZES["tiny"], questions=2))
    arguments = ("--out", tmp_path, "--weights", yes_folder, "--json")
    code, out, err = probe(*arguments, "--methods", f"diffprune,{scaling.PAPER}")
    assert code == 0, err
    rows = json.loads(out)
    assert {row["backbone"] for row in rows} == {"scenes-qwen-s"}
    assert {(row["method"], row["pruned"]) for row in rows if "task" in row} == {
        *((method, rate) for method in ("diffprune", scaling.PAPER) for rate in (50.0, 88.9)),
        ("full", 0.0),
    }
    assert {row["task"] for row in rows if "task" in row} == set(scaling.TASKS)
    kept = [row["retention"] for row in rows if "retention" in row]
    assert len(kept) == 5 and kept == [100.0] * 5  # it says yes, whatever it sees
    assert (tmp_path / "scaling.png").is_file()
    found = read_results(tmp_path / "scaling.json")
    assert {row["recipe"] for row in found.rows if row["method"] != "full"} == {"bridge", "paper"}
    assert all(row["commit"] and row["command"] for row in found.rows if row["method"] != "full")
    assert found.seeds == [42] and "1 steps of 2 captions" in found.notes
    scorer = tmp_path / "scaling/scorers/scenes-qwen-s-diffprune-42/model.safetensors"
    made = scorer.stat().st_mtime_ns

    asked = ("diffprune", scaling.PAPER, "random", "hidden_norm[layer=1]", "oracle")
    code, out, err = probe(*arguments, "--methods", ",".join(asked))
    assert code == 0, err
    assert scorer.stat().st_mtime_ns == made
    assert {row["method"] for row in json.loads(out)} == {"full", *asked}
    said = evidence.block("scaling", tmp_path)
    assert "| 88.9 | 100.0 | 93.1 | 100.0 |" in said and "±" not in said and "(hidden_norm[layer=1]*)" in said

    monkeypatch.setitem(scaling.SIZES, "tiny", replace(scaling.SIZES["tiny"], steps=3))
    code, _, err = probe(*arguments)
    assert code == 2 and "made with other settings" in err and "--fresh" in err


def test_answers_of_other_weights_are_not_taken_for_those_of_these(probe, tmp_path, yes_folder) -> None:
    folder = tmp_path / "other" / "scenes-qwen-s"
    save_model(
        "scenes-qwen-s", qwen.build_model(scaling.TINY_SPEC, qwen.build_tokenizer(), seed=1), folder, card="No.\n"
    )
    arguments = ("--out", tmp_path, "--work", tmp_path / "work", "--methods", "random")
    assert probe(*arguments, "--weights", yes_folder)[0] == 0
    note = tmp_path / "work/weights-scenes-qwen-s.txt"
    own = note.read_text()
    code, _, err = probe(*arguments, "--weights", folder.parent)
    assert code == 2 and f"{tmp_path / 'work'} was made with other weights of scenes-qwen-s" in err
    assert str(folder) in err and "--work" in err and "--fresh" in err and note.read_text() == own

    note.unlink()  # as in folders from before there were notes: they are taken as they are
    code, _, err = probe(*arguments, "--weights", yes_folder)
    assert code == 0 and note.read_text() == own, err
    shutil.rmtree(tmp_path / "work/answers")
    (tmp_path / "work/scorers/scenes-qwen-s-diffprune-42").mkdir(parents=True)  # a training that was cut short
    code, _, err = probe(*arguments, "--weights", folder.parent)
    assert code == 2 and "other weights" in err
    code, _, err = probe(*arguments, "--weights", folder.parent, "--fresh")
    assert code == 0 and note.read_text() != own, err


def test_what_was_answered_is_collected_without_the_model(probe, tmp_path, yes_folder) -> None:
    arguments = ("--out", tmp_path, "--methods", "random")
    assert probe(*arguments, "--weights", yes_folder)[0] == 0
    (tmp_path / "scaling.json").unlink()
    code, _, err = probe(*arguments)
    assert code == 0 and read_results(tmp_path / "scaling.json").rows, err


def test_without_weights_a_trial_makes_a_model_and_the_real_thing_asks_for_one(probe, tmp_path) -> None:
    code, out, err = probe("--out", tmp_path, "--methods", "random")
    assert code == 0 and "drawn in" in out, err
    assert qwen.named_in(tmp_path / "scaling/models/scenes-qwen-s") == "scenes-qwen-s"
    code = cli._run(["probe", "scaling", "--out", str(tmp_path / "full"), "--device", "cpu"])
    assert code == 2
    with pytest.raises(ValueError, match=r"no scenes-qwen-m in .*runs/scaling\.sh.*--weights"):
        scaling.find_model("scenes-qwen-m", tmp_path / "scaling/models", tmp_path, tiny=False)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--backbone", "deit-tiny"], "scenes-qwen-s, scenes-qwen-m, scenes-qwen-l"),
        (["--methods", "magic"], "magic"),
        (["--methods", "random,hidden_norm[layr=1]"], "has no option 'layr'; did you mean layer"),
        (["--methods", "diffprune[tau.stat=1]"], "did you mean tau.start"),
        (["--methods", "diffprune[tau.start=]"], "tau.start"),
        (["--methods", "diffprune[tau.start=0.5"], "cannot be read; write NAME"),
        (["--methods", "diffprune[tau.start=1;tau.start=2]"], "tau.start cannot be changed so"),
        (["--methods", "diffprune[method.name=gumbel_ste]"], "method.name cannot be changed so"),
        (["--methods", "diffprune[seed.x=3]"], "seed"),
        (["--methods", "diffprune[noisy=matched]"], "has no option 'noisy'"),
        (["--methods", ","], "no method was named"),
        (["--seeds", ","], "at least one seed"),
        (["--size", "huge"], "size 'huge'"),
    ],
)
def test_a_mistake_is_one_sentence(capsys, tmp_path, arguments, words) -> None:
    code = cli._run(["probe", "scaling", "--out", str(tmp_path), "--device", "cpu", "--size", "tiny", *arguments])
    assert code != 0 and words in capsys.readouterr().err


def test_what_has_no_seed_is_measured_once() -> None:
    asked = scaling.parts(["scenes-qwen-s"], [scaling.PAPER, "random", "holov"], [42, 123])
    assert [(part.method, part.seed) for part in asked] == [
        (scaling.PAPER, 42),
        (scaling.PAPER, 123),
        ("random", 42),
        ("random", 123),
        ("holov", 0),
    ]


def test_what_would_end_too_late_is_not_begun(tmp_path) -> None:
    todo = scaling.parts(["scenes-qwen-s"], ["random"], [42])
    rows, is_complete = scaling.run_parts(
        todo,
        tmp_path,
        weights=None,
        work=tmp_path / "work",
        settings=scaling.SIZES["tiny"],
        device="cpu",
        tiny=True,
        deadline=0.0,
    )
    assert rows == [] and not is_complete and not (tmp_path / "scaling.json").exists()


def test_the_scorers_are_trained_by_the_recipe_of_the_other_reference_model() -> None:
    own = load_config(ROOT / "lab/configs/scenes_qwen/diffprune_any.yaml")
    for name in ("scenes_llava", "scenes_llava_next", "scenes_nano", "scarce_llava"):
        other = load_config(ROOT / f"lab/configs/{name}/diffprune_any.yaml", ["recipe=bridge"])
        changed = {line.partition(":")[0] for line in differences(own, other)}
        assert changed <= {"backbone.name", "backbone.weights", "data.name"}, name
    assert [round(share * 576) for share in own.budget.range or ()] == [4, 160]
    settings = scaling.SIZES["full"]
    for method, more in (
        (scaling.LEARNED, set()),
        (scaling.DIVERSE, set()),
        ("diffprune[noise=matched]", {"method.noise"}),
        ("diffprune[noise=matched; tau.start=0.5]", {"method.noise", "tau.start"}),
    ):
        run = scaling.run_config(Path("out/scaling/models/scenes-qwen-s"), method, 42, settings)
        changed = {line.partition(":")[0] for line in differences(own, run)}
        assert changed == {"validation.every", "saving.tensorboard"} | more
