"""Scenes are exact, fairly mixed, never in two splits, and their items never touch."""

import hashlib
from collections import Counter
from functools import cache
from itertools import combinations

import pytest

from diffprune_lab.scenes import atlas
from diffprune_lab.scenes.world import (
    CELL,
    COLORS,
    KINDS,
    PATTERNS,
    PICTURE,
    QUALITIES,
    SHAPES,
    SIZES,
    SPLITS,
    TAGS,
    WORDS,
    Box,
    Scene,
    content_hash,
    make_scene,
)


@cache
def natural_scenes(split: str = "train", count: int = 1000) -> tuple[Scene, ...]:
    return tuple(make_scene(split, index) for index in range(count))


def item_boxes(scene: Scene) -> list[Box]:
    boxes = [thing.box for thing in scene.things]
    boxes += [thing.tag_box for thing in scene.things if thing.tag_box is not None]
    return boxes + ([scene.sign.box] if scene.sign is not None else [])


def clutter_boxes(scene: Scene) -> list[Box]:
    marks = [(atlas.EXTENTS[mask], x, y) for mask, x, y, _, owner in scene.sprites if owner == 0]
    return [(x, y, x + width, y + height) for (width, height), x, y in marks]


def touch(one: Box, two: Box) -> bool:
    """True where no free pixel lies between two boxes."""
    return one[0] <= two[2] and two[0] <= one[2] and one[1] <= two[3] and two[1] <= one[3]


def test_the_world_never_changes():
    digest = hashlib.sha256(repr(natural_scenes()).encode()).hexdigest()
    assert digest == "bb1996059af485e88e8e3d4436aa7ade2632c078e1ee244abe4b97206112ebd3"


def test_a_scene_depends_on_its_number_split_seed_and_wishes():
    scene = make_scene("train", 3)
    assert scene == make_scene("train", 3)
    others = [
        make_scene("train", 4),
        make_scene("validation", 3),
        make_scene("train", 3, seed=1),
        make_scene("train", 3, kind=scene.kind),
        make_scene("train", 3, quality=scene.quality),
    ]
    assert len({content_hash(other) for other in [scene, *others]}) == 6


def test_no_content_is_in_two_splits():
    contents = {split: {content_hash(scene) for scene in natural_scenes(split)} for split in SPLITS}
    for one, two in combinations(SPLITS, 2):
        assert not contents[one] & contents[two]
    classes = {split: {content % 16 for content in contents[split]} for split in SPLITS}
    assert classes == {"train": set(range(14)), "validation": {14}, "test": {15}}


def test_the_content_hash_feels_every_part_of_the_content():
    scenes = natural_scenes()
    described = {
        (
            tuple((t.cell, t.shape, t.color, t.size, t.pattern, t.tag) for t in scene.things),
            (scene.sign.text, scene.sign.cell) if scene.sign else None,
        )
        for scene in scenes
    }
    assert len({content_hash(scene) for scene in scenes}) == len(described) > 990


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("quality", QUALITIES)
def test_a_wish_for_kind_and_quality_is_met(kind, quality):
    scene = make_scene("test", 0, kind=kind, quality=quality)
    assert (scene.kind, scene.quality) == (kind, quality)
    assert (scene.sign is not None) == (kind == "sign")
    assert all((thing.tag != "") == (thing.tag_box is not None) == (kind == "diagram") for thing in scene.things)


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (("dev", 0), {}, "'dev'.*train, validation, test"),
        (("train", -1), {}, "-1.*count from 0"),
        (("train", 0), {"kind": "photo"}, "'photo'.*plain, sign, diagram"),
        (("train", 0), {"quality": "fine"}, "'fine'.*clear, dim, soft, ruined"),
    ],
)
def test_a_scene_that_cannot_be_is_refused_in_one_sentence(arguments, options, words):
    with pytest.raises(ValueError, match=words) as refusal:
        make_scene(*arguments, **options)
    assert str(refusal.value).endswith(".")
    assert "\n" not in str(refusal.value)


def test_the_natural_mix_is_as_stated():
    scenes = natural_scenes()
    kinds = Counter(scene.kind for scene in scenes)
    assert abs(kinds["plain"] - 500) < 50 and abs(kinds["sign"] - 350) < 50 and abs(kinds["diagram"] - 150) < 35
    qualities = Counter(scene.quality for scene in scenes)
    assert abs(qualities["ruined"] - 40) < 20 and abs(qualities["dim"] - 60) < 25 and abs(qualities["soft"] - 60) < 25
    counts = Counter(len(scene.things) for scene in scenes if scene.kind != "diagram")
    for count, share in ((1, 0.10), (2, 0.25), (3, 0.35), (4, 0.30)):
        assert abs(counts[count] / counts.total() - share) < 0.05
    assert {len(scene.things) for scene in scenes if scene.kind == "diagram"} == {3, 4}


def test_attributes_and_places_are_uniform():
    things = [thing for scene in natural_scenes() if scene.kind != "diagram" for thing in scene.things]
    for attribute, size in (("shape", len(SHAPES)), ("color", len(COLORS)), ("size", len(SIZES)), ("cell", 9)):
        counts = Counter(getattr(thing, attribute) for thing in things)
        assert set(counts) == set(range(size))
        assert all(abs(count * size / len(things) - 1) < 0.25 for count in counts.values())
    patterns = Counter(thing.pattern for thing in things)
    assert all(abs(patterns[pattern] * 3 / len(things) - 1) < 0.1 for pattern in range(len(PATTERNS)))


def test_pairs_of_color_and_shape_are_distinct_and_about_half_of_the_scenes_share_an_attribute():
    sharing = []
    for scene in natural_scenes():
        pairs = [(thing.color, thing.shape) for thing in scene.things]
        assert len(set(pairs)) == len(pairs)
        if len(pairs) > 1:
            colors, shapes = zip(*pairs, strict=True)
            sharing.append(len(set(colors)) < len(pairs) or len(set(shapes)) < len(pairs))
    assert abs(sum(sharing) / len(sharing) - 0.5) < 0.06


def test_things_are_in_raster_order_each_inside_a_cell_of_its_own():
    for scene in natural_scenes():
        cells = [thing.cell for thing in scene.things]
        assert cells == sorted(set(cells))
        assert scene.sign is None or scene.sign.cell not in cells
        items = [(thing.cell, box) for thing in scene.things for box in (thing.box, thing.tag_box) if box]
        items += [(scene.sign.cell, scene.sign.box)] if scene.sign else []
        for cell, (x0, y0, x1, y1) in items:
            left, top = cell % 3 * CELL, cell // 3 * CELL
            assert left + 3 <= x0 < x1 <= left + CELL - 3
            assert top + 3 <= y0 < y1 <= top + CELL - 3


def test_items_and_clutter_never_touch_each_other():
    for scene in natural_scenes():
        items, clutter = item_boxes(scene), clutter_boxes(scene)
        assert not any(touch(one, two) for one, two in combinations(items, 2))
        assert not any(touch(mark, item) for mark in clutter for item in items)
        assert all(min(box) >= 0 and max(box) <= PICTURE for box in clutter)
        if scene.kind != "diagram":
            assert 4 <= len(clutter) <= 14
            assert not any(touch(one, two) for one, two in combinations(clutter, 2))


def test_signs_hold_words_and_two_digit_numbers():
    texts = [scene.sign.text for scene in natural_scenes() if scene.sign is not None]
    numbers = [text for text in texts if text.isdigit()]
    assert all(10 <= int(text) <= 99 for text in numbers)
    assert set(texts) - set(numbers) <= set(WORDS)
    assert abs(len(numbers) / len(texts) - 0.4) < 0.1
    assert len(WORDS) == len(set(WORDS)) >= 150
    assert all(3 <= len(word) <= 4 and word.isalpha() and word.isupper() for word in WORDS)


def test_tags_are_distinct_letters_that_no_choice_uses():
    assert not set(TAGS) & set("ABCD")
    for scene in natural_scenes():
        if scene.kind == "diagram":
            tags = [thing.tag for thing in scene.things]
            assert len(set(tags)) == len(tags)
            assert set(tags) <= set(TAGS)
            assert all(thing.size < 2 for thing in scene.things)
