"""The command: files, resuming, time, mistakes."""

import json
import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from diffprune.cli import main as cli
from diffprune.results import read_results
from diffprune_lab.deit import DeiT
from diffprune_lab.probes import run
from diffprune_lab.probes.bench import LEARNED, Bench
from diffprune_lab.probes.deit import CompiledDeiT, _compiled_block, load_deit, save_deit
from diffprune_lab.probes.settings import SIZES
from diffprune_lab.probes.store import Cell, Store, interval, mean_and_spread, student
from lab.tests.probes.parquet import write_photos


@pytest.fixture
def probe(capsys):
    """Runs `diffprune probe`; gives its exit code, stdout and stderr."""

    def run_arguments(*arguments: object) -> tuple[int, str, str]:
        code = cli._run(["probe", *map(str, arguments), "--device", "cpu", "--size", "tiny"])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run_arguments


def test_a_probe_writes_its_results_and_its_figure_and_resumes(probe, tmp_path: Path, monkeypatch) -> None:
    code, out, _ = probe("alignment", "--out", tmp_path, "--seeds", 42, "--json")
    assert code == 0 and {row["keep"] for row in json.loads(out)} == {0.0556, 0.1111, 0.5}
    first = read_results(tmp_path / "alignment.json")
    assert first.seeds == [42] and "trial" in first.notes and (tmp_path / "alignment.png").is_file()
    backbones = read_results(tmp_path / "probe_backbones.json")
    assert backbones.rows[0]["backbone"] == "deit-tiny" and backbones.rows[0]["top1"] > 25
    code, out, err = probe("alignment", "--out", tmp_path, "--seeds", 42)  # nothing is trained again
    assert code == 0 and "step" not in err and "3 rows" in out
    monkeypatch.setitem(SIZES, "tiny", SIZES["tiny"].changed(steps=3))
    code, _, err = probe("alignment", "--out", tmp_path, "--seeds", 42)
    assert code == 2 and "made with other settings" in err and "--fresh" in err
    assert read_results(tmp_path / "alignment.json") == first


def test_bias_needs_no_pictures_and_no_backbone(probe, tmp_path: Path) -> None:
    code, out, err = probe("bias", "--out", tmp_path, "--figures", tmp_path / "img", "--seeds", 42)
    assert code == 0, err
    assert (tmp_path / "img/bias.png").is_file() and not (tmp_path / "probe_backbones.json").exists()
    rows = {(row["estimator"], row.get("tau")): row for row in read_results(tmp_path / "bias.json").rows}
    assert rows["diffprune", 1.0]["finite_difference_error"] < 1e-6
    assert rows["straight_through", 1.0]["relative_bias"] > 0.1 and "straight_through" in out


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["coherance"], "no probe 'coherance'"),
        (["coherence", "--backbone", "deit-huge"], "deit-tiny, deit-small, deit-base"),
        (["coherence", "--seeds", ","], "at least one seed"),
        (["coherence", "--data", "nowhere"], "nowhere is not there"),
        (["coherence", "--minutes", "0"], "above 0"),
        (["coherence", "--weights", "nowhere"], "weights 'nowhere' cannot be loaded"),
    ],
)
def test_a_mistake_is_one_sentence(probe, tmp_path: Path, arguments: list[str], words: str) -> None:
    code, _, err = probe(*arguments, "--out", tmp_path)
    assert code != 0 and words in err.splitlines()[-1] and "unexpected" not in err


def test_the_full_size_wants_pictures(tmp_path: Path, capsys) -> None:
    assert cli._run(["probe", "alignment", "--out", str(tmp_path), "--device", "cpu"]) == 2
    assert "there are no pictures" in capsys.readouterr().err


def test_pictures_to_measure_on_may_lie_elsewhere_than_those_to_train_on(tmp_path: Path) -> None:
    write_photos(tmp_path / "own" / "train-00.parquet", 40)
    write_photos(tmp_path / "holdout" / "x.parquet", 12, seed=9)
    settings = SIZES["tiny"]
    bench = Bench(
        backbone="deit-tiny", settings=settings, data=str(tmp_path / "holdout"), train_data=str(tmp_path / "own")
    )
    assert (len(bench.photos), len(bench.train_photos)) == (12, 40)
    assert "12 held-out pictures of holdout" in bench.recipe
    with pytest.raises(ValueError, match=r"nothing to train on.*--train-data"):
        _ = Bench(backbone="deit-tiny", settings=settings, data=str(tmp_path / "holdout")).train_photos
    with pytest.raises(ValueError, match="pictures to measure on"):
        _ = Bench(backbone="deit-tiny", settings=settings, data=str(tmp_path / "own")).photos
    named = {"data": str(tmp_path / "own"), "train_data": str(tmp_path / "holdout")}
    assert len(Bench(backbone="deit-tiny", settings=settings, **named).photos) == 40  # whatever their names are


def test_scorers_of_one_run_serve_pictures_of_another(bench: Bench, tmp_path: Path, probe) -> None:
    save_deit(bench.classifier, tmp_path / "deit")
    first = Bench(backbone="deit-tiny", settings=bench.settings, save_weights=str(tmp_path / "deit"))
    first._kept |= {key: value for key, value in bench._kept.items() if not key.startswith("trained ")}
    for name in LEARNED:
        first.trained(name, 42)
    assert first.supervised(42) is not None
    write_photos(tmp_path / "holdout/x.parquet", 12, seed=9)
    asked = ("--data", tmp_path / "holdout", "--weights", tmp_path / "deit", "--out", tmp_path, "--seeds", 42)
    for name in ("relevance", "alignment"):
        code, _, err = probe(name, *asked)
        assert code == 0 and "throttled loss" not in err, err  # nothing is trained: there is nothing to train on
    assert {row["method"] for row in read_results(tmp_path / "relevance.json").rows} >= {
        *LEARNED,
        "supervised",
        "centre",
    }


def test_pictures_of_classes_that_the_classifier_does_not_know_are_refused(bench: Bench, tmp_path: Path, probe) -> None:
    save_deit(bench.classifier, tmp_path / "deit")
    write_photos(tmp_path / "x.parquet", 3, label=[0, 99, 1])
    code, _, err = probe("alignment", "--data", tmp_path, "--weights", tmp_path / "deit", "--out", tmp_path / "out")
    assert code == 2 and "a class 99 and the classifier knows 4" in err


def test_the_top_of_a_ranking_is_less_alike_than_its_bottom(probe, tmp_path: Path) -> None:
    code, out, err = probe("qualitative", "--out", tmp_path, "--figures", tmp_path / "img")
    assert code == 0, err
    rows = read_results(tmp_path / "qualitative.json").rows
    assert [row["ranking"] for row in rows] == ["scenes-llava-diffprune", "cls_attention", "feature_norm"]
    for row in rows:
        assert row["pictures"] == 3 and row["difference"] == pytest.approx(
            row["bottom_similarity"] - row["top_similarity"]
        )
    assert rows[0]["ci95"][0] > 0 and rows[0]["lower_top"] == 100
    assert (tmp_path / "img/qualitative.png").stat().st_size > 20_000 and "drawn in" in out
    code, _, err = probe("qualitative", "--out", tmp_path, "--weights", tmp_path / "nowhere")
    assert code == 2 and "nowhere" in err
    code, _, err = probe("qualitative", "--out", tmp_path, "--weights", "none")
    assert code == 2 and "none" in err and "unknown method" not in err


def test_saved_weights_are_used_again(bench: Bench, tmp_path: Path) -> None:
    save_deit(bench.classifier, tmp_path)
    loaded = load_deit(str(tmp_path), bench.photos.names, "cpu")
    assert loaded.training == bench.classifier.training
    for name, value in bench.classifier.model.state_dict().items():
        assert torch.equal(value, loaded.model.state_dict()[name])
    other = Bench(backbone="deit-tiny", settings=bench.settings, weights=str(tmp_path))
    assert other.recipe == bench.recipe
    assert "seeing all patches all the time" in bench.recipe
    hidden = Bench(backbone="deit-tiny", settings=bench.settings.changed(hide=0.5), weights=str(tmp_path))
    assert "seeing a quarter or a sixteenth of the patches near each other for 0.5 of the time" in hidden.recipe
    with pytest.raises(ValueError, match=r"was trained in another way \(hide 0.0, parts near, labels tokens\)"):
        _ = hidden.classifier
    assert loaded.training is not None
    for changes, is_ours in (
        ({"hide": 0.5}, True),
        ({"hide": 0.5, "parts": "any"}, False),
        ({"hide": 0.5, "labels": "picture"}, False),
        ({"hide": None, "labels": "picture"}, False),  # before either was recorded
    ):
        folder = tmp_path / "-".join(map(str, changes.values()))
        trained = replace(loaded, training=replace(loaded.training, **changes))
        save_deit(trained, folder)
        other = replace(hidden, weights=str(folder), _kept={})
        with nullcontext() if is_ours else pytest.raises(ValueError, match="was trained in another way"):
            assert other.classifier.training == trained.training


def test_weights_that_know_more_classes_are_cut_down_to_those_of_the_pictures(bench: Bench, tmp_path: Path) -> None:
    save_deit(bench.classifier, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["id2label"] = {str(index): f"colour {3 - index}, shade" for index in range(4)}
    config["label2id"] = {label: int(index) for index, label in config["id2label"].items()}
    (tmp_path / "config.json").write_text(json.dumps(config))
    cut = load_deit(str(tmp_path), ("Colour 0", "colour 2"), "cpu")
    head = bench.classifier.model.classifier
    assert torch.equal(cut.model.classifier.weight, head.weight[[3, 1]])
    with pytest.raises(ValueError, match="'colour 9' of the pictures is none of them"):
        load_deit(str(tmp_path), ("colour 9",), "cpu")


def test_a_later_process_finds_the_scorers_of_an_earlier_one(bench: Bench, tmp_path: Path, monkeypatch) -> None:
    save_deit(bench.classifier, tmp_path)
    first = Bench(backbone="deit-tiny", settings=bench.settings, save_weights=str(tmp_path), _kept=dict(bench._kept))
    first._kept.pop("trained diffprune", None)
    method, snapshots = first.trained("diffprune", 42)
    assert first.scorer("diffprune", 42) is method and len(snapshots) == 2

    def fail(self: Bench, name: str, seed: int) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(Bench, "_train", fail)
    later = Bench(backbone="deit-tiny", settings=bench.settings, weights=str(tmp_path))
    found = later.scorer("diffprune", 42)
    assert not found.training
    for name, value in method.state_dict().items():
        assert torch.equal(value, found.state_dict()[name])
    other = Bench(backbone="deit-tiny", settings=bench.settings.changed(steps=9), weights=str(tmp_path))
    for asked in (lambda: other.scorer("diffprune", 42), lambda: later.scorer("diffprune", 123)):
        with pytest.raises(AssertionError, match="trained again"):  # other settings, another seed
            asked()
    assert not list((tmp_path / "probes").glob(".*"))  # nothing unfinished is left


def test_scorers_trained_on_other_pictures_are_not_taken_for_those_of_these(bench: Bench, tmp_path: Path) -> None:
    save_deit(bench.classifier, tmp_path / "deit")
    write_photos(tmp_path / "holdout/x.parquet", 12, seed=9)
    for seed, place in enumerate(("own", "other")):
        write_photos(tmp_path / place / "train-00.parquet", 24, seed=seed)
    write_photos(tmp_path / "moved/train-of-old.parquet", 24, seed=0)  # those of "own"

    def scorer(train_data: str | None) -> tuple[dict[str, torch.Tensor], bool]:
        """Its weights, and whether it was trained now."""
        said: list[str] = []
        named = {"data": str(tmp_path / "holdout"), "train_data": train_data and str(tmp_path / train_data)}
        later = Bench(
            backbone="deit-tiny", settings=bench.settings, weights=str(tmp_path / "deit"), say=said.append, **named
        )
        return later.scorer("diffprune", 42).state_dict(), any("throttled loss" in text for text in said)

    own, was_trained = scorer("own")
    assert was_trained
    for train_data in ("own", "moved", None):  # None: nothing to train on, so what is there is meant
        found, was_trained = scorer(train_data)
        assert not was_trained and all(torch.equal(value, own[name]) for name, value in found.items())
    other, was_trained = scorer("other")
    assert was_trained and any(not torch.equal(value, own[name]) for name, value in other.items())
    assert not scorer("own")[1] and not scorer("other")[1]
    with pytest.raises(ValueError, match=r"deit has scorer diffprune 42 trained on 2 sets of pictures.*--train-data"):
        scorer(None)


def test_what_was_made_is_found_again_beside_a_classifier_of_ours_alone(bench: Bench, tmp_path: Path) -> None:
    made = []

    def make() -> dict[tuple[str, float], torch.Tensor]:
        made.append(1)
        return {("centre", 0.5): torch.ones(2)}

    for _ in range(2):  # no folder: nothing is kept
        bench.remembered("shares", make)
    assert len(made) == 2 and bench.remembered("shares") is None
    save_deit(bench.classifier, tmp_path)
    for _ in range(2):
        own = Bench(backbone="deit-tiny", settings=bench.settings, weights=str(tmp_path))
        assert torch.equal(own.remembered("shares", make)["centre", 0.5], torch.ones(2))
    assert len(made) == 3 and own.remembered("others") is None


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # read by the compiler itself
def test_all_blocks_of_a_classifier_share_one_compiled_graph(bench: Bench, monkeypatch) -> None:
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compile_block = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, **options: compile_block(call, backend=count, **options))
    _compiled_block.cache_clear()
    try:
        _, encoded = next(iter(bench.encoded(bench.photos)))
        plain, fast = DeiT(bench.classifier.model), CompiledDeiT(bench.classifier.model)
        found = [deit.logits(encoded.prefix, encoded.tokens.x) for deit in (plain, fast, fast)]
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
        assert len(plain.blocks) == 3 and len(graphs) == 1
        # On a GPU batches of training and of comparison are compiled where there are gradients, and nothing else is.
        on_gpu = Bench(backbone="deit-tiny", settings=bench.settings, device="cuda", _kept=bench._kept)
        for pictures, tokens, made in ((16, 40, 1), (9, 64, 1), (16, 64, 2), (8, 64, 3), (16, 64, 3)):
            prefix, x = encoded.prefix[:pictures], encoded.tokens.x[:pictures, :tokens].clone().requires_grad_()
            torch.testing.assert_close(on_gpu.read(prefix, x), on_gpu.cut_open().logits(prefix, x))
            assert len(graphs) == made
    finally:
        _compiled_block.cache_clear()


def test_scorers_of_a_seed_serve_every_probe_and_the_landscape_comes_last() -> None:
    order = run.in_order(["coherence", "landscape", "alignment"], [1, 2])
    assert order == [
        ("coherence", 1),
        ("alignment", 1),
        ("coherence", 2),
        ("alignment", 2),
        ("landscape", 2),
        ("landscape", 1),  # with the slice
    ]
    assert run.in_order(["bias"], [1, 2]) == [("bias", 1), ("bias", 2)]


def test_what_would_end_too_late_is_left_for_the_next_run(bench: Bench, tmp_path: Path) -> None:
    found, is_complete = run.run_probes(["bias"], bench, tmp_path, figures=tmp_path, deadline=0.0)
    assert not is_complete and found == {"bias": []}


def test_a_backbone_that_does_not_fit_is_one_sentence(bench: Bench, tmp_path: Path, monkeypatch) -> None:
    def fail(bench: Bench, seed: int) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr("diffprune_lab.probes.bias.measure", fail)
    with pytest.raises(ValueError, match=r"does not fit on cpu; give a smaller --backbone.*kept"):
        run.run_probes(["bias"], bench, tmp_path, figures=tmp_path)


def test_seeds_of_several_runs_come_together_in_one_file(tmp_path: Path) -> None:
    def summarise(rows):
        return [{**row, "n_seeds": len(row["by_seed"])} for row in rows]

    store = Store(
        path=tmp_path / "x.json", notes="same", summarise=summarise, key_names=("backbone", "keep"), commit="abc"
    )
    store.add([Cell({"backbone": "a", "keep": 0.5}, 1, {"top1": 1 / 3}), Cell({"backbone": "b", "keep": 0.5}, 1, {})])
    store.add([Cell({"backbone": "a", "keep": 0.5}, 2, {"top1": 2.0})])
    assert [row["n_seeds"] for row in store.rows()] == [2, 1]
    by_seed = store.rows()[0]["by_seed"]
    assert {seed: values["top1"] for seed, values in by_seed.items()} == {"1": 0.3333333, "2": 2.0}
    assert {(values["commit"], bool(values["command"])) for values in by_seed.values()} == {("abc", True)}
    assert store.is_done("a", 2) and not store.is_done("b", 2)
    other = Store(path=tmp_path / "x.json", notes="other", summarise=summarise, key_names=("backbone",))
    with pytest.raises(ValueError, match="other settings"):
        other.add([])


def test_seeds_of_another_world_are_not_added_to_a_file(tmp_path: Path) -> None:
    def store(digest: str) -> Store:
        path, marks = tmp_path / "x.json", {"digest": digest}
        return Store(path=path, notes="same", summarise=list, key_names=("backbone",), marks=marks, commit="abc")

    first = Cell({"backbone": "a"}, 1, {"top1": 1.0})
    store("of before").add([first])
    rows = store("of before").add([Cell({"backbone": "a"}, 2, {"top1": 2.0})])
    assert [row["digest"] for row in rows] == ["of before"] and sorted(rows[0]["by_seed"]) == ["1", "2"]
    with pytest.raises(ValueError, match=r"x.json has rows whose digest is of before and not new; .*--fresh"):
        store("new").add([first])


def test_an_interval_holds_both_kinds_of_error() -> None:
    assert mean_and_spread([1.0, 3.0]) == (2.0, pytest.approx(2**0.5))
    assert interval([5.0]) == [5.0, 5.0]
    low, high = interval([1.0, 3.0], [3.0, 3.0])
    assert (low + high) / 2 == pytest.approx(2.0)
    assert high - low == pytest.approx(2 * math.hypot(12.706, 1.96 * 3), rel=1e-4)


@pytest.mark.parametrize("seeds", [2, 3, 5, 12, 40])
def test_an_interval_over_few_seeds_holds_the_mean_as_often_as_it_says(seeds: int) -> None:
    drawn = np.random.default_rng(seeds).normal(size=(20_000, seeds))
    half = student(seeds - 1) * drawn.std(-1, ddof=1) / seeds**0.5
    assert (abs(drawn.mean(-1)) < half).mean() == pytest.approx(0.95, abs=0.005)
    low, high = interval(drawn[0].tolist())
    assert high - low == pytest.approx(2 * half[0])
