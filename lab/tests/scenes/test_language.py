"""What is said of scenes: hand-made ones with known answers, and a second reading of every question."""

import hashlib
import re
from dataclasses import replace

import pytest

from diffprune.rng import Rng
from diffprune_lab.scenes import language
from diffprune_lab.scenes.language import CHINESE, ENGLISH, PLANS, UNANSWERABLE
from diffprune_lab.scenes.training_turns import training_turns_by_kind
from diffprune_lab.scenes.world import CELLS, COLORS, PATTERNS, SHAPES, SIZES, Scene, Sign, Thing, make_scene


def thing(name: str, place: str, tag: str = "") -> Thing:
    """A thing such as "small striped red star" in the middle of its cell."""
    size, pattern, color, shape = name.split()
    cell = CELLS.index(place)
    x, y = 64 * (cell % 3) + 20, 64 * (cell // 3) + 20
    box = (x, y, x + 22, y + 22)
    return Thing(
        shape=SHAPES.index(shape),
        color=COLORS.index(color),
        size=SIZES.index(size),
        pattern=PATTERNS.index(pattern),
        cell=cell,
        box=box,
        tag=tag,
        tag_box=(x + 26, y, x + 36, y + 16) if tag else None,
    )


def scene_of(*things: Thing, sign: Sign | None = None, kind: str = "plain", quality: str = "clear") -> Scene:
    return replace(make_scene("train", 0), things=things, sign=sign, kind=kind, quality=quality)


STAR = thing("small striped red star", "top left")
HEART = thing("large plain red heart", "right")
RING = thing("medium dotted blue ring", "bottom")
SIGN = Sign("CAFE", CELLS.index("center"), (70, 84, 122, 108))
THREE = scene_of(STAR, HEART, RING)
DIAGRAM = scene_of(
    thing("small plain red star", "top left", "K"),
    thing("medium dotted blue ring", "right", "T"),
    thing("small striped red moon", "bottom", "E"),
    kind="diagram",
)


def draws(maker, scene: Scene, *arguments, words=ENGLISH, count: int = 150) -> dict:
    """Everything a maker says of a scene, text by answer."""
    made = [maker(scene, Rng("draws", i), words, *arguments) for i in range(count)]
    return {one.text: one.answer for one in made if one is not None}


# Captions


@pytest.mark.parametrize("plan", PLANS)
def test_a_caption_names_everything_that_matters(plan):
    scene = scene_of(STAR, HEART, sign=SIGN, kind="sign")
    text = plan(scene).lower()
    said = set(re.findall(r"\w+", text))
    assert said >= {"small", "striped", "red", "star", "top", "left", "large", "plain", "heart", "right"}
    assert said >= {"sign", "center", "cafe"}


@pytest.mark.parametrize("plan", PLANS)
def test_the_caption_of_a_diagram_names_the_tags(plan):
    text = plan(DIAGRAM)
    assert all(f"{one} marked {tag}" in text for one, tag in (("star", "K"), ("ring", "T"), ("moon", "E")))


def test_captions_are_sentences():
    assert PLANS[0](scene_of(STAR)) == "There is a small striped red star at the top left."
    assert PLANS[2](scene_of(STAR, RING, sign=SIGN)) == (
        "2 things and a sign: a small striped red star at the top left, a medium dotted blue ring at the bottom "
        "and a sign at the center saying CAFE."
    )
    assert PLANS[5](DIAGRAM).startswith("The star marked K at the top left is small, plain and red. The ring marked T")


def test_all_sentence_plans_are_used():
    texts = {language.caption(THREE, Rng("caption", i)) for i in range(100)}
    assert len(texts) == len(PLANS) >= 6


def test_a_ruined_picture_cannot_be_made_out():
    ruined = scene_of(STAR, quality="ruined")
    texts = {language.caption(ruined, Rng("caption", i)) for i in range(50)}
    assert len(texts) == 3
    assert not any({"star", "red", "top"} & set(text.split()) for text in texts)


# Referring


def test_a_thing_is_referred_to_by_words_that_fit_it_alone():
    said = {language.refer(THREE, STAR, Rng("refer", i), ENGLISH) for i in range(100)}
    assert said == {"the thing at the top left", "the red star", "the star"}  # two things are red


def test_the_hidden_attribute_is_not_given_away():
    said = {language.refer(THREE, RING, Rng("refer", i), ENGLISH, hide="color") for i in range(100)}
    assert said == {"the thing at the bottom", "the ring"}


def test_a_missing_thing_is_really_missing():
    for i in range(200):
        color, shape = language.missing_pair(THREE, Rng("missing", i), near=False)
        assert (color, shape) not in {(t.color, t.shape) for t in THREE.things}
    near = {language.missing_pair(THREE, Rng("missing", i), near=True) for i in range(200)}
    named = {(COLORS[color], SHAPES[shape]) for color, shape in near}
    assert named == {("red", "ring"), ("blue", "star"), ("blue", "heart")}


def test_a_near_miss_of_a_lone_thing_shares_one_attribute_with_it():
    for i in range(100):
        color, shape = language.missing_pair(scene_of(STAR), Rng("missing", i), near=True)
        assert (color == STAR.color) != (shape == STAR.shape)


# Questions


def test_attributes_of_a_hand_made_scene():
    asked = draws(language.ask_attribute, THREE, "color")
    assert asked["What color is the ring?"] == "blue"
    assert asked["Which color does the thing at the top left have?"] == "red"
    assert draws(language.ask_attribute, THREE, "shape")["What shape is the blue thing?"] == "ring"
    assert draws(language.ask_attribute, THREE, "size")["How big is the red heart?"] == "large"
    assert draws(language.ask_attribute, THREE, "pattern")["What pattern does the star have?"] == "striped"
    assert draws(language.ask_attribute, THREE, "place")["Where is the ring?"] == "bottom"


def test_relations_of_a_hand_made_scene():
    asked = draws(language.ask_beside, THREE, "shape", count=500)
    assert asked["What shape is the thing left of the blue ring?"] == "star"
    assert asked["What shape is the thing right of the ring?"] == "heart"
    assert asked["What shape is the thing below the red heart?"] == "ring"
    assert not any("above the ring" in text for text in asked)  # both others are
    assert not any("left of the heart" in text for text in asked)


def test_a_relation_is_not_asked_where_things_are_nearly_level():
    level = replace(RING, box=(STAR.box[0] + 12, *RING.box[1:2], STAR.box[2] + 12, RING.box[3]))
    asked = draws(language.ask_beside, scene_of(STAR, level), "color")
    assert asked
    assert not any("left of" in text or "right of" in text for text in asked)


def test_counts_of_a_hand_made_scene():
    assert draws(language.ask_count, THREE) == {"How many things are there?": "3", "What is the number of things?": "3"}
    asked = draws(language.ask_count_some, THREE, count=300)
    assert asked["How many red things are there?"] == "2"
    assert asked["How many rings are there?"] == "1"
    assert asked["How many crosses are there?"] == "0"


def test_signs_are_read_as_what_they_are():
    scene = scene_of(STAR, sign=SIGN, kind="sign")
    assert set(draws(language.ask_sign, scene).values()) == {"CAFE"}
    assert "What word is on the sign?" in draws(language.ask_sign, scene, "sign_word")
    assert not draws(language.ask_sign, scene, "sign_number")
    assert not draws(language.ask_sign, THREE)
    assert set(draws(language.ask_missing_sign, THREE).values()) == {UNANSWERABLE}
    assert not draws(language.ask_missing_sign, scene)


def test_tags_of_a_hand_made_diagram():
    assert draws(language.ask_tag_of, DIAGRAM)["Which tag marks the ring?"] == "T"
    assert draws(language.ask_name_of_tag, DIAGRAM)["What is marked E?"] == "red moon"
    assert draws(language.ask_marked, DIAGRAM, "color")["What color is the thing marked T?"] == "blue"
    assert not draws(language.ask_tag_of, THREE)


def test_yes_and_no_of_a_hand_made_scene():
    def pairs(maker, scene, *arguments):
        made = [maker(scene, Rng("pairs", i), ENGLISH, *arguments) for i in range(250)]
        return {one.yes for one in made if one}, {one.no for one in made if one}

    yes, no = pairs(language.pair_exists, THREE)
    assert "Is there a star?" in yes and "Is there an arrow?" in no and not yes & no
    yes, no = pairs(language.pair_is, THREE, "color")
    assert "Is the ring blue?" in yes and "Is the ring red?" in no
    yes, no = pairs(language.pair_beside, THREE)
    assert "Is the star left of the heart?" in yes and "Is the star right of the heart?" in no
    yes, no = pairs(language.pair_count, THREE)
    assert "Are there exactly 3 things?" in yes and "Is the number of things 2?" in no
    yes, no = pairs(language.pair_sum, THREE)
    assert "Is the number of things plus 2 equal to 5?" in yes and "Is the number of things plus 2 equal to 6?" in no
    yes, no = pairs(language.pair_sign, scene_of(STAR, sign=SIGN))
    assert "Does the sign say CAFE?" in yes and all(len(re.findall(r"[A-Z]{4}", text)) == 1 for text in no)
    same = draws(language.ask_same_color, THREE)
    assert same["Is the star the same color as the heart?"] == "yes"
    assert same["Is the star the same color as the ring?"] == "no"


def test_the_grid_of_names_gives_nothing_away():
    for i in range(100):
        grid = language.grid_of_names(THREE, Rng("grid", i), ENGLISH)
        if grid is None:
            continue
        right, wrong = grid
        words = [name.split() for name in (right, *wrong)]
        assert sorted(len({word[k] for word in words}) for k in (0, 1)) == [2, 2]
        assert len({right, *wrong}) == 4
        names = {f"{COLORS[t.color]} {SHAPES[t.shape]}" for t in THREE.things}
        assert right in names and not names & set(wrong)


def test_wrong_options_come_from_the_picture_first():
    for i in range(50):
        wrong = language.distractors(THREE, Rng("wrong", i), ENGLISH, "shape", STAR.shape, 3)
        assert {SHAPES[value] for value in wrong[:2]} == {"heart", "ring"}
        assert len({STAR.shape, *wrong}) == 4


def test_chinese_has_a_wording_for_each_english_one():
    for kind, wordings in CHINESE.ask.items():
        assert len(wordings) == len(ENGLISH.ask[kind])
    for attribute in language.ATTRIBUTES:
        assert len(CHINESE.values(attribute)) == len(set(CHINESE.values(attribute))) == len(ENGLISH.values(attribute))


def test_a_chinese_question_is_the_english_one_translated():
    english, chinese = (language.ask_beside(THREE, Rng(5), words, "color") for words in (ENGLISH, CHINESE))
    assert english is not None and chinese is not None
    assert english.value == chinese.value
    assert CHINESE.colors[chinese.value] == chinese.answer
    assert re.fullmatch(r"[\u4e00-\u9fff]+\uff1f", chinese.text)


# A second reading of the questions, from their text back to the scene


def find(scene: Scene, reference: str) -> list[Thing]:
    """The things a reference fits."""
    if found := re.fullmatch(r"the thing (left of|right of|above|below) (the .+)", reference):
        (anchor,) = find(scene, found[2])
        axis, sign = {"left of": (0, -1), "right of": (0, 1), "above": (1, -1), "below": (1, 1)}[found[1]]

        def center(one: Thing) -> float:
            return (one.box[axis] + one.box[axis + 2]) / 2

        return [t for t in scene.things if sign * (center(t) - center(anchor)) > 8]
    if found := re.fullmatch(r"the thing at the (.+)", reference):
        return [t for t in scene.things if CELLS[t.cell] == found[1]]
    if found := re.fullmatch(r"the thing marked (.)", reference):
        return [t for t in scene.things if t.tag == found[1]]
    words = reference.removeprefix("the ").split()
    return [t for t in scene.things if {COLORS[t.color], SHAPES[t.shape], "thing"} >= set(words)]


def value(one: Thing, attribute: str) -> str:
    return ENGLISH.values(attribute)[language.value_of(one, attribute)]


def answer(scene: Scene, question: str) -> str | None:
    """The answer to an open question or a yes-or-no question, read from its text; None where it is not understood."""
    for attribute in language.ATTRIBUTES:
        for wording in ENGLISH.ask[attribute]:
            found = re.fullmatch(re.escape(wording).replace(r"\{\}", "(the .+)"), question)
            if found and "number of" not in question:
                things = find(scene, found[1])
                if scene.quality == "ruined" or not things:
                    return UNANSWERABLE
                (one,) = things
                return value(one, attribute)
    if question in ENGLISH.ask["count"]:
        return str(len(scene.things))
    if found := re.fullmatch(r"(?:How many|What is the number of) (.+?)(?: are there)?\?", question):
        some = (
            found[1].removesuffix(" things")
            if found[1].endswith(" things")
            else SHAPES[ENGLISH.plurals.index(found[1])]
        )
        return str(sum(some in (COLORS[t.color], SHAPES[t.shape]) for t in scene.things))
    if found := re.fullmatch(r"(?:Is there|Does the picture show) an? (.+?)(?: in the picture)?\?", question):
        return "yes" if find(scene, f"the {found[1]}") else "no"
    if found := re.fullmatch(
        r"Is (?:it true that )?(the .+?) (?:is )?(left of|right of|above|below) (the .+)\?", question
    ):
        (one,) = find(scene, found[1])
        (other,) = find(scene, found[3])
        axis, sign = {"left of": (0, -1), "right of": (0, 1), "above": (1, -1), "below": (1, 1)}[found[2]]
        return "yes" if sign * (one.box[axis] + one.box[axis + 2] - other.box[axis] - other.box[axis + 2]) > 0 else "no"
    if found := re.fullmatch(
        r"(?:Is|Do) (the .+) (?:the same color as|and) (the .+?)(?: have the same color)?\?", question
    ):
        (one,), (other,) = find(scene, found[1]), find(scene, found[2])
        return "yes" if one.color == other.color else "no"
    if found := re.fullmatch(r"Is (?:it true that )?(the .+?) (?:is )?(\w+)\?", question):
        things = find(scene, found[1]) if "number" not in found[1] else []
        if things:
            (one,) = things
            return "yes" if found[2] in {value(one, attribute) for attribute in language.ATTRIBUTES} else "no"
    return None


def test_every_answer_is_what_a_second_reading_of_the_question_finds():
    understood = 0
    for index in range(200):
        scene = make_scene("train", index)
        for kind, prompt, said in training_turns_by_kind(scene, Rng("read", index), 12):
            if kind == "caption" or "\n" in prompt or "sign" in prompt:
                continue
            found = answer(scene, prompt)
            if found is not None:
                understood += 1
                assert found == said, (prompt, said, scene)
    assert understood > 700


def test_no_question_about_a_scene_has_two_answers():
    for index in range(30):
        scene = make_scene("train", index)
        answers: dict[str, str] = {}
        for i in range(12):
            for kind, prompt, said in training_turns_by_kind(scene, Rng("twice", index, i), 12):
                if kind != "caption":
                    assert answers.setdefault(prompt, said) == said, prompt


def test_a_ruined_picture_is_never_asked_what_can_be_answered():
    for index in range(60):
        scene = make_scene("train", index, quality="ruined")
        for kind, _, said in training_turns_by_kind(scene, Rng("ruined", index), 8):
            assert kind in ("caption", "vizwiz")
            assert kind == "caption" or said == UNANSWERABLE


def test_the_text_of_a_thousand_scenes_is_the_same_everywhere():
    digest = hashlib.sha256()
    for index in range(1000):
        for _, prompt, said in training_turns_by_kind(make_scene("train", index), Rng("exact", index), 3):
            digest.update(f"{prompt}\n{said}\n".encode())
    assert digest.hexdigest()[:16] == "54f9ccc7930d5d83"


def test_all_texts_hold_every_word_that_occurs():
    piece = re.compile(r" ?[A-Z]?[a-z]+| ?[^\sa-z]|\s")  # a word with its space; other characters one by one
    known = {found for text in language.all_texts() for found in piece.findall(text)}
    for index in range(250):
        scene = make_scene("train", index)
        for _, prompt, said in training_turns_by_kind(scene, Rng("vocabulary", index), 8):
            assert known.issuperset(piece.findall(f"\n{prompt}") + piece.findall(f" {said}")), (prompt, said)
    assert len(known) < 500  # a small vocabulary: the reader is a small model
