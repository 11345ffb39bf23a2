"""Pictures at other sizes: which size a scene has, and what its pixels are there."""

import json
from pathlib import Path

import pytest
import torch

from diffprune_lab.scenes import make_scene, pack, render
from diffprune_lab.scenes.sizes import SIDES, draw_sized, model_sizes, picture_size


def test_varying_sizes_follow_from_split_and_number_and_are_all_there() -> None:
    scenes = [make_scene("train", index) for index in range(400)]
    drawn = [picture_size(scene, "varying") for scene in scenes]
    assert drawn[:3] == [picture_size(make_scene("train", index), "varying") for index in range(3)]
    assert {height for height, _ in drawn} == {width for _, width in drawn} == set(SIDES) == set(range(160, 273, 16))
    assert len(set(drawn)) > 60  # of 64 pairs: one side says nothing of the other
    assert drawn[:20] != [picture_size(make_scene("test", index), "varying") for index in range(20)]


def test_every_scene_is_drawn_at_its_own_size_whatever_the_batch() -> None:
    scenes = [make_scene("test", index) for index in range(6)]
    pictures = draw_sized(scenes, "varying")
    for scene, picture in zip(scenes, pictures, strict=True):
        assert picture.shape[1:] == picture_size(scene, "varying")
        assert torch.equal(picture, draw_sized([scene], "varying")[0])
    assert {picture.shape for picture in draw_sized(scenes, "384")} == {(3, 384, 384)}
    assert torch.equal(torch.stack(draw_sized(scenes, "fixed")), render(pack(scenes)))


def test_another_way_of_sizes_is_refused() -> None:
    with pytest.raises(ValueError, match="sizes='385' is no way to size pictures; choose from fixed, 384, varying"):
        picture_size(make_scene("test", 0), "385")


def test_a_model_s_folder_says_its_sizes(tmp_path: Path) -> None:
    assert (
        model_sizes(tmp_path) == model_sizes("scenes-llava") == model_sizes("some/model") == model_sizes("") == "fixed"
    )
    for said in ("varying", "384", 384):
        (tmp_path / "scenes.json").write_text(json.dumps({"sizes": said}))
        assert model_sizes(str(tmp_path)) == str(said)
    for said in ('{"sizes": "wide"}', "{}", "no json", "[]"):
        (tmp_path / "scenes.json").write_text(said)
        with pytest.raises(ValueError, match=r"scenes.json does not say which sizes"):
            model_sizes(tmp_path)
