"""Scenes, pictures and texts of the second world."""

import hashlib

import pytest
import torch

from diffprune.rng import Rng
from diffprune_lab.scarce import language, masks, tasks, world
from diffprune_lab.scarce.draw import PARTS, pack, render
from diffprune_lab.scarce.world import SPLITS, content_hash, make_scene, vary


def test_a_scene_is_the_same_every_time_and_of_its_split_alone() -> None:
    assert make_scene("test", 3) == make_scene("test", 3) != make_scene("test", 4)
    classes = {"train": set(range(14)), "validation": {14}, "test": {15}}
    for split in SPLITS:
        for index in range(40):
            scene = make_scene(split, index)
            text = scene.sign.text if scene.sign is not None else ""
            assert content_hash(scene.things, text) % 16 in classes[split]


def test_the_pictures_are_those_that_were_frozen() -> None:
    pixels, labels, _ = render(pack([make_scene("validation", index) for index in range(6)]))
    digest = hashlib.sha256(pixels.numpy().tobytes() + labels.numpy().tobytes()).hexdigest()[:16]
    assert digest == "f15428448bff8deb"


def test_a_sign_is_there_or_not_as_asked() -> None:
    assert all(make_scene("train", index, sign=True).sign for index in range(20))
    assert not any(make_scene("train", index, sign=False).sign for index in range(20))


@pytest.mark.parametrize("wrong", [{"split": "dev", "index": 0}, {"split": "train", "index": -1}])
def test_a_wrong_scene_is_refused_in_a_sentence(wrong: dict) -> None:
    with pytest.raises(ValueError, match=r"(choose one of|count from 0)"):
        make_scene(**wrong)


def test_nothing_overlaps_and_everything_is_in_the_picture() -> None:
    for index in range(60):
        scene = make_scene("train", index)
        boxes = [thing.box for thing in scene.things] + ([scene.sign.box] if scene.sign else [])
        boxes += [(x, y, x + masks.EXTENTS[mask][0], y + masks.EXTENTS[mask][1]) for mask, x, y, _, _ in scene.litter]
        for place, (x0, y0, x1, y1) in enumerate(boxes):
            assert 0 <= x0 < x1 <= 192 and 0 <= y0 < y1 <= 192
            assert all(x1 <= a0 or a1 <= x0 or y1 <= b0 or b1 <= y0 for a0, b0, a1, b1 in boxes[:place])


def test_labels_say_what_is_drawn() -> None:
    scene = next(
        s for s in (make_scene("train", i, sign=True) for i in range(50)) if any(t.digit >= 0 for t in s.things)
    )
    _, labels, _ = render(pack([scene]))
    owners = set((labels // PARTS).unique().tolist())
    wanted = {0, *range(1, len(scene.things) + 1), world.PLATE_OWNER}
    assert scene.sign is not None
    wanted |= {world.FIRST_LETTER + i for i in range(len(scene.sign.text))}
    wanted |= {world.FIRST_BADGE + i for i, thing in enumerate(scene.things) if thing.digit >= 0}
    wanted |= {world.FIRST_LITTER + i for i in range(len(scene.litter))}
    assert owners == wanted


def test_a_twin_differs_only_where_something_changed() -> None:
    scene = make_scene("train", 5)
    twin = vary(scene, Rng("t", 5))
    assert twin != scene
    one, other = (render(pack([each]))[0] for each in (scene, twin))
    assert (one != other).any() and (one == other).all(1).any()
    kept = [thing for thing in scene.things if thing in twin.things]
    for thing in kept:
        x0, y0, x1, y1 = thing.box
        middle = slice(y0 + 6, y1 - 6), slice(x0 + 6, x1 - 6)
        assert torch.equal(one[0][:, *middle], other[0][:, *middle])


def test_head_and_base_together_name_a_thing_and_neither_does_alone() -> None:
    names = {(head, base): masks.NOUNS[masks.noun(head, base)] for head in range(4) for base in range(3)}
    assert len(set(names.values())) == 12


def test_answers_are_right() -> None:
    for index in range(40):
        scene, rng = make_scene("train", index, sign=True), Rng("answers", index)
        by_cell = {world.CELLS[thing.cell]: thing for thing in scene.things}
        assert scene.sign is not None
        assert language.ask_sign(scene, rng).answer == scene.sign.text
        assert language.ask_length(scene, rng).answer == str(len(scene.sign.text))
        assert language.ask_count(scene, rng).answer == str(len(scene.things))
        asked = language.ask_name(scene, rng)
        place = asked.text.rsplit("at the ", 1)[1].rstrip("?")
        assert masks.NOUNS[by_cell[place].noun] == asked.answer
        where = language.ask_where(scene, rng)
        if where is not None:
            assert masks.NOUNS[by_cell[where.answer].noun] in where.text
        exists = language.ask_exists(scene, rng, "near")
        if exists is not None:
            there = any(f" {masks.NOUNS[thing.noun]}" in exists.text for thing in scene.things)
            assert exists.answer == ("yes" if there else "no")
        pair = language.pair_relation(scene, rng)
        if pair is not None:
            one, other = (next(t for t in scene.things if masks.NOUNS[t.noun] == word) for word in _nouns(pair.yes))
            across, down = one.cell % 3 - other.cell % 3, one.cell // 3 - other.cell // 3
            assert {"left of": across < 0, "right of": across > 0, "above": down < 0, "below": down > 0}[pair.key]
        told = language.tell_relation(scene, rng)
        if told is not None:
            one, other = (next(t for t in scene.things if masks.NOUNS[t.noun] == word) for word in _nouns(told.text))
            assert ("left of" in told.answer, "right of" in told.answer) == (
                one.cell % 3 < other.cell % 3,
                one.cell % 3 > other.cell % 3,
            )
            assert ("above" in told.answer, "below" in told.answer) == (
                one.cell // 3 < other.cell // 3,
                one.cell // 3 > other.cell // 3,
            )


def _nouns(text: str) -> list[str]:
    return [word for word in text.rstrip("?").split() if word in masks.NOUNS]


def test_what_is_asked_in_training_alone_is_in_no_task() -> None:
    scenes = [make_scene("train", index) for index in range(40)]
    asked = {turn[1] for scene in scenes for turn in tasks.training_turns(scene, Rng(scene.index), 12)}
    assert any(text.startswith("How does the") for text in asked)
    questions = tasks.build_task("scarce/relation", "validation", 20).questions
    assert all(question.prompt.startswith("Is the") for question in questions)


def test_litter_and_grounds_are_never_spoken_of() -> None:
    told = " ".join(language.all_texts(20)).lower()
    assert not any(f" {word}" in told for word in masks.LITTER if word not in masks.NOUNS)


def test_tasks_are_built_alike_every_time_and_their_answers_are_balanced() -> None:
    assert len(tasks.TASKS) == 10 and all(name.startswith("scarce/") for name in tasks.TASKS)
    for name in tasks.TASKS:
        task = tasks.build_task(name, "validation", 12)
        assert task == tasks.build_task(name, "validation", 12)
        assert task.score([question.answer for question in task.questions]).score == pytest.approx(100.0)
        assert task.score([question.answer for question in task.questions]).score <= 100
        assert task.chance < 70
        assert {question.images[0].split for question in task.questions} == {"validation"}


def test_wrong_tasks_are_refused_in_a_sentence() -> None:
    with pytest.raises(ValueError, match="choose one of scarce/name"):
        tasks.build_task("name", "validation", 1)
    with pytest.raises(ValueError, match="at least 1"):
        tasks.build_task("scarce/name", "validation", 0)
    with pytest.raises(ValueError, match="give one for each"):
        tasks.build_task("scarce/name", "validation", 3).score([""])


def test_turns_hold_a_caption_and_no_prompt_twice() -> None:
    turns = tasks.training_turns(make_scene("train", 1, sign=True), Rng("turns"), 10)
    assert turns[0][0] == "caption" and len({prompt for _, prompt, _ in turns}) == len(turns) == 10
