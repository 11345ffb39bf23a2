"""Whatever a user hands over as a picture becomes RGB bytes, or one sentence that names what is wrong."""

import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile
from torch import Tensor
from transformers.image_utils import load_image

from diffprune.backbones import processors
from diffprune.backbones.processors import image_size, open_image, pixel_seed, resize
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
    monkeypatch.setattr(processors.limits, "max_pixels", 100)
    with pytest.raises(ValueError, match="20 x 6 pixels"):
        open_image(Image.new("RGB", (20, 6)))


def test_a_line_that_a_processor_would_make_a_gigapixel_of_is_refused() -> None:
    open_image(Image.new("RGB", (1, 200)))
    with pytest.raises(ValueError, match="1 x 10000 pixels, one side more than 200 times the other"):
        open_image(Image.new("RGB", (1, 10_000)))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_is_turned_as_its_exif_orientation_says(tmp_path: Path, orientation: int) -> None:
    stored = tiny.picture(1, (16, 8))
    exif = stored.getexif()
    exif[0x0112] = orientation
    path = tmp_path / "phone.png"
    stored.save(path, exif=exif)
    expected = np.asarray(load_image(str(path)))  # transformers' own way
    with Image.open(path) as opened:
        for source in (path, path.read_bytes(), opened):
            assert np.array_equal(np.asarray(open_image(source)), expected)
    assert (expected.shape != np.asarray(stored).shape) == (orientation > 4)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")  # Pillow's own
def test_damaged_exif_leaves_the_pixels(tmp_path: Path) -> None:
    path = tmp_path / "a.jpg"
    tiny.picture(1, (16, 8)).save(path, exif=b"Exif\0\0II*\0" + b"\xff" * 40)
    assert open_image(path).size == (16, 8)


@pytest.mark.parametrize(("dtype", "kind"), [(np.int32, "32-bit integers"), (np.float32, "floats")])
def test_pixels_without_a_range_are_refused_and_not_turned_black(tmp_path: Path, dtype: Any, kind: str) -> None:
    """The file is whole, so nothing is said of one that was cut short."""
    path = tmp_path / "deep.tiff"
    Image.fromarray(np.full((4, 4), 200, dtype=dtype)).save(path)
    for source, name in ((path, f"the image {path}"), (Image.open(path), "the image")):
        with pytest.raises(ValueError, match="no fixed range") as caught:
            open_image(source)
        assert str(caught.value) == f"{name} has pixels of {kind}, which have no fixed range; convert it to bytes first"


def test_a_limit_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("many", "-1", "0", "1.5"):
        monkeypatch.setenv("DIFFPRUNE_MAX_PIXELS", value)
        with pytest.raises(ValueError, match=rf"^DIFFPRUNE_MAX_PIXELS={value} is no number of 1 or more"):
            processors.Limits()
    monkeypatch.setenv("DIFFPRUNE_MAX_PIXELS", "100")
    assert processors.Limits().max_pixels == 100


def test_formats_are_told_by_content_and_no_program_is_started(tmp_path: Path) -> None:
    path = tmp_path / "page.png"
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n")
    with pytest.raises(ValueError, match=r"no image that can be read; known are JPEG, PNG"):
        open_image(path)


def behind_pixels(png: bytes) -> bytes:
    """The same PNG, its EXIF written behind the pixels, as some programs do."""
    start = png.index(b"eXIf") - 4
    end = start + 12 + int.from_bytes(png[start : start + 4], "big")
    without, last = png[:start] + png[end:], png.index(b"IEND") - 4 - (end - start)
    return without[:last] + png[start:end] + without[last:]


@pytest.mark.parametrize("kind", processors.FORMATS)
def test_the_size_of_a_file_is_that_of_the_opened_picture(tmp_path: Path, kind: str) -> None:
    for orientation in (None, *range(1, 9)):
        exif = Image.Exif()
        if orientation is not None:
            exif[0x0112] = orientation
        file = io.BytesIO()
        try:
            tiny.picture(1, (24, 16)).save(file, kind, **({} if orientation is None else {"exif": exif}))
        except (KeyError, OSError, ValueError):
            pytest.skip(f"this Pillow writes no {kind}")
        files = [file.getvalue()]
        if kind == "PNG" and orientation is not None:
            files.append(behind_pixels(files[0]))
            assert len(files[1]) == len(files[0])
        for content in files:
            (tmp_path / "picture").write_bytes(content)
            assert image_size(content) == image_size(tmp_path / "picture") == open_image(content).size, orientation
        if kind == "PNG" and orientation == 6:
            assert image_size(files[1]) == (16, 24)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_size_needs_no_pixels(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.BytesIO()
    tiny.picture(1, (24, 16)).save(file, kind)
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("decoded"))
    assert image_size(file.getvalue()) == (24, 16)


@pytest.mark.parametrize("kind", processors.FORMATS)
def test_every_format_of_the_list_is_read(kind: str) -> None:
    file = io.BytesIO()
    try:
        tiny.picture(1, (24, 16)).save(file, kind)
    except (KeyError, OSError, ValueError):
        pytest.skip(f"this Pillow writes no {kind}")
    assert open_image(file.getvalue()).size == (24, 16)


@pytest.mark.parametrize("data", [b"nothing", b""])
def test_a_file_of_no_format_is_told_without_where_it_lies_in_memory(data: bytes) -> None:
    with pytest.raises(ValueError, match=rf"^a file of {len(data)} bytes is no image that can be read; known are JPEG"):
        open_image(data)


@pytest.mark.parametrize("ending", ["tiff", "gif", "avif", "webp", "jp2", "bmp", "ppm", "jpg"])
def test_a_file_damaged_anywhere_is_one_sentence_or_a_picture(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a.{ending}"
    try:
        tiny.picture(0, (24, 16)).save(path)
    except (KeyError, OSError, ValueError):
        pytest.skip(f"this Pillow writes no {ending}")
    whole = path.read_bytes()
    draw = random.Random(7)
    for _ in range(60):
        content = bytearray(whole)
        for _ in range(draw.randrange(1, 8)):
            content[draw.randrange(len(content))] = draw.randrange(256)
        try:
            picture = open_image(bytes(content[: draw.randrange(1, len(content) + 1)]))
        except ValueError:
            continue
        assert picture.mode == "RGB"


def test_a_name_too_long_is_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"cannot be opened .File name too long"):
        open_image("x" * 5000 + ".png")


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
