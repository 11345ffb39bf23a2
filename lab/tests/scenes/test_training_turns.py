"""Questions and captions to learn from: every task in the mix, balanced, and no prompt twice."""

import re
from collections import Counter

import pytest

from diffprune.rng import Rng
from diffprune_lab.scenes.tasks import TASKS
from diffprune_lab.scenes.training_turns import DEFAULT_WEIGHTS, training_turns_by_kind
from diffprune_lab.scenes.world import make_scene


def test_popular_pairs_are_there_as_often_as_not_in_training():
    answers = Counter()
    for index in range(800):
        for _, prompt, said in training_turns_by_kind(
            make_scene("train", index), Rng("popular", index), 4, {"pope": 1}
        ):
            if re.search(r"red heart|green tree|yellow star|brown house|black arrow|white moon", prompt):
                answers[said] += 1
    assert answers.total() > 60
    assert 0.35 < answers["yes"] / answers.total() < 0.65


def test_training_turns_cover_captions_and_every_task():
    kinds = Counter()
    for index in range(120):
        kinds.update(kind for kind, _, _ in training_turns_by_kind(make_scene("train", index), Rng("mix", index), 6))
    assert set(kinds) == {"caption", *TASKS}
    assert set(DEFAULT_WEIGHTS) == {"caption", *TASKS}


def test_weights_choose_the_mix():
    scene = make_scene("train", 3, kind="sign", quality="clear")
    assert {kind for kind, _, _ in training_turns_by_kind(scene, Rng(0), 20, {"gqa": 1, "pope": 3})} == {"gqa", "pope"}
    captions = training_turns_by_kind(scene, Rng(0), 2, {"caption": 1})
    assert [kind for kind, _, _ in captions] == ["caption", "caption"]


def test_what_does_not_fit_a_scene_is_replaced_by_a_caption():
    plain = make_scene("train", 3, kind="plain", quality="clear")
    assert training_turns_by_kind(plain, Rng(0), 1, {"textvqa": 1, "scienceqa": 1})[0][0] == "caption"


def test_a_scene_gets_one_caption_and_no_prompt_twice():
    twice = 0
    for index in range(100):
        turns = training_turns_by_kind(make_scene("train", index, quality="clear"), Rng("once", index), 8)
        twice += len({prompt for _, prompt, _ in turns}) < 8
        assert sum(kind == "caption" for kind, _, _ in turns) <= 1
    assert twice <= 2


def test_an_unknown_weight_is_refused_with_the_names_there_are():
    with pytest.raises(ValueError, match="no task 'okvqa' to weigh: choose among caption, gqa"):
        training_turns_by_kind(make_scene("train", 0), Rng(0), 1, {"okvqa": 1})


def test_yes_and_no_are_about_balanced_in_training():
    answers: dict[str, Counter] = {}
    for index in range(500):
        for kind, _, said in training_turns_by_kind(make_scene("train", index), Rng("balance", index), 8):
            if said in ("yes", "no"):
                answers.setdefault(kind, Counter())[said] += 1
    for counts in answers.values():
        assert 0.42 < counts["yes"] / counts.total() < 0.58, counts


def test_exercises_ask_openly_what_the_task_asks_by_choice():
    scene = make_scene("train", 5, kind="diagram", quality="clear")
    asked = training_turns_by_kind(scene, Rng(0), 40, {"scienceqa": 1, "mmbench_cn": 1}, exercises=True)
    assert any(len(answer) > 1 for _, _, answer in asked)
    plain = training_turns_by_kind(scene, Rng(0), 40, {"scienceqa": 1, "mmbench_cn": 1})
    assert all(answer in "ABCD" for _, _, answer in plain)
