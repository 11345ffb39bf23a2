"""Pictures at other sizes: which size a scene has, and what its pixels are there."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from diffprune_lab.scenes import PICTURE, make_scene, pack, render
from diffprune_lab.scenes.encode import to_images
from diffprune_lab.scenes.sizes import SIDES, draw_sized, model_sizes, picture_size, resize


@pytest.mark.parametrize("kernel", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("height", "width"), [(160, 272), (384, 384), (208, 176), (96, 700), (192, 50)])
def test_a_resized_picture_is_pillow_s_to_the_bit(height: int, width: int, kernel: str) -> None:
    pixels = render(pack([make_scene("test", index) for index in range(3)]))
    for ours, image in zip(resize(pixels, height, width, kernel), to_images(pixels), strict=True):
        for size in ((width, PICTURE), (width, height)):
            image = image.resize(size, Image.Resampling[kernel.upper()])
        assert np.array_equal(ours.permute(1, 2, 0).numpy(), np.asarray(image))


def test_a_picture_of_one_color_keeps_it_and_one_of_the_same_size_its_pixels() -> None:
    for value in (0, 1, 127, 255):
        flat = torch.full((1, 3, PICTURE, PICTURE), value, dtype=torch.uint8)
        assert (resize(flat, 176, 384) == value).all()
    noise = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, 3, 20, 30), dtype=np.uint8))
    assert torch.equal(resize(noise, 20, 30), noise)


def test_a_mirrored_picture_stays_mirrored() -> None:
    pixels = render(pack([make_scene("test", 5)]))
    assert torch.equal(resize(pixels.flip(-1), 176, 256), resize(pixels, 176, 256).flip(-1))


def test_an_empty_size_is_refused() -> None:
    with pytest.raises(ValueError, match="0 x 10 pixels is empty"):
        resize(torch.zeros(1, 3, 4, 4, dtype=torch.uint8), 0, 10)


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
