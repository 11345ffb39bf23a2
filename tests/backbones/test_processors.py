"""Whatever a user hands over as a picture becomes RGB bytes, or one sentence that names what is wrong."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from diffprune.backbones import processors
from diffprune.backbones.processors import open_image, pixel_seed, resize
from tests import tiny


def test_grey_palette_transparent_and_cmyk_pictures_become_rgb() -> None:
    for mode in ("L", "P", "RGBA", "CMYK", "1"):
        picture = open_image(tiny.picture(0, (8, 6)).convert(mode))
        assert picture.mode == "RGB" and picture.size == (8, 6)


def test_a_16_bit_picture_is_scaled_and_not_clipped_to_white() -> None:
    levels = np.array([[0, 256 * 100, 65535]], dtype=np.uint16)
    assert np.asarray(open_image(Image.fromarray(levels)))[0, :, 0].tolist() == [0, 100, 255]


def test_paths_and_arrays_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    tiny.picture(3, (9, 5)).save(path)
    assert np.array_equal(np.asarray(open_image(path)), np.asarray(open_image(str(path))))
    array = np.asarray(tiny.picture(3, (9, 5)))
    assert np.array_equal(np.asarray(open_image(array)), array)


def test_an_animation_is_refused_with_the_number_of_its_frames(tmp_path: Path) -> None:
    path = tmp_path / "a.gif"
    frames = [tiny.picture(seed, (8, 8)) for seed in range(3)]
    frames[0].save(path, save_all=True, append_images=frames[1:])
    with pytest.raises(ValueError, match="animated \\(3 frames\\)"):
        open_image(path)


@pytest.mark.parametrize(("content", "message"), [(b"", "is empty"), (b"no picture", "no image that can be read")])
def test_files_that_hold_no_picture_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "broken.jpg"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        open_image(path)
    assert "broken.jpg" in str(caught.value)


def test_a_picture_cut_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    tiny.picture(0, (64, 64)).save(path)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(ValueError, match="cannot be decoded"):
        open_image(path)


def test_a_missing_file_a_wrong_type_and_a_wrong_array_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no image file .*nothing\.png"):
        open_image(tmp_path / "nothing.png")
    with pytest.raises(ValueError, match="int is no image"):
        open_image(7)
    with pytest.raises(ValueError, match="float64"):
        open_image(np.zeros((4, 4, 3)))


def test_a_gigantic_picture_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "MAX_PIXELS", 100)
    with pytest.raises(ValueError, match="20 x 6 pixels"):
        open_image(Image.new("RGB", (20, 6)))


def test_the_number_of_a_picture_depends_on_its_pixels_and_its_shape() -> None:
    first = tiny.picture(0, (8, 6))
    assert pixel_seed(first) == pixel_seed(first.copy())
    assert pixel_seed(first) != pixel_seed(tiny.picture(1, (8, 6)))
    assert pixel_seed(Image.new("RGB", (4, 9))) != pixel_seed(Image.new("RGB", (9, 4)))


# Pictures on a device ------------------------------------------------------------------------------------------------


def noise(*shape: int) -> Tensor:
    """Random pictures, smooth in one half and rough in the other."""
    pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    pixels[..., : shape[-1] // 2] = np.linspace(0, 255, shape[-2]).astype(np.uint8)[:, None]
    return torch.from_numpy(pixels)


@pytest.mark.parametrize("kernel", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("height", "width"), [(160, 272), (384, 384), (208, 176), (96, 700), (192, 50)])
def test_a_resized_picture_is_pillow_s_to_the_bit(height: int, width: int, kernel: str) -> None:
    pixels = noise(3, 3, 192, 192)
    for ours, drawn in zip(resize(pixels, height, width, kernel), pixels, strict=True):
        image = Image.fromarray(drawn.permute(1, 2, 0).numpy())
        for size in ((width, 192), (width, height)):
            image = image.resize(size, Image.Resampling[kernel.upper()])
        assert np.array_equal(ours.permute(1, 2, 0).numpy(), np.asarray(image))


def test_a_picture_of_one_color_keeps_it_and_one_of_the_same_size_its_pixels() -> None:
    for value in (0, 1, 127, 255):
        flat = torch.full((1, 3, 192, 192), value, dtype=torch.uint8)
        assert (resize(flat, 176, 384) == value).all()
    assert torch.equal(resize(noise(2, 3, 20, 30), 20, 30), noise(2, 3, 20, 30))


def test_a_mirrored_picture_stays_mirrored() -> None:
    pixels = noise(1, 3, 192, 192)
    assert torch.equal(resize(pixels.flip(-1), 176, 256), resize(pixels, 176, 256).flip(-1))


def test_an_empty_size_is_refused() -> None:
    with pytest.raises(ValueError, match="0 x 10 pixels is empty"):
        resize(torch.zeros(1, 3, 4, 4, dtype=torch.uint8), 0, 10)
