"""Requests of several threads at once, compiled and not: each gets its own answer."""

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch

from diffprune.model import PrunedVLM
from tests import tiny
from tests.contracts.vlm import pruned
from tests.fast.compiled import QUESTIONS, answer, compiled, reference

THREADS = 4


def wrong_answers(vlm: PrunedVLM, requests: int) -> int:
    """How many answers of four threads, each with its own picture and question, are not those of one thread alone."""
    asked = [([tiny.picture(seed)], QUESTIONS[seed % len(QUESTIONS)]) for seed in range(THREADS)]
    wanted = [reference(vlm, images, text) for images, text in asked]
    assert len({tuple(ids.flatten().tolist()) for ids in wanted}) == THREADS, "a mix-up would not be seen"
    together = Barrier(THREADS)

    def ask(number: int) -> int:
        together.wait()
        return sum(not torch.equal(answer(vlm, *asked[number]), wanted[number]) for _ in range(requests))

    with ThreadPoolExecutor(THREADS) as pool:
        return sum(pool.map(ask, range(THREADS)))


@pytest.mark.parametrize("requests", [3, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", ["llava", "llava_next", "qwen2_5_vl"])
def test_threads_on_a_compiled_model_get_their_own_answers(family: str, requests: int) -> None:
    assert wrong_answers(compiled(family, "feature_norm"), requests) == 0


def test_threads_on_a_model_that_is_not_compiled_get_their_own_visual_features() -> None:
    assert wrong_answers(pruned("qwen3_vl", "feature_norm", keep=5), 5) == 0


def test_a_request_waits_until_the_one_before_it_has_left_the_buffers() -> None:
    vlm: Any = compiled("llava", "feature_norm")
    with ThreadPoolExecutor(1) as pool:
        with vlm.fast.turn():
            later = pool.submit(answer, vlm, [tiny.picture(1)], QUESTIONS[0])
            with pytest.raises(TimeoutError):
                later.result(timeout=0.2)
            inner = answer(vlm, [tiny.picture(2)], QUESTIONS[1])  # a thread does not wait for itself
        assert torch.equal(later.result(timeout=60), reference(vlm, [tiny.picture(1)], QUESTIONS[0]))
    assert torch.equal(inner, reference(vlm, [tiny.picture(2)], QUESTIONS[1]))


@pytest.mark.slow
def test_fifty_threads_for_a_minute_get_their_own_answers() -> None:
    vlm = compiled("llava", "feature_norm")
    asked = [([tiny.picture(seed)], QUESTIONS[seed % len(QUESTIONS)]) for seed in range(50)]
    wanted = [reference(vlm, images, text) for images, text in asked]
    end = time.monotonic() + 60

    def ask(number: int) -> tuple[int, int]:
        right = wrong = 0
        while time.monotonic() < end:
            same = torch.equal(answer(vlm, *asked[number]), wanted[number])
            right, wrong = right + same, wrong + (not same)
        return right, wrong

    with ThreadPoolExecutor(50) as pool:
        right, wrong = map(sum, zip(*pool.map(ask, range(50)), strict=True))
    print(f"50 threads, 60 s: {right} right, {wrong} wrong")
    assert wrong == 0 and right >= 50
