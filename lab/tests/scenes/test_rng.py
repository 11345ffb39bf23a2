"""The generator is exact, fair and keyed."""

from collections import Counter

import pytest

from diffprune.rng import Rng, hash_key, mix


def test_the_stream_never_changes():
    rng = Rng(0, "scene", 7)
    assert [rng.word() for _ in range(3)] == [0x96773FC9976A5D72, 0xC46EA9FE6B730D48, 0x4CDD3A4D22A27E57]
    assert hash_key() == 0x0
    assert mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # the first word of SplitMix64 with seed 0


def test_the_same_key_gives_the_same_stream_and_another_key_another():
    one, two = Rng("text", 1), Rng("text", 1)
    assert [one.word() for _ in range(50)] == [two.word() for _ in range(50)]
    keys: list[tuple[int | str, ...]]
    keys = [
        (),
        (0,),
        (0, 0),
        ("",),
        ("0",),
        ("0", ""),
        ("a", "b"),
        ("ab",),
        ("ab", 0),
        (1, "a"),
        ("a", 1),
        (-1,),
        ("x" * 9,),
    ]
    assert len({Rng(*key).word() for key in keys}) == len(keys)


def test_below_is_fair_and_stays_below():
    rng = Rng("fair")
    counts = Counter(rng.below(7) for _ in range(7000))
    assert set(counts) == set(range(7))
    assert all(850 < count < 1150 for count in counts.values())


def test_weighted_follows_its_weights_and_never_draws_a_zero():
    rng = Rng("weights")
    counts = Counter(rng.weighted((3, 0, 1)) for _ in range(4000))
    assert counts[1] == 0
    assert 2800 < counts[0] < 3200


def test_weights_without_anything_to_draw_are_refused():
    with pytest.raises(ValueError, match="leave nothing to draw"):
        Rng("nothing").weighted((0, 0))


def test_shuffle_reaches_every_order_equally_often():
    rng = Rng("orders")
    counts = Counter("".join(rng.shuffle(list("abc"))) for _ in range(6000))
    assert len(counts) == 6
    assert all(850 < count < 1150 for count in counts.values())


def test_shuffle_works_in_place_and_gives_the_list_back():
    items = list(range(10))
    assert Rng("place").shuffle(items) is items
    assert sorted(items) == list(range(10))


@pytest.mark.parametrize("draw", [lambda rng: rng.distinct(9, 4), lambda rng: rng.sample(range(9), 4)])
def test_samples_are_distinct_and_every_item_is_met_equally_often(draw):
    rng = Rng("sample")
    draws = [draw(rng) for _ in range(2250)]
    assert all(len(set(picked)) == 4 for picked in draws)
    for place in range(4):
        counts = Counter(picked[place] for picked in draws)
        assert set(counts) == set(range(9))
        assert all(180 < count < 320 for count in counts.values())
