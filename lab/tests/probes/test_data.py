from pathlib import Path

import pytest
import torch

from diffprune_lab.probes.augment import (
    augment,
    crop,
    draw_crops,
    draw_mixture,
    inside_cropped,
    mix,
    normalise,
)
from diffprune_lab.probes.data import draw_photos, find_files, inside_box, read_photos
from lab.tests.probes.parquet import write_photos


def test_pictures_boxes_and_labels_come_back_as_they_were_written(tmp_path: Path) -> None:
    drawn = write_photos(tmp_path / "dev-00-of-01.parquet", 5)
    (tmp_path / "classes.json").write_text('{"names": ["a", "b", "c", "d"]}')
    train, held_out = find_files(tmp_path)
    assert (train, [path.name for path in held_out]) == ([], ["dev-00-of-01.parquet"])
    photos = read_photos(held_out, side=32)
    assert torch.equal(photos.pixels, drawn.pixels) and torch.equal(photos.labels, drawn.labels)
    torch.testing.assert_close(photos.boxes, drawn.boxes)
    assert photos.seeds == drawn.seeds and photos.names == ("a", "b", "c", "d")


def test_pictures_of_another_size_are_resized_and_their_boxes_with_them(tmp_path: Path) -> None:
    drawn = write_photos(tmp_path / "any.parquet", 2, side=48)
    photos = read_photos([tmp_path / "any.parquet"], side=32)
    assert photos.pixels.shape == (2, 3, 32, 32)
    torch.testing.assert_close(photos.boxes, drawn.boxes)


def test_a_single_file_and_a_folder_of_folders_are_found(tmp_path: Path) -> None:
    write_photos(tmp_path / "inner" / "train-0.parquet", 1)
    write_photos(tmp_path / "inner" / "holdout.parquet", 1)
    train, held_out = find_files(tmp_path)
    assert [path.stem for path in train + held_out] == ["train-0", "holdout"]
    assert find_files(held_out[0]) == ([], held_out)


def test_a_folder_that_is_not_there_or_empty_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere is not there.*--data"):
        find_files(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds no parquet file"):
        find_files(tmp_path)


def test_other_columns_are_named(tmp_path: Path) -> None:
    write_photos(tmp_path / "dev.parquet", 2, box=None)
    with pytest.raises(ValueError, match=r"columns image, label and lacks box"):
        read_photos([tmp_path / "dev.parquet"])


@pytest.mark.parametrize(
    "columns, words",
    [
        ({"image": [{"bytes": b"no picture", "path": "x"}]}, "cannot be read"),
        (
            {"image": [{"bytes": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n%%EndComments\n"}]},
            "cannot identify",
        ),
        ({"image": ["a path alone"]}, "no bytes"),
        ({"box": [[1, 2, 3]]}, "must hold x0, y0, x1, y1"),
        ({"box": [[9, 2, 3, 8]]}, "x0 <= x1 and y0 <= y1"),
        ({"box": [[1.0, 2.0, float("nan"), 8.0]]}, "must hold x0, y0, x1, y1"),
        ({"box": [[1, None, 3, 8]]}, "must hold x0, y0, x1, y1"),
        ({"label": [None]}, "label is None"),
        ({"label": ["n01"]}, "label is 'n01'"),
        ({"label": [-1]}, "label is -1"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, columns: dict[str, object], words: str) -> None:
    write_photos(tmp_path / "dev.parquet", 1, **columns)
    with pytest.raises(ValueError, match=f"row 0.*{words}"):
        read_photos([tmp_path / "dev.parquet"])


def test_a_file_that_is_no_parquet_or_has_no_row_is_refused(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "dev.parquet").write_text("hello")
    with pytest.raises(ValueError, match="damaged or no parquet"):
        read_photos([tmp_path / "dev.parquet"])
    empty = {"image": arrow.array([], arrow.struct({"bytes": arrow.binary()})), "label": [], "box": []}
    parquet.write_table(arrow.table(empty), tmp_path / "dev.parquet")
    with pytest.raises(ValueError, match="without a single row"):
        read_photos([tmp_path / "dev.parquet"])


def test_a_box_lights_the_cells_whose_centre_it_holds() -> None:
    boxes = torch.tensor([[0.0, 0.0, 1.0, 1.0], [0.25, 0.5, 0.75, 1.0], [0.1, 0.1, 0.12, 0.12]])
    inside = inside_box(boxes, 4)
    assert inside[0].all() and not inside[2].any()
    assert inside[1].nonzero().squeeze(-1).tolist() == [9, 10, 13, 14]


def test_augmented_pictures_differ_and_are_the_same_for_the_same_generator() -> None:
    pixels = draw_photos(4).pixels
    first, again, other = (augment(pixels, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert float(first.min()) >= 0 and float(first.max()) <= 1


def test_normalised_pixels_have_the_models_own_scale() -> None:
    grey = torch.full((1, 3, 2, 2), 51, dtype=torch.uint8)
    torch.testing.assert_close(normalise(grey, (0.2, 0.2, 0.2), (0.5, 0.5, 0.5)), torch.zeros(1, 3, 2, 2))


@pytest.mark.parametrize("seed", range(6))  # both kinds of mixture
def test_the_targets_say_how_much_of_each_picture_is_there(seed: int) -> None:
    x = torch.tensor([0.0, 1.0])[:, None, None, None].expand(2, 3, 16, 16)
    own = draw_mixture(16, seed, x.device)
    mixed, targets = mix(x, own), mix(torch.eye(2), own.mean())
    torch.testing.assert_close(targets.sum(-1), torch.ones(2))
    torch.testing.assert_close(mixed.mean((1, 2, 3)), targets[:, 1], atol=1e-5, rtol=0)


def test_both_kinds_of_mixture_are_drawn() -> None:
    drawn = [draw_mixture(16, seed, torch.device("cpu")) for seed in range(20)]
    shares = [set(own.unique().tolist()) for own in drawn]
    assert any(len(values) == 1 and 0 < min(values) < 1 for values in shares)  # blended
    assert any(values == {0.0, 1.0} for values in shares)  # pasted
    assert all(len(values) == 1 or values == {0.0, 1.0} for values in shares)


def test_the_box_moves_with_the_crop() -> None:
    photos = draw_photos(64, side=64)
    white = torch.zeros_like(photos.pixels)  # a picture that is white inside its box alone
    white[inside_box(photos.boxes, 64).view(-1, 1, 64, 64).expand_as(white)] = 255
    crops = draw_crops(64, torch.Generator().manual_seed(0))
    seen = torch.nn.functional.avg_pool2d(crop(white, crops), 4).mean(1).flatten(1)  # share of white in each patch
    inside = inside_cropped(photos.boxes, crops, 16)
    assert float((inside - (seen > 0.5).float()).abs().mean()) < 0.01  # rims, where bilinear pixels are grey
    assert torch.equal(inside[seen > 0.99], torch.ones_like(inside[seen > 0.99]))
    assert float(inside[seen < 0.01].sum()) == 0
    whole = torch.eye(3)[:2].expand(64, 2, 3)
    assert torch.equal(inside_cropped(photos.boxes, whole, 16).bool(), inside_box(photos.boxes, 16))
