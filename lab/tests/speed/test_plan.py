"""A plan for a model that the lab brings."""

from diffprune.speed.gpus import GPUS
from diffprune.speed.plan import plan


def test_our_reference_model_can_be_planned():
    full, _, _ = plan("scenes-llava", GPUS["l4"], image=(192, 192), keep=64)
    assert full["num_visual"] == 576
