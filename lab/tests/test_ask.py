"""`diffprune ask` with the reference model that comes with the lab."""

import json
from pathlib import Path

from diffprune.cli.main import _run
from diffprune_lab.scenes import make_scene, pack, render
from diffprune_lab.scenes.encode import to_images


def test_ask_answers_about_a_picture_with_an_eighth_of_its_tokens(tmp_path: Path, capsys) -> None:
    scene = make_scene("test", 3, kind="sign", quality="clear")
    assert scene.sign is not None
    picture = tmp_path / "scene.png"
    to_images(render(pack([scene]), "cpu"))[0].save(picture)
    options = ["--model", "scenes-llava", "--method", "cls_attention", "--keep", "72", "--device", "cpu", "--json"]
    assert _run(["ask", "--image", str(picture), *options, "What does the sign say?"]) == 0
    assert json.loads(capsys.readouterr().out)["answer"] == scene.sign.text
