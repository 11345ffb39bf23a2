"""Pixels are exact, boxes are tight, and a batch is drawn as its pictures are one by one."""

import hashlib
from itertools import combinations

import numpy as np
import pytest
import torch

from diffprune_lab.scenes import atlas, make_scene, pack, render
from diffprune_lab.scenes.world import COLORS, KINDS, PATTERNS, QUALITIES, SHAPES, SIZES

MIXED = [make_scene("train", index, kind=kind, quality=q) for kind in KINDS for q in QUALITIES for index in range(2)]
CLEAR = [make_scene("test", index, quality="clear") for index in range(40)]


def mask_of(shape: int, size: int, pattern: int) -> np.ndarray:
    return atlas.MASKS[atlas.thing_mask(shape, size, pattern)]


def test_the_pixels_never_change():
    pixels, owners = render(pack(MIXED), owner=True)
    digest = hashlib.sha256(pixels.numpy().tobytes() + owners.numpy().tobytes()).hexdigest()
    assert digest == "11d63ee99869d41a484ff6a20b0faf3d1c09a66935ad2ebc1829b063506540cf"


def test_a_batch_is_drawn_as_its_pictures_are_one_by_one():
    scenes = MIXED + CLEAR[:20]  # more than are drawn together on a CPU
    pixels, owners = render(pack(scenes), owner=True)
    for index in (0, 1, 7, 13, 22, 31, 32, 43):
        alone, owner_alone = render(pack(scenes[index : index + 1]), owner=True)
        assert torch.equal(alone[0], pixels[index])
        assert torch.equal(owner_alone[0], owners[index])


def test_pictures_are_bytes_and_the_owner_map_does_not_change_them():
    packed = pack(MIXED)
    assert all(array.dtype == np.int32 for array in packed.values())
    pixels = render(packed)
    assert pixels.shape == (len(MIXED), 3, 192, 192) and pixels.dtype == torch.uint8
    assert torch.equal(pixels, render(packed, owner=True)[0])
    assert torch.equal(pixels, render({name: torch.from_numpy(array) for name, array in packed.items()}))


def test_boxes_hold_exactly_the_pixels_of_their_owner():
    _, owners = render(pack(MIXED + CLEAR), owner=True)
    for scene, owner in zip(MIXED + CLEAR, owners, strict=True):
        expected = {slot: thing.box for slot, thing in enumerate(scene.things, start=1)}
        expected |= {6 + slot: thing.tag_box for slot, thing in enumerate(scene.things) if thing.tag_box}
        if scene.sign is not None:
            owner = owner.clone()
            assert set(owner[owner >= 6].tolist()) == {6 + place for place in range(len(scene.sign.text))}
            owner[owner >= 6] = 5  # the letters lie on the plate
            expected[5] = scene.sign.box
        assert set(owner.unique().tolist()) == {0, *expected}
        for number, box in expected.items():
            rows, columns = (owner == number).nonzero(as_tuple=True)
            tight = (columns.min().item(), rows.min().item(), columns.max().item() + 1, rows.max().item() + 1)
            assert tight == box


def test_every_thing_is_drawn_in_its_color():
    pixels, owners = render(pack(CLEAR), owner=True)
    for picture, owner, scene in zip(pixels, owners, CLEAR, strict=True):
        for slot, thing in enumerate(scene.things, start=1):
            own = picture[:, owner == slot].T.tolist()
            body = atlas.PALETTE[thing.color, atlas.BODY].tolist()
            assert own.count(body) > len(own) // 6


def test_what_owns_no_pixel_does_not_depend_on_the_items():
    scene = CLEAR[0]
    packed = pack([scene])
    bare = packed | {"sprites": packed["sprites"][packed["sprites"][:, 4] == 0]}
    bare["counts"] = np.array([len(bare["sprites"])], dtype=np.int32)
    pixels, owners = render(packed, owner=True)
    ground = owners[0] == 0
    assert torch.equal(render(bare)[0][:, ground], pixels[0][:, ground])


@pytest.mark.parametrize("size", range(len(SIZES)))
def test_every_shape_is_distinct_at_every_size(size):
    pixels = atlas.SIZE_PIXELS[size]
    silhouettes = []
    for shape in range(len(SHAPES)):
        mask = mask_of(shape, size, 0) // atlas.TONES
        canvas = np.zeros((pixels, pixels), dtype=int)
        canvas[: mask.shape[0], : mask.shape[1]] = mask
        assert pixels - 2 <= max(mask.shape) <= pixels
        silhouettes.append(canvas)
    for one, two in combinations(silhouettes, 2):
        differing = np.abs(one - two).sum() / atlas.FULL
        assert differing > pixels * pixels / 10


def test_every_pattern_shows_in_every_shape_and_leaves_the_body_its_share():
    for shape in range(len(SHAPES)):
        for size in range(len(SIZES)):
            plain, *patterned = [mask_of(shape, size, pattern) for pattern in range(len(PATTERNS))]
            interior = (plain % atlas.TONES == atlas.BODY) & (plain >= atlas.TONES)
            for mask in patterned:
                assert np.array_equal(mask // atlas.TONES, plain // atlas.TONES)
                marked = (mask[interior] % atlas.TONES == atlas.PATTERN).mean()
                assert 0.06 < marked < 0.62


def test_every_color_stands_out_from_every_ground_and_from_every_other():
    bodies = atlas.PALETTE[: len(COLORS), atlas.BODY]
    for body in bodies:
        assert np.abs(atlas.GROUND_COLORS - body).max(1).min() >= 38
    for one, two in combinations(bodies, 2):
        assert np.abs(one - two).max() >= 60


def test_dim_and_soft_pictures_still_show_what_ruined_ones_hide():
    def contrast(quality: str) -> float:
        scenes = [make_scene("test", index, kind="sign", quality=quality) for index in range(12)]
        pixels, owners = render(pack(scenes), owner=True)
        plates = [picture[:, owner == 5].float().mean() for picture, owner in zip(pixels, owners, strict=True)]
        letters = [picture[:, owner >= 6].float().mean() for picture, owner in zip(pixels, owners, strict=True)]
        return min(float(plate - letter) for plate, letter in zip(plates, letters, strict=True))

    assert contrast("clear") > 60
    assert contrast("soft") > 40
    assert contrast("dim") > 20
    ruined = [make_scene("test", index, kind="sign", quality="ruined") for index in range(12)]
    pixels, owners = render(pack(ruined), owner=True)
    for picture, owner in zip(pixels.float(), owners, strict=True):
        assert abs(picture[:, owner == 5].mean() - picture[:, owner >= 6].mean()) < 3


def test_nothing_to_draw_is_refused():
    with pytest.raises(ValueError, match="at least one scene"):
        pack([])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_draws_exactly_what_a_cpu_draws():
    packed = pack(MIXED + CLEAR)
    for on_cpu, on_gpu in zip(render(packed, owner=True), render(packed, "cuda", owner=True), strict=True):
        assert torch.equal(on_cpu, on_gpu.cpu())
