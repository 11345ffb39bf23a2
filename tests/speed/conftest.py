"""A tiny model with random weights, and measurements that take no longer than they must."""

import pytest
import torch

from diffprune.model import PrunedVLM
from diffprune.speed import measure, throughput
from diffprune.speed.subject import load_subject


@pytest.fixture(scope="package", autouse=True)
def short_measurements():
    """Two decoded tokens and two pictures are enough to see that rows are right."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "DECODE_STEPS", 2)
        patch.setattr(measure, "WARM_UP", 1)
        patch.setattr(throughput, "POOL", 2)
        patch.setattr(throughput, "LOOP_SECONDS", 0.0)
        patch.setattr(throughput, "FEWEST_ROUNDS", 3)
        yield


@pytest.fixture(scope="package")
def subject() -> PrunedVLM:
    return load_subject("qwen2.5-vl-7b", random_weights=True, tiny=True, device="cpu", dtype=torch.float32)
