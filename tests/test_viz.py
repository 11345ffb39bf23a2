"""`diffprune ask` and `diffprune show` with a tiny model, and the drawing behind them."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from diffprune.api import load_vlm
from diffprune.cli.main import _run
from diffprune.model import PrunedVLM
from diffprune.types import ImageSelection
from diffprune.viz import end_similarity, light_up
from tests import tiny
from tests.train import runs


def selection(keep: list[int]) -> ImageSelection:
    boxes = torch.tensor([[0.0, 0, 4, 4], [4, 0, 8, 4], [0, 4, 4, 8], [4, 4, 8, 8]])
    return ImageSelection(keep=torch.tensor(keep), logits=None, grid=(2, 2), boxes=boxes)


def test_kept_tokens_are_left_as_they_are_and_the_rest_is_dimmed() -> None:
    picture = Image.new("RGB", (8, 8), (200, 100, 0))
    lit = np.asarray(light_up(picture, selection([1])))
    assert (lit[:4, 4:] == (200, 100, 0)).all()
    assert (lit[4:] < 60).all() and (lit[:4, :4] < 60).all()


def test_all_kept_is_the_picture_itself() -> None:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (8, 8, 3), dtype=np.uint8))
    assert np.array_equal(np.asarray(light_up(picture, selection([0, 1, 2, 3]))), np.asarray(picture))


def test_the_matrix_holds_the_top_before_the_bottom() -> None:
    features = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [1.0, 1.0]])
    matrix = end_similarity(features, torch.tensor([5.0, 4.0, 1.0, 0.0, 2.0]), 2)
    assert torch.allclose(matrix, torch.tensor([[1.0, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a model that sees 4 x 4 tokens."""
    return str(runs.save_model(tmp_path_factory.mktemp("base")))


@pytest.fixture(scope="module")
def picture_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("picture") / "picture.png"
    tiny.picture(1, (tiny.SIDE, tiny.SIDE)).save(path)
    return path


def test_ask_and_show_take_a_method_with_its_options(model: str, picture_file: Path, tmp_path: Path, capsys) -> None:
    common = ["--image", str(picture_file), "--model", model, "--keep", "10", "--device", "cpu", "--json"]
    kept = []
    for method in ("random[seed=1]", "random[seed=2]", "random[seed=1]"):
        assert _run(["show", *common, "--method", method, "--out", str(tmp_path / "kept.png")]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert shown["method"] == method
        kept.append(shown["keep"])
    assert kept[0] == kept[2] != kept[1]
    assert _run(["ask", *common, "--method", "fastv[layer=1;budget=average]", "What does the sign say?"]) == 0
    asked = json.loads(capsys.readouterr().out)
    assert asked["method"] == "fastv[layer=1;budget=average]" and asked["answer"]
    assert _run(["ask", *common[:-1], "--method", "random", "What does the sign say?"]) == 0
    header = capsys.readouterr().err
    assert re.search(rf"{re.escape(model)}, \S+ [KM] parameters, float32 on cpu, random, keep 10\n", header)
    assert _run(["ask", *common, "--method", "fastv[bugdet=average]", "what?"]) != 0
    assert "has no option 'bugdet'; did you mean budget (of layer, budget)?" in capsys.readouterr().err


def test_show_draws_what_is_kept_and_the_two_ends(model: str, picture_file: Path, tmp_path: Path, capsys) -> None:
    options = ["show", "--image", str(picture_file), "--model", model, "--method", "cls_attention", "--keep", "4"]
    assert _run([*options, "--out", str(tmp_path / "kept.png"), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["keep"]) == 4
    lit = Image.open(tmp_path / "kept.png")
    picture = Image.open(picture_file).resize(lit.size, Image.Resampling.NEAREST)  # small ones are enlarged
    assert (np.asarray(lit) == np.asarray(picture)).all(-1).mean() == pytest.approx(4 / 16, abs=0.01), (
        "4 of 16 tokens stay lit"
    )
    assert _run([*options, "--out", str(tmp_path / "ends.png"), "--matrix"]) == 0
    with Image.open(tmp_path / "ends.png") as drawn:
        assert drawn.width > 600


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["ask", "--image", "missing.png", "what?"], "there is no image file missing.png"),
        (["show", "--image", "missing.png", "--out", "nowhere/x.png"], "the folder of nowhere/x.png does not exist"),
        (["ask", "what?"], "--image"),
    ],
)
def test_wrong_turns_get_one_sentence(arguments: list[str], sentence: str, capsys) -> None:
    assert _run(arguments) != 0
    error = capsys.readouterr().err.strip()
    assert sentence in error and len(error.splitlines()) == 1


def test_a_learned_method_without_weights_is_refused(picture_file: Path, capsys) -> None:
    assert _run(["ask", "--image", str(picture_file), "--method", "diffprune", "--keep", "16", "what?"]) != 0
    assert "method 'diffprune' is learned and needs weights" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["ask", "show"])
def test_a_device_that_is_not_there_is_one_sentence_before_anything_is_loaded(
    command: str, picture_file: Path, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diffprune.api.load_base", lambda name: pytest.fail("the model is loaded"))
    rest = ["what?"] if command == "ask" else ["--out", str(tmp_path / "x.png")]
    assert _run([command, "--image", str(picture_file), "--device", "cuda:99", *rest]) != 0
    error = capsys.readouterr().err.strip().splitlines()[-1]  # before it a line of what is loaded
    assert error.startswith("diffprune: device 'cuda:99' cannot be used here")


def test_the_model_and_its_method_go_to_the_device_asked_for(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    PrunedVLM(*tiny.build("llava"), method="diffprune", keep=4).save_pretrained(tmp_path, base_id=model)
    vlm = load_vlm(str(tmp_path), keep="4", device="cpu")
    places: list[tuple[str, object]] = []
    monkeypatch.setattr(type(vlm.base), "to", lambda self, where: places.append(("base", where)))
    monkeypatch.setattr(type(vlm.method), "to", lambda self, where: places.append(("method", where)))
    monkeypatch.setattr(PrunedVLM, "from_pretrained", lambda pruner, keep, method: vlm)
    assert load_vlm(str(tmp_path), keep="4", device="warp") is vlm
    assert places == [("base", "warp"), ("method", "warp")]


def test_a_budget_that_is_none_is_named_on_the_command_line(picture_file: Path, capsys) -> None:
    assert _run(["ask", "--image", str(picture_file), "--keep", "half", "what?"]) != 0
    assert "keep='half'" in capsys.readouterr().err
