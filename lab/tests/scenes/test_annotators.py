"""Simulated annotators."""

from collections import Counter

from diffprune.rng import Rng
from diffprune_lab.scenes.annotators import annotate


def test_annotators_mostly_agree_and_say_the_same_every_time():
    said = Counter(said for i in range(300) for said in annotate("red", Rng("annotators", i)))
    assert 0.8 < (said["red"] + said["Red."]) / said.total() < 0.95
    assert annotate("2", Rng(1)) == annotate("2", Rng(1))
